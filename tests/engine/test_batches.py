"""Every row is seen once per epoch, in an order that a seed decides; padding is never a label."""

import numpy as np

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import Cursor, advance
from safetrain.core.records.settings import updates_per_epoch
from safetrain.engine.batches import BatchLayout, in_order, update_at, widths_of

LENGTHS = (9, 33, 34, 2, 65, 12, 40)
DATA = TokenRows.of([token_row(range(5, 5 + n), [False] + [True] * (n - 1)) for n in LENGTHS])


def epoch_of(seed: int, epoch: int, most_tokens: int, rows_per_update: int) -> list[tuple[int, ...]]:
    windows = updates_per_epoch(len(DATA), rows_per_update)
    return [
        update_at(DATA, Cursor(epoch, w), seed, rows_per_update, BatchLayout(most_tokens)).rows for w in range(windows)
    ]


def test_every_row_is_seen_once_and_the_last_window_is_smaller() -> None:
    windows = epoch_of(seed=1, epoch=0, most_tokens=70, rows_per_update=3)
    assert [len(window) for window in windows] == [3, 3, 1]
    assert sorted(row for window in windows for row in window) == list(range(7))

    layout = BatchLayout(128, rectangles=True)
    assert sorted(row for batch in in_order(DATA, layout) for row in batch.rows) == list(range(7)), "in evaluation too"
    assert epoch_of(1, 0, 1, 4) == epoch_of(1, 0, 64, 4) == epoch_of(1, 0, 1000, 4)


def test_a_gpu_computes_a_long_tail_in_few_shapes_with_little_padding() -> None:
    """Each shape is a program that mlx compiles and keeps for ever; one epoch of a realistic data set."""
    source = np.random.default_rng(3)
    lengths = np.clip(np.exp(source.normal(np.log(120), 0.8, 800)), 8, 1024).astype(int).tolist()
    data = TokenRows.of([token_row([7] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in lengths])
    layout = BatchLayout(4 * int(widths_of(data.inputs().max())), rectangles=True)
    shapes, tokens, real, cursor = set(), 0, 0, Cursor(0, 0)
    for _ in range(updates_per_epoch(len(data), 16)):
        update = update_at(data, cursor, 1, 16, layout)
        parts = [shard for batch in update.micro_batches for shard in batch.shards]
        shapes |= {(shard.layout.blocks, shard.targets.size) for shard in parts}
        assert max(shard.inputs.size for shard in parts) <= layout.most_tokens
        tokens, real = tokens + update.computed_tokens, real + update.input_tokens
        cursor = advance(cursor, len(data), 16)
    assert len({block for block, _ in shapes}) <= 60
    assert len(shapes) <= 100
    assert 1 - real / tokens < 0.2
    widths = widths_of(np.array([1, 32, 33, 512, 513, 640, 1025, 4097])).tolist()
    assert widths == [32, 32, 64, 512, 576, 640, 1152, 4608], "multiples of 32, and of more for long rows"
