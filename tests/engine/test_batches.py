"""Every row is seen once per epoch, in an order that a seed decides; padding is never a label."""

import numpy as np

from safetrain.core.chat import Rendered
from safetrain.engine.batches import Cursor, advance, in_order, make_batch, update_at, windows_per_epoch

DATA = [Rendered(tuple(range(5, 5 + n)), (False,) + (True,) * (n - 1)) for n in (9, 33, 34, 2, 65, 12, 40)]


def epoch_of(seed: int, epoch: int, batch_size: int, rows_per_update: int) -> list[tuple[int, ...]]:
    windows = windows_per_epoch(len(DATA), rows_per_update)
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
    assert batch.ids.shape == (3, 33)
    assert batch.labels.shape == (3, 32)
    assert np.array(batch.labels).sum(axis=1).tolist() == [8, 32, 1]
    assert np.array(batch.ids)[2, 2:].tolist() == [0] * 31


def test_evaluation_sees_every_row_once() -> None:
    assert sorted(row for batch in in_order(DATA, 3) for row in batch.rows) == list(range(7))
