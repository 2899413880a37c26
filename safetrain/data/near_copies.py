"""Finds texts that are nearly the same: their runs of five words overlap by a given share. Exact, and in memory.

Two sets that are similar by Jaccard's measure share one of their first few members, whatever the order of members is:
with a similarity of 0.8 one of the first fifth. With the rarest first, texts that share one of these are candidates.
Each pair of candidates is compared in full, unless both are known to be in one cluster.
"""

from array import array
from collections.abc import Iterator

import numpy as np

from safetrain.core.data.words import Words, mixed

SHINGLE_WORDS = 5
SHINGLE_BASE = np.uint64(0x165667B19E3779F9)
MOST_TEXTS = 2_000_000  # beyond it only equal texts are found
MOST_CANDIDATES = 20_000_000  # pairs that are compared
COUNTER_BITS = 22
BLOCK = 2**20  # runs, or candidates, that are looked at together
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


class Shingles:
    """The different runs of five words of each text."""

    def __init__(self) -> None:
        self._values, self._ends = array("I"), array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, words: Words) -> None:
        """Add the next texts."""
        if len(self) > MOST_TEXTS:
            self._values = array("I")  # they are not compared
            return
        values, bounds = shingles(words)
        begin = self._ends[-1]
        self._values.frombytes(values.astype("<u4").tobytes())
        self._ends.extend((begin + bounds[1:]).tolist())

    def clusters(self, similarity: float) -> tuple[np.ndarray, str]:
        """(texts,) the first text that each is connected to by near copies; and why not all were compared, or ""."""
        if len(self) > MOST_TEXTS:
            return np.arange(len(self)), f"more than {MOST_TEXTS:,} rows: only equal questions were compared"
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        return _CandidateSearch(np.frombuffer(self._values, dtype=np.uint32), ends, similarity).run()


def shingles(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The different runs of each text, as sorted numbers of 32 bits, and (texts + 1,) where they begin.

    A text of fewer words is one run.
    """
    counts = words.counts
    runs = np.where(counts > 0, np.maximum(counts - SHINGLE_WORDS + 1, 1), 0)
    of_text = np.repeat(np.arange(len(counts)), runs)
    first = _inside(runs) + np.repeat(words.bounds[:-1], runs)
    last = np.repeat(words.bounds[1:], runs)
    sums = np.zeros(len(first), dtype=np.uint64)
    padded = np.concatenate([words.hashes, np.zeros(SHINGLE_WORDS, dtype=np.uint64)])
    for place, power in enumerate(SHINGLE_BASE ** np.arange(SHINGLE_WORDS, dtype=np.uint64)):
        sums += np.where(first + place < last, padded[first + place] * power, np.uint64(0))
    numbered = np.unique((of_text.astype(np.uint64) << HALF) | (mixed(sums) >> HALF))
    bounds = np.searchsorted(numbered, np.arange(len(counts) + 1, dtype=np.uint64) << HALF)
    return numbered.astype(np.uint32), bounds


class _CandidateSearch:
    def __init__(self, values: np.ndarray, ends: np.ndarray, similarity: float) -> None:
        self._values, self._starts, self._sizes, self._similarity = values, ends[:-1], np.diff(ends), similarity
        self._labels = np.arange(len(ends) - 1)

    def run(self) -> tuple[np.ndarray, str]:
        """Compare candidates: first those next to each other in the list of a run, then the next but one, …"""
        codes = np.sort(np.concatenate([np.zeros(0, dtype=np.uint64), *self._prefixes()]))
        runs, texts = codes >> HALF, (codes & LOW).astype(np.int64)
        _, firsts, sizes = np.unique(runs, return_index=True, return_counts=True)  # the list of each run
        ends = np.repeat(firsts + sizes, sizes)
        left, at, distance = MOST_CANDIDATES, np.arange(len(codes)), 0
        while len(at):
            distance += 1
            at = at[at + distance < ends[at]]
            for some in np.array_split(at, len(at) // BLOCK + 1):
                left -= self._compare(texts[some], texts[some + distance])
            if left <= 0:
                return self._labels, f"more than {MOST_CANDIDATES:,} pairs of questions resemble each other"
            if distance.bit_count() == 1:  # a large family is soon one cluster: its lists need no more comparison
                own = self._labels[texts]
                several = np.minimum.reduceat(own, firsts) != np.maximum.reduceat(own, firsts)
                at = at[np.repeat(several, sizes)[at]]
        return self._labels, ""

    def _prefixes(self) -> Iterator[np.ndarray]:
        """Codes of (run, text) for the first runs of each text, the rarest being first."""
        mask = np.uint32(2**COUNTER_BITS - 1)
        frequency = np.zeros(2**COUNTER_BITS, dtype=np.int64)
        for start in range(0, len(self._values), BLOCK):
            frequency += np.bincount(self._values[start : start + BLOCK] & mask, minlength=len(frequency))
        for batch in _batches(self._sizes):
            sizes = self._sizes[batch]
            values, of_text = self._runs(np.arange(batch.start, batch.stop))
            wanted = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9).astype(np.int64) + 1, 0)
            order = np.lexsort((frequency[values & mask], of_text))  # stable: of equally rare ones the smaller number
            order = order[_inside(sizes) < wanted[of_text]]
            yield (values[order].astype(np.uint64) << HALF) | (of_text[order] + batch.start).astype(np.uint64)

    def _runs(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs of some texts, and which of the texts each is of."""
        sizes = self._sizes[texts]
        places = np.repeat(self._starts[texts], sizes) + _inside(sizes)
        return self._values[places], np.repeat(np.arange(len(texts)), sizes)

    def _compare(self, first: np.ndarray, second: np.ndarray) -> int:
        """Compare pairs of two clusters, and give near copies one label; returns how many were compared."""
        sizes = self._sizes[first], self._sizes[second]
        wanted = self._labels[first] != self._labels[second]
        wanted &= np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
        codes = np.unique((first[wanted].astype(np.uint64) << HALF) | second[wanted].astype(np.uint64))
        first, second = (codes >> HALF).astype(np.int64), (codes & LOW).astype(np.int64)
        for batch in _batches(self._sizes[first] + self._sizes[second]):
            near = self._are_near(first[batch], second[batch])
            self._connect(first[batch][near], second[batch][near])
        return len(codes)

    def _are_near(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        (values, pair), (others, other_pair) = self._runs(first), self._runs(second)
        keys = np.concatenate([pair, other_pair]).astype(np.uint64) << HALF | np.concatenate([values, others])
        keys.sort()
        twice = keys[1:][keys[1:] == keys[:-1]] >> HALF
        common = np.bincount(twice.astype(np.int64), minlength=len(first))
        together = self._sizes[first] + self._sizes[second]
        near: np.ndarray = common * (1 + self._similarity) >= self._similarity * together - 1e-9
        return near

    def _connect(self, first: np.ndarray, second: np.ndarray) -> None:
        """Give the clusters of each pair the smaller of their two labels, which is that of their first text."""
        while not np.array_equal(one := self._labels[first], other := self._labels[second]):
            np.minimum.at(self._labels, np.maximum(one, other), np.minimum(one, other))
            while not np.array_equal(self._labels, further := self._labels[self._labels]):
                self._labels = further


def _batches(sizes: np.ndarray) -> Iterator[slice]:
    """Neighbours whose sizes are about BLOCK together."""
    ends, start = np.cumsum(sizes), 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
        yield slice(start, stop)
        start = stop


def _inside(sizes: np.ndarray) -> np.ndarray:
    """Numbers from 0 in each of some groups of these sizes, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
