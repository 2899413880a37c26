"""Finds texts that are nearly the same: their runs of five words overlap by a given share. Exact, and in memory.

Two sets that are similar by Jaccard's measure share one of their first few members, whatever the order of members is:
with a similarity of 0.8 one of the first fifth. With the rarest first, texts that share one of these are candidates,
and each pair of candidates is compared in full. Pairs inside a cluster that is known already are left out.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.words import Words, shingles

MOST_TEXTS = 2_000_000  # beyond it only equal texts are found
MOST_CANDIDATES = 20_000_000  # pairs that are compared
COUNTER_BITS = 22
BLOCK = 2**20  # runs, or candidates, that are looked at together


@dataclass(frozen=True)
class NearCopies:
    """(texts,) ``clusters``: the first text that each is connected to, and pairs (pairs, 2) that connect them.

    ``left_out`` says why some were not compared; empty where all were.
    """

    clusters: np.ndarray
    pairs: np.ndarray
    left_out: str = ""


class Shingles:
    """The runs of five words of each text."""

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

    def find(self, chosen: np.ndarray, similarity: float, sides: np.ndarray) -> NearCopies:
        """Near copies among the ``chosen`` texts (rows,), ascending; each has a partner on each of ``sides`` (rows,).

        The result counts places in ``chosen``.
        """
        if len(self) > MOST_TEXTS:
            said = f"more than {MOST_TEXTS:,} rows: only equal questions were compared"
            return NearCopies(np.arange(len(chosen)), np.zeros((0, 2), dtype=np.int64), said)
        values, ends = np.frombuffer(self._values, dtype=np.uint32), np.frombuffer(self._ends, dtype=np.uint64)
        return _Join(values, ends.astype(np.int64), chosen, similarity, sides).run()


class _Join:
    """One search. Texts are numbered by their place in ``chosen``."""

    def __init__(
        self, values: np.ndarray, ends: np.ndarray, chosen: np.ndarray, similarity: float, sides: np.ndarray
    ) -> None:
        self._values, self._starts, self._similarity = values, ends[chosen], similarity
        self._sizes = ends[chosen + 1] - self._starts
        self._labels, self._left = np.arange(len(chosen)), MOST_CANDIDATES
        _, self._sides = np.unique(sides[chosen], return_inverse=True)
        self._has_partner = np.zeros((len(chosen), int(self._sides.max(initial=0)) + 1), dtype=np.bool_)
        self._found = [np.zeros((0, 2), dtype=np.int64)]

    def run(self) -> NearCopies:
        """Compare the candidates: first those next to each other in the list of a run, then the next but one, …"""
        codes = np.sort(np.concatenate([np.zeros(0, dtype=np.uint64), *self._prefixes()]))
        runs, texts = codes >> np.uint64(32), (codes & np.uint64(2**32 - 1)).astype(np.int64)
        at, distance, left_out = np.arange(len(codes)), 0, ""
        while len(at) and not left_out:
            distance += 1
            at = at[: np.searchsorted(at, max(0, len(codes) - distance))]
            at = at[runs[at] == runs[at + distance]]
            for start in range(0, len(at), BLOCK):
                some = at[start : start + BLOCK]
                self._compare(texts[some], texts[some + distance])
            if self._left <= 0:
                left_out = (
                    f"more than {MOST_CANDIDATES:,} pairs of questions resemble each other: not all were compared"
                )
        return NearCopies(self._clusters(np.arange(len(self._labels))), np.concatenate(self._found), left_out)

    def _prefixes(self) -> Iterator[np.ndarray]:
        """Codes of (run, text) for the first runs of each text, the rarest being first."""
        mask = np.uint32(2**COUNTER_BITS - 1)
        frequency = np.zeros(2**COUNTER_BITS, dtype=np.int64)
        for first, stop in self._blocks():
            values, _ = self._runs(np.arange(first, stop))
            frequency += np.bincount(values & mask, minlength=2**COUNTER_BITS)
        for first, stop in self._blocks():
            values, of_text = self._runs(np.arange(first, stop))
            sizes = self._sizes[first:stop]
            wanted = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9).astype(np.int64) + 1, 0)
            order = np.lexsort((frequency[values & mask], of_text))  # stable: of equally rare ones the smaller number
            rank = np.arange(len(values)) - (np.cumsum(sizes) - sizes)[of_text]
            order = order[rank < wanted[of_text]]
            yield (values[order].astype(np.uint64) << np.uint64(32)) | (of_text[order] + first).astype(np.uint64)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Texts that stand together, with about BLOCK runs."""
        ends, first = np.cumsum(self._sizes), 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
            yield first, stop
            first = stop

    def _runs(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs of some texts, and which of the texts each is of."""
        sizes = self._sizes[texts]
        of_text = np.repeat(np.arange(len(texts)), sizes)
        inside = np.arange(len(of_text)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self._values[np.repeat(self._starts[texts], sizes) + inside], of_text

    def _compare(self, first: np.ndarray, second: np.ndarray) -> None:
        """Connect those of some pairs that are near copies."""
        sizes = self._sizes[first], self._sizes[second]
        wanted = np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
        wanted &= self._is_wanted(first, second)
        codes = np.unique((first[wanted].astype(np.uint64) << np.uint64(32)) | second[wanted].astype(np.uint64))
        first, second = (codes >> np.uint64(32)).astype(np.int64), (codes & np.uint64(2**32 - 1)).astype(np.int64)
        ends, start = np.cumsum(self._sizes[first] + self._sizes[second]), 0
        while start < len(codes):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
            one, other = first[start:stop], second[start:stop]
            self._left -= stop - start
            near = self._are_near(one, other)
            self._connect(np.stack([one[near], other[near]], axis=1))
            start = stop

    def _is_wanted(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Which pairs may tell something: of two clusters, or of two sides where one has no partner there yet."""
        apart = self._clusters(first) != self._clusters(second)
        sides = self._sides[first], self._sides[second]
        alone = ~self._has_partner[first, sides[1]] | ~self._has_partner[second, sides[0]]
        return apart | ((sides[0] != sides[1]) & alone)

    def _are_near(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        (values, pair), (others, other_pair) = self._runs(first), self._runs(second)
        keys = np.concatenate([pair, other_pair]).astype(np.uint64) << np.uint64(32) | np.concatenate([values, others])
        keys.sort()
        twice = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(32)
        common = np.bincount(twice.astype(np.int64), minlength=len(first))
        together = self._sizes[first] + self._sizes[second]
        near: np.ndarray = common * (1 + self._similarity) >= self._similarity * together - 1e-9
        return near

    def _connect(self, pairs: np.ndarray) -> None:
        """Make one cluster of the two of each pair."""
        if not len(pairs):
            return
        self._found.append(pairs)
        self._has_partner[pairs[:, 0], self._sides[pairs[:, 1]]] = True
        self._has_partner[pairs[:, 1], self._sides[pairs[:, 0]]] = True
        while True:
            first, second = self._clusters(pairs[:, 0]), self._clusters(pairs[:, 1])
            apart = first != second
            if not apart.any():
                return
            np.minimum.at(self._labels, np.maximum(first, second)[apart], np.minimum(first, second)[apart])

    def _clusters(self, texts: np.ndarray) -> np.ndarray:
        """(texts,) the first text of the cluster of each: labels lead to it in steps."""
        found = self._labels[texts]
        while not np.array_equal(found, further := self._labels[found]):
            found = further
        return found
