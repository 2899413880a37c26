"""Plans the few shapes that a run on a GPU computes in, so that few programs are compiled (mlx keeps each for ever)."""

from collections.abc import Sequence

from safetrain.core.data.row_order import Cursor, advance, rows_at
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.settings import total_updates
from safetrain.engine.batches import LABEL_STEP, Layout, fill

MOST_SHAPES = 16
MOST_CANDIDATES = 256  # sizes that are considered
TOKEN_STEP = 128  # CUDA's flash attention has a backward pass for multiples of this only


def plan_sizes(
    needs: Sequence[tuple[int, int]], most: int = MOST_SHAPES, step: int = TOKEN_STEP
) -> list[tuple[int, int]]:
    """At most ``most`` pairs (tokens, labels) that hold every need with the least padding, smallest first.

    Exact, by dynamic programming over the distinct sizes in steps of ``step``.
    """
    counts: dict[int, int] = {}
    most_tokens = max(tokens for tokens, _ in needs)
    step *= max(1, -(-most_tokens // (step * MOST_CANDIDATES)))
    for tokens, _ in needs:
        rounded = -(-tokens // step) * step
        counts[rounded] = counts.get(rounded, 0) + 1
    sizes = sorted(counts)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best += [(float("inf"), ())] * len(sizes)
    for _ in range(most):
        new = list(best)
        for stop in range(1, len(sizes) + 1):
            cost = 0.0
            for start in range(stop - 1, -1, -1):
                cost += counts[sizes[start]] * (sizes[stop - 1] - sizes[start])
                if best[start][0] + cost < new[stop][0]:
                    new[stop] = (best[start][0] + cost, (*best[start][1], sizes[stop - 1]))
        best = new
    chosen = best[-1][1]
    pairs = []
    below = 0
    for size in chosen:
        labels = max((labels for tokens, labels in needs if below < tokens <= size), default=0)
        pairs.append((size, -(-max(labels, 1) // LABEL_STEP) * LABEL_STEP))
        below = size
    return pairs


def needs_of_run(
    data: TokenRows, seed: int, rows_per_update: int, epochs: int, max_steps: int | None, layout: Layout
) -> list[tuple[int, int]]:
    """(tokens, labels) of every micro-batch of a run: the order is known before it starts."""
    cursor, needs = Cursor(0, 0), list[tuple[int, int]]()
    for _ in range(total_updates(len(data), rows_per_update, epochs, max_steps)):
        for rows in fill(data, rows_at(data, cursor, seed, rows_per_update), layout):
            needs.append((int(data.inputs(rows).sum()), int(data.label_counts[rows].sum())))
        cursor = advance(cursor, len(data), rows_per_update)
    return needs
