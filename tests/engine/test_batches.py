"""Every row is seen once per epoch, in an order that a seed decides; padding is never a label."""

import itertools

import numpy as np
import pytest

from safetrain.core.data.row_order import Cursor, advance
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.memory.terms import padded
from safetrain.core.records.settings import updates_per_epoch
from safetrain.engine.batches import (
    BatchLayout,
    fill,
    in_order,
    make_batch,
    padded_labels,
    plan_widths,
    update_at,
    whole_rows,
)

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


def test_the_rows_of_an_update_do_not_depend_on_the_micro_batch() -> None:
    assert epoch_of(1, 0, 1, 4) == epoch_of(1, 0, 64, 4) == epoch_of(1, 0, 1000, 4)


def test_seed_and_epoch_decide_the_order() -> None:
    assert epoch_of(1, 0, 2, 2) == epoch_of(1, 0, 2, 2)
    assert epoch_of(1, 0, 2, 2) != epoch_of(1, 1, 2, 2)
    assert epoch_of(1, 0, 2, 2) != epoch_of(2, 0, 2, 2)


def test_the_cursor_walks_through_the_epochs() -> None:
    cursor, seen = Cursor(0, 0), []
    for _ in range(5):
        seen.append((cursor.epoch, cursor.window))
        cursor = advance(cursor, rows=7, rows_per_update=3)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize("layout", [BatchLayout(1000), BatchLayout(1000, rectangles=True)])
def test_labels_are_the_trained_tokens_shifted_by_one(layout: BatchLayout) -> None:
    (shard,) = make_batch(DATA, [1, 0, 3], layout).shards
    inputs, weights = np.array(shard.inputs), np.array(shard.weights)
    offsets = np.array(shard.layout.offsets)
    assert weights.tolist() == [1.0] * 41 + [0.0] * 23
    found: list[tuple[int, int]] = []
    for position, target in zip(
        np.array(shard.positions)[:41].tolist(), np.array(shard.targets).tolist(), strict=False
    ):
        found.append((int(inputs[position]), target))
        assert offsets[position] == inputs[position] - 5  # rows count up from 5
    assert found == [pair for row in (1, 0, 3) for pair in itertools.pairwise(DATA[row].ids.tolist())]


def test_lists_are_not_padded_and_rectangles_are_wide_as_their_first_row() -> None:
    (shard,) = make_batch(DATA, [4, 6, 2, 1, 5, 0, 3], BatchLayout(1000)).shards
    assert [(block.rows, block.width) for block in shard.layout.blocks] == [(5, 64), (2, 8)]
    assert shard.inputs.size == sum(len(row.ids) - 1 for row in DATA)
    long = TokenRows.of([token_row([7] * n, [False] + [True] * (n - 1)) for n in (513, 511, 480, 129, 129)])
    (shard,) = make_batch(long, range(5), BatchLayout(10_000)).shards
    assert [(block.rows, block.width) for block in shard.layout.blocks] == [(2, 512), (1, 479), (2, 128)]
    assert [block.gather is None for block in shard.layout.blocks] == [False, True, True]
    (shard,) = make_batch(DATA, [4, 6, 2], BatchLayout(1000, rectangles=True)).shards
    assert [(block.rows, block.width) for block in shard.layout.blocks] == [(3, 64)]
    assert shard.inputs.size == 3 * 64


def test_parts_share_the_work() -> None:
    batch = make_batch(DATA, [4, 6, 2, 1, 5, 0, 3], BatchLayout(1000, shards=2))
    sizes = [shard.inputs.size for shard in batch.shards]
    assert sorted(batch.rows) == list(range(7))
    assert max(sizes) - min(sizes) <= 8
    assert len(make_batch(DATA, [4], BatchLayout(1000, shards=2)).shards) == 1


def test_evaluation_sees_every_row_once_within_its_tokens() -> None:
    for layout in (BatchLayout(128), BatchLayout(128, rectangles=True), BatchLayout(1)):
        batches = list(in_order(DATA, layout))
        assert sorted(row for batch in batches for row in batch.rows) == list(range(7))
        tokens = [shard.inputs.size for batch in batches for shard in batch.shards]
        assert max(tokens) <= (128 if layout.most_tokens > 1 else 64)
    assert [batch.rows for batch in in_order(DATA, BatchLayout(128, rectangles=True))] == [(4, 6), (2, 1), (5, 0, 3)]
    assert [len(batch.rows) for batch in in_order(DATA, BatchLayout(1))] == [1] * 7


