"""What a dry run of a training says: the word between plan and engine."""

from dataclasses import dataclass

TIMED_SECONDS = 1.5  # of updates; where the largest take longer, they are the timing
SLOW_SECONDS = 10.0  # of an update: then one must do


@dataclass(frozen=True)
class DryRun:
    """What the largest updates of a training took, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    mlx_limit_bytes: int  # for mx.set_memory_limit: what it was measured under
    footprint_bytes: int  # of the process (core/memory/process.py), loading and validating included
    update_seconds: float  # of an update of mean size
    device: str
    own_seconds: float  # of all this, less what Python took to start
