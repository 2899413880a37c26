"""The learning rate of each update: a pure function of its number."""

import math

FLOOR = 0.1  # share of the peak at which cosine, linear and wsd end
DECAY_SHARE = 0.2  # of the run: the last part of wsd (warm-up, stable, decay; arXiv 2404.06395)


def learning_rate(update: int, peak: float, warmup_updates: int, total_updates: int, schedule: str = "cosine") -> float:
    """Linear warm-up to ``peak``, then as ``schedule`` says. ``update`` counts from 0."""
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    span = max(1, total_updates - warmup_updates)
    progress = min(1.0, (update - warmup_updates) / span)
    return peak * (FLOOR + (1 - FLOOR) * _share(schedule, progress))


def _share(schedule: str, progress: float) -> float:
    """1 at the peak, 0 at the floor."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "wsd":
        return min(1.0, (1.0 - progress) / DECAY_SHARE)
    return 0.5 * (1 + math.cos(math.pi * progress))
