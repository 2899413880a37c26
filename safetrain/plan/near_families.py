"""Texts that resemble each other by runs which very many share: compared by kinds of texts, not one by one.

Of two such texts that share no rare run (those that do are found by it), only the frequent runs and the number of all
runs matter. Texts that are equal in both make a class, and few classes stand for very many texts.
"""

from dataclasses import dataclass, field

import numpy as np

from safetrain.core.data.words import mixed

NONE = np.iinfo(np.int64).max


@dataclass
class Families:
    """The texts whose frequent runs alone can make them near copies of others, as they are found."""

    numbers: list[np.ndarray] = field(default_factory=list)  # ascending
    signatures: list[np.ndarray] = field(default_factory=list)  # uint64, equal for equal sets of frequent runs
    frequent: list[np.ndarray] = field(default_factory=list)  # how many of their runs are
    sizes: list[np.ndarray] = field(default_factory=list)  # how many runs they have

    def add(
        self, values: np.ndarray, of_text: np.ndarray, numbers: np.ndarray, often: np.ndarray, few: np.ndarray
    ) -> None:
        """Of a block: its runs, the text of each, which runs are frequent, and how many rare ones make no class."""
        sizes = np.bincount(of_text, minlength=len(numbers))
        frequent = np.bincount(of_text[often], minlength=len(numbers))
        chosen = (sizes > 0) & (sizes - frequent < few)
        sums = np.concatenate([[np.uint64(0)], np.cumsum(np.where(often, mixed(values.astype(np.uint64)), 0))])
        ends = np.cumsum(sizes)
        self.numbers.append(numbers[chosen].astype(np.uint32))
        self.signatures.append((sums[ends] - sums[ends - sizes])[chosen])
        self.frequent.append(frequent[chosen].astype(np.uint32))
        self.sizes.append(sizes[chosen].astype(np.uint32))

    def classes(self) -> "Classes":
        """All of them, by class."""
        numbers, frequent, sizes = (np.concatenate(each) for each in (self.numbers, self.frequent, self.sizes))
        key = mixed(np.concatenate(self.signatures) + sizes.astype(np.uint64))
        _, firsts, of_text = np.unique(key, return_index=True, return_inverse=True)
        return Classes(numbers, of_text, numbers[firsts], frequent[firsts], sizes[firsts])


@dataclass(frozen=True)
class Classes:
    """(texts,) ``numbers`` of texts, ascending, and the class of each; the others (classes,): what is said of each."""

    numbers: np.ndarray
    of_text: np.ndarray
    firsts: np.ndarray
    frequent: np.ndarray
    sizes: np.ndarray

    def rare_runs(self, number: int) -> np.ndarray:
        """As many runs as a text of the class has rare ones, such as no other class has."""
        count = int(self.sizes[number] - self.frequent[number])
        return mixed((np.uint64(number) << np.uint64(32)) + np.arange(1, count + 1, dtype=np.uint64)) >> np.uint64(32)

    def pairs(self, near: np.ndarray, similarity: float, sides: np.ndarray) -> np.ndarray:
        """Codes of pairs of texts, by the ``near`` pairs of classes: each with the first near one of each side."""
        among = self.frequent * (1 + similarity) >= similarity * 2 * self.sizes - 1e-9
        itself = np.flatnonzero(among)
        linked = np.concatenate([near, near[:, ::-1], np.stack([itself, itself], axis=1)])
        codes = [_codes(self.firsts[near[:, 0]], self.firsts[near[:, 1]])]
        of_side = sides[self.numbers]
        for side in np.unique(of_side).tolist():
            some = of_side == side
            first = np.full(len(self.firsts), NONE)
            np.minimum.at(first, self.of_text[some], self.numbers[some])
            leader = np.full(len(self.firsts), NONE)
            np.minimum.at(leader, linked[:, 0], first[linked[:, 1]])
            mine = leader[self.of_text]
            known = (mine != NONE) & (mine != self.numbers)
            codes.append(_codes(mine[known], self.numbers[known]))
        return np.concatenate(codes)


def _codes(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    low, high = np.minimum(one, other).astype(np.uint64), np.maximum(one, other).astype(np.uint64)
    return (low << np.uint64(32)) | high
