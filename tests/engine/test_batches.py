"""Every row is seen once per epoch, in an order that a seed decides; padding is never a label."""

import dataclasses
import itertools

import numpy as np
import pytest

from safetrain.core.data.row_order import Cursor, advance
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.memory_terms import padded
from safetrain.core.settings import updates_per_epoch
from safetrain.engine.batches import Layout, fill, in_order, make_batch, update_at
from safetrain.engine.shapes import needs_of_run, plan_sizes

LENGTHS = (9, 33, 34, 2, 65, 12, 40)
DATA = TokenRows.of([token_row(range(5, 5 + n), [False] + [True] * (n - 1)) for n in LENGTHS])


def epoch_of(seed: int, epoch: int, most_tokens: int, rows_per_update: int) -> list[tuple[int, ...]]:
    windows = updates_per_epoch(len(DATA), rows_per_update)
    return [update_at(DATA, Cursor(epoch, w), seed, rows_per_update, Layout(most_tokens)).rows for w in range(windows)]


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


@pytest.mark.parametrize("layout", [Layout(1000), Layout(1000, list_like=False), Layout(1000, masked=True)])
def test_labels_are_the_trained_tokens_shifted_by_one(layout: Layout) -> None:
    (part,) = make_batch(DATA, [1, 0, 3], layout).parts
    inputs, weights = np.array(part.inputs), np.array(part.weights)
    offsets, lengths = np.array(part.layout.offsets), np.array(part.row_lengths)
    assert weights.tolist() == [1.0] * 41 + [0.0] * 23
    found: list[tuple[int, int]] = []
    for position, target in zip(np.array(part.positions)[:41].tolist(), np.array(part.targets).tolist(), strict=False):
        found.append((int(inputs[position]), target))
        assert offsets[position] == inputs[position] - 5  # rows count up from 5
    assert found == [pair for row in (1, 0, 3) for pair in itertools.pairwise(DATA[row].ids.tolist())]
    assert lengths[np.array(part.positions)[0]] == 32


def test_lists_are_not_padded_and_rectangles_are_wide_as_their_first_row() -> None:
    (part,) = make_batch(DATA, [4, 6, 2, 1, 5, 0, 3], Layout(1000)).parts
    assert [(block.rows, block.width) for block in part.layout.blocks] == [(5, 64), (2, 8)]
    assert part.inputs.size == sum(len(row.ids) - 1 for row in DATA)
    long = TokenRows.of([token_row([7] * n, [False] + [True] * (n - 1)) for n in (513, 511, 480, 129, 129)])
    (part,) = make_batch(long, range(5), Layout(10_000)).parts
    assert [(block.rows, block.width) for block in part.layout.blocks] == [(2, 512), (1, 479), (2, 128)]
    assert [block.gather is None for block in part.layout.blocks] == [False, True, True]
    (part,) = make_batch(DATA, [4, 6, 2], Layout(1000, list_like=False)).parts
    assert [(block.rows, block.width) for block in part.layout.blocks] == [(3, 64)]
    assert part.inputs.size == 3 * 64


def test_parts_share_the_work() -> None:
    batch = make_batch(DATA, [4, 6, 2, 1, 5, 0, 3], Layout(1000, parts=2))
    sizes = [part.inputs.size for part in batch.parts]
    assert sorted(batch.rows) == list(range(7))
    assert max(sizes) - min(sizes) <= 8
    assert len(make_batch(DATA, [4], Layout(1000, parts=2)).parts) == 1


def test_evaluation_sees_every_row_once_within_its_tokens() -> None:
    for layout in (Layout(128), Layout(128, list_like=False), Layout(1)):
        batches = list(in_order(DATA, layout))
        assert sorted(row for batch in batches for row in batch.rows) == list(range(7))
        tokens = [part.inputs.size for batch in batches for part in batch.parts]
        assert max(tokens) <= (128 if layout.most_tokens > 1 else 64)
    assert [batch.rows for batch in in_order(DATA, Layout(128, list_like=False))] == [(4, 6), (2, 1), (5, 0, 3)]
    assert [len(batch.rows) for batch in in_order(DATA, Layout(1))] == [1] * 7


def test_the_first_update_has_the_largest_shape() -> None:
    for seed in range(5):
        first = update_at(DATA, Cursor(0, 0), seed, 4, Layout(128))
        assert first.micro_batches[0].rows[0] == 4


def test_sixteen_shapes_hold_a_long_tail_with_little_padding() -> None:
    """What a GPU would compile for a realistic data set."""
    source = np.random.default_rng(3)
    lengths = np.clip(np.exp(source.normal(np.log(120), 0.8, 2000)), 8, 1024).astype(int).tolist()
    data = TokenRows.of([token_row([7] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in lengths])
    layout = Layout(4 * 1024, masked=True)
    needs = needs_of_run(data, 1, 16, 2, None, layout)
    sizes = plan_sizes(needs)
    assert len(sizes) <= 16
    held = [next(size for size in sizes if size[0] >= tokens and size[1] >= labels) for tokens, labels in needs]
    padding = 1 - sum(tokens for tokens, _ in needs) / sum(size for size, _ in held)
    assert padding < 0.05
    assert len(plan_sizes(needs, most=1)) == 1
    layout = dataclasses.replace(layout, sizes=tuple(sizes))
    update = update_at(data, Cursor(1, 3), 1, 16, layout)
    shapes = {(part.inputs.size, part.targets.size) for batch in update.micro_batches for part in batch.parts}
    assert shapes <= set(sizes)


def test_plans_are_the_best_there_are() -> None:
    """Against all choices of two sizes."""
    needs = [(tokens, 1) for tokens in (10, 20, 20, 50, 60, 200)]
    cost = {
        chosen: sum(min(size for size in chosen if size >= tokens) - tokens for tokens, _ in needs)
        for chosen in itertools.combinations((10, 20, 50, 60, 200), 2)
        if 200 in chosen
    }
    assert tuple(size for size, _ in plan_sizes(needs, most=2, step=1)) == min(cost, key=lambda chosen: cost[chosen])


@pytest.mark.parametrize("list_like", [True, False])
def test_groups_are_those_of_a_plain_loop(list_like: bool) -> None:
    source = np.random.default_rng(8)
    lengths = sorted(source.integers(2, 300, 150).tolist(), reverse=True)
    data = TokenRows.of([token_row([7] * n, [True] * n) for n in lengths])
    for most_tokens in (1, 100, 256, 1000, 10**6):
        groups: list[list[int]] = []
        room = 0
        for row in range(len(data)):
            first = row if list_like or not groups else groups[-1][0]
            if not groups or width_of(lengths[first], list_like) > room:
                groups.append([])
                first, room = row, most_tokens
            groups[-1].append(row)
            room -= width_of(lengths[first], list_like)
        assert fill(data, range(len(data)), Layout(most_tokens, list_like=list_like)) == groups


def width_of(length: int, list_like: bool) -> int:
    return length - 1 if list_like else padded(length - 1)
