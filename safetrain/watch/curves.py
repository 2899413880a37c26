"""The points of a training's curves, the same for the page, the pictures and the terminal. Pure."""

import math
from collections.abc import Sequence

from safetrain.core.records.metrics import StepRecord

Points = tuple[tuple[float, float], ...]  # x ascending

SMOOTHING_SHARE = 0.02  # of all points: the time constant of the smoothed curve
LEAST_SMOOTHED = 100  # points; a smoothed curve of fewer points would lag


def points_of(steps: Sequence[StepRecord], field: str) -> Points:
    """(step, value) of the records that have a finite value in this field of StepRecord.

    The learning rate of step 0 and the first speed, which includes compiling, are left out.
    """
    values = [(float(record.step), getattr(record, field)) for record in steps]
    points = tuple((step, float(value)) for step, value in values if value is not None and math.isfinite(value))
    if field == "learning_rate":
        return tuple(point for point in points if point[0])
    return points[1:] if field == "labels_per_second" else points


def smoothed(points: Points) -> Points:
    """The exponential moving average, corrected for its start; empty for few points."""
    if len(points) < LEAST_SMOOTHED:
        return ()
    decay = 1 - 1 / (1 + SMOOTHING_SHARE * len(points))
    mean, weight, averages = 0.0, 0.0, list[tuple[float, float]]()
    for step, value in points:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        averages.append((step, mean / weight))
    return tuple(averages)


def thinned(points: Points, most: int) -> Points:
    """About ``most`` points at most: the first, lowest, highest and last of each stretch."""
    if len(points) <= most:
        return points
    size = -(-4 * len(points) // most)
    extremes = list[tuple[float, float]]()
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low, high = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
        extremes += sorted({stretch[0], low, high, stretch[-1]})
    return tuple(extremes)
