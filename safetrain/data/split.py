"""Which rows go to train, valid and test, by a hash of their question; and the figures of a split."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Columns
from safetrain.core.data.words import mixed
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.records.reports import BINS_PER_DOUBLING, LengthHistogram, LengthQuantiles, SplitReport
from safetrain.data.folders import SPLITS

MIN_GROUPS = 3
TRAIN, VALID, TEST = range(3)
DOUBLINGS = 32  # a row's length has 32 bits
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.995)


def split_off(
    names: Sequence[str],
    files: np.ndarray,
    clusters: np.ndarray,
    digests: np.ndarray,
    shares: dict[str, float],
    path: Path,
) -> tuple[np.ndarray, str]:
    """The split of each row, as indices into SPLITS, and in words how they came to be.

    ``names`` are the splits of the files, ``files`` (rows,) the file of each row, ``clusters`` (rows,) numbers of rows,
    equal for those that must stay together, ``digests`` (rows,) uint64 of their questions. Only a split without a file
    takes its share of train. Rows of one cluster stay together: in train where a given file has some of them, unless
    too few are left. A cluster's split depends only on its smallest digest and on the shares, so that other rows never
    move it; but no split is empty, and the text says where that needed other rows. Raises DataError where there are too
    few clusters; ``path`` is the file they are in.
    """
    parts = np.array([SPLITS.index(name) for name in names], dtype=np.uint8)[files]
    missing = {name: share for name, share in shares.items() if name not in names}
    if not missing:
        return parts, "train, valid and test as given"
    in_train = parts == TRAIN
    smallest = np.full(len(parts), np.iinfo(np.uint64).max, dtype=np.uint64)  # of each cluster, by its number
    np.minimum.at(smallest, clusters[in_train], digests[in_train])
    there = np.zeros(len(parts), dtype=np.bool_)
    there[clusters[in_train]] = True
    if there.sum() < MIN_GROUPS:
        raise DataError(
            "Too few different rows to split.",
            where=str(path),
            expected=f"at least {MIN_GROUPS} rows with different questions",
            got=str(there.sum()),
            do="add rows, or name a folder with train, valid and test files; lines of <|endoftext|> divide a text",
        )
    free = there.copy()  # clusters of which a given file has no row
    free[clusters[~in_train]] = False
    if free.sum() <= len(missing):
        free = there
    of_cluster = np.full(len(parts), TRAIN, dtype=np.uint8)
    of_cluster[free], changed = _dealt(mixed(smallest[free]), missing)  # mixed: the smallest of many digests is small
    parts[in_train] = of_cluster[clusters[in_train]]
    sizes = [f"{name} ({counted(int((parts == SPLITS.index(name)).sum()), 'row')})" for name in missing]
    text = f"{' and '.join(sizes)} split off train by content"
    if changed:
        text += f"; {' and '.join(changed)} would have been empty and got the nearest rows, which more rows can move"
    return parts, text


def _dealt(places: np.ndarray, shares: dict[str, float]) -> tuple[np.ndarray, list[str]]:
    """(groups,) the split of each by its place (uint64), and which splits are not as their share says.

    Valid takes the lowest places and test the highest, so that neither share moves the other's rows.
    """
    count, place = len(places), places.astype(np.float64) / 2.0**64
    chosen = {"valid": place < shares.get("valid", 0.0), "test": place >= 1 - shares.get("test", 0.0)}
    wanted = {name: int(chosen[name].sum()) if name in shares else 0 for name in chosen}
    taken = {name: max(number, int(name in shares)) for name, number in wanted.items()}
    while sum(taken.values()) >= count:  # train would be empty
        taken[max(taken, key=lambda name: taken[name])] -= 1
    of_group, ordered = np.full(count, TRAIN, dtype=np.uint8), np.sort(places)  # no two are equal
    of_group[places < ordered[taken["valid"]]] = VALID
    if taken["test"]:
        of_group[places >= ordered[-taken["test"]]] = TEST
    changed = [name for name, number in wanted.items() if taken[name] > number]
    return of_group, changed + ["train"] * any(taken[name] < number for name, number in wanted.items())


class SplitFigures:
    """Counts the rows of a split, some at a time: how many, how long, and where their labels are."""

    def __init__(self) -> None:
        self._lengths, self._trained = Counter[int](), 0
        powers = np.arange(BINS_PER_DOUBLING * DOUBLINGS + 1) / BINS_PER_DOUBLING
        self._edges = np.unique(np.concatenate([[0], np.rint(2**powers).astype(np.int64)]))  # the same for all data
        self._bounds = self._edges + 1  # numpy's bins begin with their lower bound, and these end with their edge
        self._rows, self._by_labels, self._labels = np.zeros((3, len(self._edges) - 1), dtype=np.int64)

    def add(self, rows: Columns) -> None:
        """Count some rows."""
        lengths = rows.lengths.astype(np.int64)
        places = np.arange(1, len(rows.trained) + 1) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        labels = np.bincount(places[rows.trained & (places > 1)])  # nothing predicts a row's first token
        self._count(lengths, rows.label_counts)
        self._labels += np.histogram(np.arange(len(labels)), self._bounds, weights=labels)[0]

    def add_documents(self, lengths: np.ndarray, label_counts: np.ndarray) -> None:
        """Count documents (documents,) by their lengths alone: their labels as if they were evenly spread."""
        self._count(lengths, label_counts)
        sizes, counts = np.unique(lengths.astype(np.int64), return_counts=True)
        labels, most = int(label_counts.sum(dtype=np.int64)), int(lengths.sum(dtype=np.int64)) - len(lengths)
        beyond = [(np.maximum(sizes - max(edge, 1), 0) * counts).sum() for edge in self._edges.tolist()]
        self._labels += np.rint(-np.diff(beyond) * (labels / most if most else 0)).astype(np.int64)

    def report(self, label_bytes: int = 0) -> SplitReport:
        """The figures of all rows that were added, at least one; ``label_bytes``: of the text of their labels."""
        lengths, numbers = np.array(sorted(self._lengths.items())).T
        rows, tokens = int(numbers.sum()), int(lengths @ numbers)
        quantiles = np.quantile(lengths, QUANTILES, weights=numbers, method="inverted_cdf")
        counts = np.stack([self._rows, self._by_labels, self._labels])
        used = np.flatnonzero(counts.sum(axis=0))
        first, end = int(used[0]), int(used[-1]) + 1  # without the empty bins at both ends
        histogram = LengthHistogram(
            tuple(self._edges[first : end + 1].tolist()), *map(tuple, counts[:, first:end].tolist())
        )
        found = LengthQuantiles(*map(int, (*quantiles, lengths[-1])))
        return SplitReport(rows, tokens, self._trained, found, histogram, label_bytes)

    def _count(self, lengths: np.ndarray, label_counts: np.ndarray) -> None:
        self._lengths.update(lengths.tolist())
        self._trained += int(label_counts.sum(dtype=np.int64))
        self._rows += np.histogram(lengths, self._bounds)[0]
        self._by_labels += np.histogram(label_counts, self._bounds)[0]
