"""Curves made of a training's records: smoothed, and thinned so that a day of them can be drawn. Pure."""

import math
from collections.abc import Callable, Sequence

from safetrain.core.records.metrics import StepRecord
from safetrain.watch.long_runs import MetricsRead

Points = tuple[tuple[float, float], ...]  # x ascending

SHARE_SMOOTHED = 0.02  # of all points: the time constant of the smoothed curve
LEAST_SMOOTHED = 100  # points; fewer are seen as they are, and a smoothed curve would lag behind them


def points_of(records: Sequence[StepRecord], value_of: Callable[[StepRecord], float | None]) -> Points:
    """(step, value) of the records that have a finite one."""
    found = ((float(record.step), value_of(record)) for record in records)
    return tuple((step, value) for step, value in found if value is not None and math.isfinite(value))


def smoothed(recorded: MetricsRead, value_of: Callable[[StepRecord], float | None]) -> Points:
    """The exponential moving average, without the pull of its beginning; none of few records.

    Of a long run it is that of its blocks' means.
    """
    points = points_of(recorded.means or recorded.steps, value_of)
    if len(points) < LEAST_SMOOTHED:
        return ()
    keep = 1 - 1 / (1 + SHARE_SMOOTHED * len(points))
    mean, weight, found = 0.0, 0.0, list[tuple[float, float]]()
    for step, value in points:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        found.append((step, mean / weight))
    return tuple(found)


def thinned(points: Points, most: int) -> Points:
    """At most about ``most`` points: of equal runs of them the first, the lowest, the highest and the last."""
    if len(points) <= most:
        return points
    size = -(-4 * len(points) // most)
    found = list[tuple[float, float]]()
    for start in range(0, len(points), size):
        run = points[start : start + size]
        low, high = min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])
        found += sorted({run[0], low, high, run[-1]})
    return tuple(found)


def speeds_of(records: Sequence[StepRecord]) -> Points:
    """Labels per second; the first, which includes compiling and warming up, is left out."""
    return points_of(records, per_second)[1:]


def per_second(record: StepRecord) -> float | None:
    """The labels."""
    return record.labels_per_second


def train_loss(record: StepRecord) -> float | None:
    """Since the record before it."""
    return record.train_loss
