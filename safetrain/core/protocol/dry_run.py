"""What a dry run answers: the contract between plan and engine."""

from dataclasses import dataclass

from safetrain.core.records.settings import OwnOrder

TIMED_SECONDS = 1.5  # ordinary updates are timed for so long
SLOW_SECONDS = 10.0  # where an update takes longer, it is the only one made; where ordinary ones do, none is timed


@dataclass(frozen=True)
class DryRun:
    """What the largest updates of a training took, in bytes and seconds."""

    peak_bytes: int  # of mlx's allocator, over the updates
    footprint_bytes: int  # of the process (core/memory/process.py), loading and validating included
    update_seconds: float  # of an update of mean size
    device: str
    own_seconds: float  # of the whole dry run, without the start of Python
    own_order: OwnOrder | None  # None where an update is so slow that only one is made
