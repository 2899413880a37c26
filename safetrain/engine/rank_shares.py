"""Which rank computes which rows, and how fast each rank is.

Who computes a row changes a sum by rounding alone: random numbers belong to rows (engine/randomness.py), and each label
counts for one in all of the update's.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FIRST_UPDATES = 2  # that are not timed: kernels are compiled, files come from the disk
TIMED_UPDATES = 8
WORTH_IT = 0.2  # of its share: by less, a rank's share is not changed
SLOWEST = 0.01  # of the mean speed


@dataclass(frozen=True)
class Share:
    """Which rank of how many, by their speeds, which are relative to each other."""

    rank: int = 0
    speeds: tuple[float, ...] = (1.0,)

    def of(self, sizes: np.ndarray) -> np.ndarray:
        """Places of this rank's rows among rows of ``sizes`` (rows,) tokens, the longest first; in their order."""
        return np.array(deal(sizes, self.speeds)[self.rank], dtype=np.int64)


WHOLE = Share()


def deal(sizes: np.ndarray, speeds: Sequence[float]) -> list[list[int]]:
    """The places in ``sizes`` that each rank gets: every row goes where it would be done first.

    Longest first, this is at most a third above the best there is (Graham 1969, for equal speeds).
    """
    places: list[list[int]] = [[] for _ in speeds]
    if len(speeds) == 1:
        return [list(range(len(sizes)))]
    if len(set(speeds)) == 1:  # the one with least work
        least = [(0, rank) for rank in range(len(speeds))]
        for place, size in enumerate(sizes.tolist()):
            done, rank = least[0]
            heapq.heapreplace(least, (done + size, rank))
            places[rank].append(place)
        return places
    work = np.zeros(len(speeds))
    for place, size in enumerate(sizes.tolist()):
        rank = int(((work + size) / np.array(speeds)).argmin())
        work[rank] += size
        places[rank].append(place)
    return places


@dataclass
class Speeds:
    """Measures each rank over the first updates; every rank is told the same numbers and so comes to the same end."""

    seconds: list[np.ndarray] = field(default_factory=list)  # of each update, (ranks,)
    tokens: list[np.ndarray] = field(default_factory=list)

    def add(self, seconds: np.ndarray, tokens: np.ndarray) -> list[float]:
        """What an update took each rank, (ranks,) each; the speeds to go on with, and nothing before they are known."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        if len(self.seconds) < FIRST_UPDATES + TIMED_UPDATES:
            return []
        took, made = (np.sum(each[FIRST_UPDATES:], axis=0) for each in (self.seconds, self.tokens))
        if not (took > 0).all() or not (made > 0).all():
            return [1.0] * len(took)
        speeds = made / took
        speeds = np.maximum(np.round(speeds / speeds.mean(), 2), SLOWEST)
        return speeds.tolist() if np.abs(speeds - 1).max() > WORTH_IT else [1.0] * len(took)
