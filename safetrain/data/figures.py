"""The figures of a split, counted while its rows are written: how many, how long, and where their labels stand."""

from collections import Counter

import numpy as np

from safetrain.core.data.store import Columns
from safetrain.core.records.reports import BINS_PER_DOUBLING, LengthHistogram, LengthQuantiles, SplitReport

DOUBLINGS = 32  # a row's length has 32 bits


class SplitFigures:
    """Takes the rows of a split, some at a time. It does not grow with the rows, only with different lengths."""

    def __init__(self) -> None:
        self._lengths, self._trained = Counter[int](), 0
        self._edges = bin_edges()
        self._rows, self._by_labels, self._labels = np.zeros((3, len(self._edges) - 1), dtype=np.int64)

    def add(self, rows: Columns) -> None:
        """Count some rows."""
        self._lengths.update(rows.lengths.tolist())
        self._trained += int(rows.label_counts.sum())
        self._rows += self._binned(rows.lengths)
        self._by_labels += self._binned(rows.label_counts)
        self._labels += self._labels_by_place(rows)

    def add_documents(self, lengths: np.ndarray, label_counts: np.ndarray) -> None:
        """Count documents (documents,) by their lengths alone: their labels as if they were evenly spread."""
        sizes, counts = np.unique(lengths, return_counts=True)
        self._lengths.update(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))
        labels, most = int(label_counts.sum(dtype=np.int64)), int(lengths.sum(dtype=np.int64)) - len(lengths)
        self._trained += labels
        self._rows += self._binned(lengths)
        self._by_labels += self._binned(label_counts[label_counts > 0])
        beyond = np.zeros(len(self._edges), dtype=np.int64)  # tokens but the first of each, by their place
        for number, edge in enumerate(self._edges.tolist()):
            longer = sizes > edge
            sizes, counts = sizes[longer], counts[longer]
            beyond[number] = ((sizes - max(edge, 1)) * counts).sum()
        self._labels += np.rint(-np.diff(beyond) * (labels / most if most else 0)).astype(np.int64)

    def report(self, label_bytes: int = 0) -> SplitReport:
        """The figures of all rows that were added, at least one; ``label_bytes``: of the text of their labels."""
        lengths = np.array(sorted(self._lengths))
        ends = np.cumsum([self._lengths[length] for length in lengths.tolist()])
        shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_5": 0.995}
        quantiles = {key: _quantile(lengths, ends, share) for key, share in shares.items()}
        tokens = sum(length * count for length, count in self._lengths.items())
        found = LengthQuantiles(**quantiles, max=int(lengths[-1]))
        return SplitReport(int(ends[-1]), tokens, self._trained, found, self._histogram(), label_bytes)

    def _histogram(self) -> LengthHistogram:
        """Without the empty bins at both ends."""
        counts = (self._rows, self._by_labels, self._labels)
        used = np.flatnonzero(np.sum(counts, axis=0))
        first, end = int(used[0]), int(used[-1]) + 1
        rows, by_labels, labels = (tuple(count[first:end].tolist()) for count in counts)
        return LengthHistogram(tuple(self._edges[first : end + 1].tolist()), rows, by_labels, labels)

    def _binned(self, values: np.ndarray) -> np.ndarray:
        """(bins,) how many of ``values``, from 1, are in each bin."""
        return np.bincount(np.searchsorted(self._edges, values) - 1, minlength=len(self._edges) - 1)

    def _labels_by_place(self, rows: Columns) -> np.ndarray:
        """(bins,) labels whose place in their row is in each bin."""
        lengths, ends = rows.lengths, np.cumsum(rows.lengths)
        trained = rows.trained.copy()
        trained[ends - lengths] = False  # nothing predicts a row's first token
        before = np.zeros(len(trained) + 1, dtype=np.uint32)  # labels before each token
        np.cumsum(trained, out=before[1:])
        beyond = np.zeros(len(self._edges), dtype=np.int64)
        for number, edge in enumerate(self._edges.tolist()):
            longer = lengths > edge
            if not longer.all():
                lengths, ends = lengths[longer], ends[longer]
            if not len(ends):
                break
            beyond[number] = (before[ends] - before[ends - lengths + edge]).sum()
        return -np.diff(beyond)


def bin_edges() -> np.ndarray:
    """Ascending, from 0: the powers of two, and between them what divides a doubling evenly, as whole numbers.

    No data set moves them, so two reports of nearly the same data differ in few counts.
    """
    powers = np.arange(BINS_PER_DOUBLING * DOUBLINGS + 1) / BINS_PER_DOUBLING
    return np.unique(np.concatenate([[0], np.rint(2**powers).astype(np.int64)]))


def _quantile(lengths: np.ndarray, ends: np.ndarray, share: float) -> int:
    """The smallest of ``lengths`` that at least ``share`` of the rows do not exceed; ``ends``: how many do not."""
    place = max(0, -int(-share * int(ends[-1]) // 1) - 1)
    return int(lengths[np.searchsorted(ends, place, "right")])
