"""The curve of a training of any length in a bounded number of points, made while its records are read."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_BUCKETS = 1024  # more than any terminal has columns and dots


@dataclass(frozen=True)
class Point:
    """The mean of some records, at the last one's step."""

    step: int
    value: float


class Curve:
    """Takes values in the order of their steps; neighbours are put together when there are too many."""

    def __init__(self) -> None:
        self._size = 1  # values in a bucket
        self._steps = list[int]()
        self._sums = list[float]()
        self._count = 0  # in the last bucket
        self.last: Point | None = None

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """More values."""
        if not steps:
            return
        self.last, start = Point(steps[-1], values[-1]), 0
        while start < len(steps):
            if not self._steps or self._count == self._size:
                if len(self._steps) == MOST_BUCKETS:
                    self._merge()
                self._steps.append(0)
                self._sums.append(0.0)
                self._count = 0
            end = min(len(steps), start + self._size - self._count)
            self._steps[-1] = steps[end - 1]
            self._sums[-1] += sum(values[start:end])
            self._count += end - start
            start = end

    def points(self) -> tuple[Point, ...]:
        """The means, oldest first."""
        sizes = [self._size] * (len(self._steps) - 1) + [self._count]
        return tuple(
            Point(step, total / size) for step, total, size in zip(self._steps, self._sums, sizes, strict=False)
        )

    def _merge(self) -> None:
        """Put whole buckets together in pairs."""
        self._steps = self._steps[1::2]
        self._sums = [first + second for first, second in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._size *= 2
