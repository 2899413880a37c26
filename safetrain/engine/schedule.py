"""The learning rate of each update: a pure function of its number."""

import math

FLOOR = 0.1  # share of the peak at which the cosine ends


def learning_rate(update: int, peak: float, warmup_updates: int, total_updates: int) -> float:
    """Linear warm-up to ``peak``, then half a cosine down to a tenth of it. ``update`` counts from 0."""
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    span = max(1, total_updates - warmup_updates)
    progress = min(1.0, (update - warmup_updates) / span)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
