"""Every row is seen once per epoch, in an order that a seed decides; padding is never a label."""

import itertools

import numpy as np

from safetrain.core.chat import Rendered
from safetrain.core.settings import updates_per_epoch
from safetrain.engine.batches import Cursor, advance, in_order, make_batch, update_at

DATA = [Rendered(tuple(range(5, 5 + n)), (False,) + (True,) * (n - 1)) for n in (9, 33, 34, 2, 65, 12, 40)]


def epoch_of(seed: int, epoch: int, batch_size: int, rows_per_update: int) -> list[tuple[int, ...]]:
    windows = updates_per_epoch(len(DATA), rows_per_update)
    return [update_at(DATA, Cursor(epoch, w), seed, batch_size, rows_per_update).rows for w in range(windows)]


def test_every_row_is_seen_once_and_the_last_window_is_smaller() -> None:
    windows = epoch_of(seed=1, epoch=0, batch_size=2, rows_per_update=3)
    assert [len(window) for window in windows] == [3, 3, 1]
    assert sorted(row for window in windows for row in window) == list(range(7))


def test_the_rows_of_an_update_do_not_depend_on_the_micro_batch() -> None:
    assert epoch_of(1, 0, 1, 4) == epoch_of(1, 0, 4, 4) == epoch_of(1, 0, 3, 4)


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


def test_labels_are_the_trained_tokens_shifted_by_one() -> None:
    batch = make_batch(DATA, [0, 1, 3])
    inputs, weights = np.array(batch.inputs), np.array(batch.weights)
    assert inputs.shape == (3, 32)
    assert inputs[2].tolist() == [5] + [0] * 31
    assert weights.tolist() == [1.0] * 41 + [0.0] * 23
    found: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for position, target in zip(
        np.array(batch.positions)[:41].tolist(), np.array(batch.targets).tolist(), strict=False
    ):
        found[position // 32].append((int(inputs.ravel()[position]), target))
    for index, row in enumerate((0, 1, 3)):
        ids = DATA[row].ids
        assert found[index] == list(itertools.pairwise(ids))


def test_evaluation_sees_every_row_once_within_its_tokens() -> None:
    batches = list(in_order(DATA, 128))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(7))
    assert [batch.inputs.shape for batch in batches] == [(2, 64), (2, 64), (3, 32)]
    assert [batch.inputs.shape[0] for batch in in_order(DATA, 1)] == [1] * 7


def test_the_first_update_has_the_largest_shape() -> None:
    for seed in range(5):
        first = update_at(DATA, Cursor(0, 0), seed, batch_size=2, rows_per_update=4)
        assert first.micro_batches[0].rows[0] == 4
        assert first.micro_batches[0].inputs.shape == (2, 64)
