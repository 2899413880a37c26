"""The figures of a split are those of its rows, however many are counted together."""

import numpy as np

from safetrain.core.records.reports import SplitReport
from safetrain.data.split import SplitFigures

LENGTHS = np.array([3, 16, 17, 40, 40, 700])


def figures(*parts: np.ndarray) -> SplitReport:
    counted = SplitFigures()
    for part in parts:
        counted.add(part, part - 1)
    return counted.report()


def test_every_row_and_every_label_is_counted_once_and_parts_may_be_counted_in_any_order() -> None:
    report = figures(LENGTHS)
    assert (report.rows, report.tokens, report.trained_tokens) == (6, 816, 810)
    assert (report.lengths.p50, report.lengths.max) == (17, 700)
    assert figures(LENGTHS[4:], LENGTHS[:1], LENGTHS[1:4]) == report
