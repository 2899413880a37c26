"""The order of rows, a function of seed and epoch, and the largest update of a run.

Within an update, rows are sorted, the longest first, and divided into micro-batches with a limit on tokens. So a
micro-batch has at most as many tokens as ``batch_size`` of the longest rows, and at most the rows of its update.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.token_rows import TokenRows, TokenWindows, TrainRows, UpdateRows
from safetrain.core.memory.terms import padded
from safetrain.core.records.settings import LargestUpdate, total_updates, updates_per_epoch

SEEDS = (42, *range(7))  # params.yaml's and seven more: other seeds hardly ever give a larger update
MOST_EPOCHS = 20  # epochs to search: later ones hardly ever have a larger update


@dataclass(frozen=True)
class Cursor:
    """The position in the data: the next update is number ``window`` of ``epoch``, both from 0."""

    epoch: int
    window: int


def largest_update(
    data: TrainRows,
    valid: TokenRows,
    rows_per_update: int,
    num_epochs: int,
    max_steps: int | None,
    seeds: Sequence[int] = SEEDS,
    *,
    rectangles: bool = False,
) -> LargestUpdate:
    """The most rows, tokens and labels in any update of a run, over the orders of several ``seeds``.

    ``longest`` includes the validation rows. ``rectangles``: rows are padded to the longest of them.
    """
    if isinstance(data, TokenWindows):  # all updates are equal
        tokens = min(rows_per_update, len(data)) * int(data.inputs().max())
        longest = max(int(data.inputs().max()), int(valid.lengths.max(initial=1)) - 1)
        return LargestUpdate(rows_per_update, longest, tokens, tokens)
    windows = _windows(data, rows_per_update, num_epochs, max_steps, seeds)
    longest = max(int(rows.lengths[rows.longest]) - 1 for rows in (data, valid) if len(rows))
    return LargestUpdate(
        rows_per_update,
        longest,
        rows_per_update * padded(longest) if rectangles else max(tokens for _, tokens, _ in windows),
        max(labels for _, _, labels in windows),
    )


def largest_windows(
    data: TrainRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int] = SEEDS
) -> list[UpdateRows]:
    """The rows of the update with most tokens, and of the update with most labels if it is a different one.

    Empty for TokenWindows, whose updates are all equally large.
    """
    if isinstance(data, TokenWindows):
        return []
    windows = _windows(data, rows_per_update, num_epochs, max_steps, seeds)
    most = [max(windows, key=lambda window: window[place])[0] for place in (1, 2)]
    return [data.of_update(rows) for rows in (most if most[0] != most[1] else most[:1])]


def _windows(
    data: TokenRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int]
) -> list[tuple[list[int], int, int]]:
    """The updates with most tokens and most labels, for each order and epoch: their rows, tokens and labels."""
    tokens, labels = data.inputs(), data.label_counts
    remaining, windows = total_updates(len(data), rows_per_update, num_epochs, max_steps), []
    for epoch in range(min(num_epochs, MOST_EPOCHS)):
        updates = min(remaining - epoch * updates_per_epoch(len(data), rows_per_update), len(data))
        for seed in seeds if updates > 0 else ():
            order = row_order(seed, epoch, len(data), data.longest)[: updates * rows_per_update]
            starts = range(0, len(order), rows_per_update)
            sums = [np.add.reduceat(sizes[order], starts) for sizes in (tokens, labels)]
            for place in {int(each.argmax()) for each in sums}:
                rows = order[place * rows_per_update : (place + 1) * rows_per_update].tolist()
                windows.append((rows, int(sums[0][place]), int(sums[1][place])))
    return windows


def rows_at(data: TrainRows, cursor: Cursor, seed: int, rows_per_update: int) -> UpdateRows:
    """The rows of an update, or the pieces of its windows, the longest first.

    The first update of an epoch has the longest row of all, so a shape that does not fit fails at once.
    """
    order, first = row_order(seed, cursor.epoch, len(data), data.longest), cursor.window * rows_per_update
    return data.of_update(order[first : first + rows_per_update])


@functools.lru_cache(maxsize=1)  # only the current epoch's: 4 bytes a row
def row_order(seed: int, epoch: int, rows: int, longest: int) -> np.ndarray:
    """A random order of the rows for an epoch, except that the longest row is first."""
    order = np.random.default_rng([seed, epoch]).permutation(rows).astype(np.uint32)
    place = int(np.flatnonzero(order == longest)[0])
    order[[0, place]] = order[[place, 0]]
    return order


def order_fingerprint() -> str:
    """A fingerprint of numpy's shuffling: versions of numpy with the same one can resume each other's runs."""
    return hashlib.blake2b(row_order(1, 2, 4096, 0).tobytes(), digest_size=8).hexdigest()


def advance(cursor: Cursor, rows: int, rows_per_update: int) -> Cursor:
    """The cursor after one update."""
    if cursor.window + 1 < updates_per_epoch(rows, rows_per_update):
        return Cursor(cursor.epoch, cursor.window + 1)
    return Cursor(cursor.epoch + 1, 0)
