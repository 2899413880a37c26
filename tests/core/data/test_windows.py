"""Windows of a stream of documents: every token is predicted once, and none looks beyond its own document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.core.data.token_rows import TokenRows, TokenWindows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import DataError

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
        for number, row, start in zip(pieces.numbers(range(len(pieces))), pieces, pieces.starts.tolist(), strict=True):
            places = np.arange(start + 1, start + len(row))
            assert np.array_equal(stream[start : start + len(row)], row.ids)
            assert row.trained_tokens == len(row) - 1
            predicted[places] += 1
            opener = document_of[start] != document_of[start + 1]
            assert set(document_of[places]) == {number}
            assert not opener or stream[start] == END  # only an end token is seen from the document before
    firsts = np.cumsum([0, *lengths[:-1]])
    expected = np.ones(len(stream), dtype=int)
    expected[firsts if not closed else [0]] = 0
    assert np.array_equal(predicted, expected)


def test_what_is_no_label_stays_none() -> None:
    data = TokenRows.of([token_row([1, 2, 3, END], [False, False, True, True])])
    pieces = TokenWindows(data, 2, frozenset({END})).pieces([0, 1])
    assert pieces.label_counts.tolist() == [1, 1]
    with pytest.raises(DataError, match="nothing to train on"):
        TokenWindows(TokenRows.of([]), 8, frozenset({END}))


@pytest.mark.parametrize(("rows", "measured"), [(100, 100), (10_000, 3_360)])
def test_of_many_validation_rows_an_evenly_spread_sample_is_measured(rows: int, measured: int) -> None:
    valid = documents([40] * rows)
    cut = TrainingRows(valid, valid).cut(64).valid
    assert len(cut) == pytest.approx(measured, abs=2)
    assert [cut[row].ids.tolist() for row in (0, len(cut) - 1)] == [valid[row].ids.tolist() for row in (0, rows - 1)]
