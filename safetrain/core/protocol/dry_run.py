"""What a dry run answers: the contract between plan and engine."""

from dataclasses import dataclass

TIMED_SECONDS = 1.5  # ordinary updates are timed for so long; if the largest take longer, those are the timing
SLOW_SECONDS = 10.0  # an update that takes longer is the only one made


@dataclass(frozen=True)
class DryRun:
    """What the largest updates of a training took, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    footprint_bytes: int  # of the process (core/memory/process.py), loading and validating included
    update_seconds: float  # of an update of mean size
    device: str
    own_seconds: float  # of the whole dry run, without the start of Python
