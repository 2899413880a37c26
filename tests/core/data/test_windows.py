"""The order of rows and windows of documents: each token is predicted once; the largest update is known before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.core.data.token_rows import TokenRows, TokenWindows, token_row
from safetrain.core.data.training_rows import Cursor, TrainingRows, largest_update, rows_at
from safetrain.core.records.settings import updates_per_epoch

END = 0


def documents(lengths: list[int], *, closed: bool = True) -> TokenRows:
    """Documents of distinct tokens, so that each can be recognised; each closed by END where ``closed``."""
    following, rows = 1, []
    for length in lengths:
        ids = list(range(following, following + length))
        following += length
        rows.append(token_row([*ids[:-1], END] if closed else ids, [True] * length))
    return TokenRows.of(rows)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 24), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_and_only_from_its_document(lengths: list[int], size: int, closed: bool) -> None:
    if sum(lengths) < 2:
        return
    data = documents(lengths, closed=closed)
    windows = TokenWindows(data, size, frozenset({END}))
    stream = np.concatenate([row.ids for row in data])
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    predicted = np.zeros(len(stream), dtype=int)
    for window in range(len(windows)):
        pieces = windows.pieces([window])
        assert int(pieces.inputs().sum()) <= size
        starts = (pieces.starts + window * size).tolist()  # in the stream
        for number, row, start in zip(pieces.numbers(range(len(pieces))), pieces, starts, strict=True):
            places = np.arange(start + 1, start + len(row))
            assert np.array_equal(stream[start : start + len(row)], row.ids)
            assert row.labels == len(row) - 1
            predicted[places] += 1
            opener = document_of[start] != document_of[start + 1]
            assert set(document_of[places]) == {number}
            assert not opener or stream[start] == END  # only an end token is seen from the document before
    firsts = np.cumsum([0, *lengths[:-1]])
    expected = np.ones(len(stream), dtype=int)
    expected[firsts if not closed else [0]] = 0
    assert np.array_equal(predicted, expected)


@pytest.mark.parametrize(("rows", "measured"), [(100, 100), (10_000, 3_360)])
def test_of_many_validation_rows_an_evenly_spread_sample_is_measured(rows: int, measured: int) -> None:
    valid = documents([40] * rows)
    cut = TrainingRows(valid, valid).at_length(64, "lora").valid
    assert len(cut) == pytest.approx(measured, abs=2)
    assert [cut[row].ids.tolist() for row in (0, len(cut) - 1)] == [valid[row].ids.tolist() for row in (0, rows - 1)]


LENGTHS = np.random.default_rng(3).lognormal(3.5, 0.8, 200).astype(int) + 8
ROWS = TokenRows.of([token_row([1] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in LENGTHS.tolist()])
NONE = TokenRows.of([])


def sizes_of_run(seed: int, rows_per_update: int, epochs: int) -> list[tuple[int, int]]:
    windows = [Cursor(e, w) for e in range(epochs) for w in range(updates_per_epoch(len(ROWS), rows_per_update))]
    updates = [rows_at(ROWS, cursor, seed, rows_per_update).rows for cursor in windows]
    return [(sum(len(ROWS[r]) - 1 for r in rows), sum(ROWS[r].labels for r in rows)) for rows in updates]


@pytest.mark.parametrize("rows_per_update", [16, 7])
def test_no_update_of_the_orders_that_were_looked_at_is_larger(rows_per_update: int) -> None:
    found = largest_update(ROWS, NONE, rows_per_update, 2, None)
    seen = [size for seed in range(8) for size in sizes_of_run(seed, rows_per_update, 2)]
    assert (found.rows, found.longest) == (rows_per_update, max(LENGTHS) - 1)
    assert found.tokens == max(tokens for tokens, _ in seen)
    assert found.labels == max(labels for _, labels in seen)
    another = [tokens for seed in range(100, 110) for tokens, _ in sizes_of_run(seed, rows_per_update, 2)]
    assert max(another) < 1.25 * found.tokens


def test_the_order_is_that_of_a_plain_loop() -> None:
    """It decides every number of a training, so it must never change."""
    lengths = [len(row) for row in ROWS]
    longest = max(range(len(ROWS)), key=lambda row: lengths[row])
    for seed, epoch in ((42, 0), (42, 1), (7, 3), (42, 0)):
        order = np.random.default_rng([seed, epoch]).permutation(len(ROWS)).tolist()
        place = order.index(longest)
        order[0], order[place] = order[place], order[0]
        for window in range(updates_per_epoch(len(ROWS), 7)):
            expected = sorted(order[window * 7 : (window + 1) * 7], key=lambda row: (-lengths[row], row))
            assert rows_at(ROWS, Cursor(epoch, window), seed, 7).rows == expected
