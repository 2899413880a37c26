"""The figures of a split are those of its rows, however many are counted together."""

import numpy as np
import pytest

from safetrain.core.data.store import Columns
from safetrain.core.records.reports import SplitReport
from safetrain.data.split import SplitFigures

LENGTHS = np.array([3, 16, 17, 40, 40, 700])  # of each row all tokens are trained but the first and the last


def columns(lengths: np.ndarray) -> Columns:
    ends = np.cumsum(lengths)
    trained = np.ones(ends[-1], dtype=np.bool_)
    trained[ends - lengths] = trained[ends - 1] = False
    zeros = np.zeros(len(lengths), dtype=np.int64)
    return Columns(np.zeros(ends[-1], dtype=np.uint32), trained, lengths, (lengths - 2).astype(np.uint32), zeros, zeros)


def figures(*parts: np.ndarray) -> SplitReport:
    counted = SplitFigures()
    for part in parts:
        counted.add(columns(part))
    return counted.report()


def test_every_row_and_every_label_is_counted_once() -> None:
    report = figures(LENGTHS)
    counts = report.histogram
    assert sum(counts.rows) == sum(counts.rows_by_labels) == report.rows == 6
    assert sum(counts.labels) == report.trained_tokens == int((LENGTHS - 2).sum())
    assert len(counts.edges) == len(counts.rows) + 1
    assert dict(zip(counts.edges[1:], counts.rows, strict=True))[16] == 1, "bins end with their upper edge"


def test_one_more_row_changes_one_count_of_each_kind_and_parts_may_be_counted_in_any_order() -> None:
    assert figures(LENGTHS) == figures(LENGTHS[4:], LENGTHS[:1], LENGTHS[1:4])
    few, more = figures(LENGTHS).histogram, figures(LENGTHS, np.array([100])).histogram
    assert few.edges == more.edges
    assert sum(a != b for a, b in zip(few.rows, more.rows, strict=True)) == 1


@pytest.mark.parametrize("length", [16, 32, 64, 512, 700])
def test_the_share_beyond_a_power_of_two_is_exact(length: int) -> None:
    report = figures(LENGTHS)
    assert report.share_beyond(report.histogram.rows, length) == pytest.approx((length < LENGTHS).mean())
    labels = np.maximum(LENGTHS - 1 - length, 0).sum() / (LENGTHS - 2).sum()
    assert report.share_beyond(report.histogram.labels, length) == pytest.approx(labels)


def test_documents_are_counted_as_rows_of_labels_alone() -> None:
    ends, counted = np.cumsum(LENGTHS), SplitFigures()
    trained, zeros = np.ones(ends[-1], dtype=np.bool_), np.zeros(len(LENGTHS), dtype=np.int64)
    counted.add(Columns(zeros, trained, LENGTHS, (LENGTHS - 1).astype(np.uint32), zeros, zeros))
    documents = SplitFigures()
    documents.add_documents(LENGTHS)
    assert documents.report() == counted.report()
    assert counted.report().trained_tokens == sum(LENGTHS - 1), "nothing predicts a first token"