def test_the_first_update_has_the_largest_shape() -> None:
    for seed in range(5):
        first = update_at(DATA, Cursor(0, 0), seed, 4, BatchLayout(128))
        assert first.micro_batches[0].rows[0] == 4


def test_a_gpu_computes_a_long_tail_in_few_shapes_with_little_padding() -> None:
    """Each shape is a program that mlx compiles and keeps for ever; one epoch of a realistic data set."""
    source = np.random.default_rng(3)
    lengths = np.clip(np.exp(source.normal(np.log(120), 0.8, 800)), 8, 1024).astype(int).tolist()
    data = TokenRows.of([token_row([7] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in lengths])
    for long_step, fused in ((32, 12), (128, 5)):
        widths = plan_widths(data.inputs(), long_step=long_step)
        assert len(widths) <= 16
        assert all(width % 32 == 0 for width in widths)
        assert sum(width % long_step == 0 for width in widths) >= fused
        assert widths[-1] <= 1.125 * 32 * -(-int(data.inputs().max()) // 32)
        layout = BatchLayout(4 * widths[-1], rectangles=True, widths=widths)
        shapes, tokens, real, cursor = set(), 0, 0, Cursor(0, 0)
        for _ in range(updates_per_epoch(len(data), 16)):
            update = update_at(data, cursor, 1, 16, layout)
            parts = [shard for batch in update.micro_batches for shard in batch.shards]
            shapes |= {(shard.layout.blocks, shard.targets.size) for shard in parts}
            assert max(shard.inputs.size for shard in parts) <= layout.most_tokens
            tokens, real = tokens + update.computed_tokens, real + update.input_tokens
            cursor = advance(cursor, len(data), 16)
        assert len({block for block, _ in shapes}) <= 48
        assert len(shapes) <= 80
        assert 1 - real / tokens < 0.2


def test_planned_widths_are_the_best_there_are() -> None:
    """Against all choices of two."""
    lengths = np.array([10, 40, 40, 90, 100, 300])
    rounded = (32, 64, 96, 128, 320)
    cost = {
        chosen: sum(min(size for size in chosen if size >= length) - length for length in lengths)
        for chosen in itertools.combinations(rounded, 2)
        if 320 in chosen
    }
    assert plan_widths(lengths, most=2) == min(cost, key=lambda chosen: cost[chosen])
    assert plan_widths(np.array([5000] * 3)) == (5024,)
    assert plan_widths(np.arange(1, 40_000))[-1] >= 39_999


def test_rectangles_have_few_numbers_of_rows_and_labels() -> None:
    assert [whole_rows(rows, 10) for rows in (1, 2, 3, 4, 7, 9, 10)] == [1, 2, 2, 4, 4, 8, 10]
    assert [padded_labels(labels, 1024) for labels in (0, 1, 256, 257, 1024)] == [256, 256, 256, 512, 1024]
    assert padded_labels(30, 32) == 64


@pytest.mark.parametrize("rectangles", [False, True])
def test_groups_are_those_of_a_plain_loop(rectangles: bool) -> None:
    """A list is filled with tokens; a rectangle, as wide as its first row, until its padding costs too much."""
    source = np.random.default_rng(8)
    lengths = sorted(source.integers(2, 300, 150).tolist(), reverse=True)
    data = TokenRows.of([token_row([7] * n, [True] * n) for n in lengths])
    for most_tokens in (1, 100, 256, 1000, 10**6):
        groups: list[list[int]] = []
        room = wasted = 0
        for row in range(len(data)):
            own = padded(lengths[row] - 1) if rectangles else lengths[row] - 1
            first = padded(lengths[groups[-1][0]] - 1) if rectangles and groups else own
            wasted += first - own
            if not groups or first > room or wasted > 128:
                groups.append([])
                first, room, wasted = own, most_tokens, 0
            groups[-1].append(row)
            room -= first
        assert list(fill(data, range(len(data)), BatchLayout(most_tokens, rectangles=rectangles))) == groups
