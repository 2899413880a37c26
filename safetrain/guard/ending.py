"""What a training is watched for, and what is known of it when it has ended."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetrain.core.protocol.events import Failed, Finished
from safetrain.guard.sampling import Limit, MemorySample, Recent


@dataclass(frozen=True)
class WatchSettings:
    """What a process is watched for, and what it is started with."""

    flight: Path
    memory_limit_bytes: int | None  # of each rank
    hang_seconds: float  # never called a hang before this long
    locks: tuple[int, ...]  # descriptors that the process inherits
    capped_by_kernel: bool = sys.platform == "linux"  # RLIMIT_DATA enforces the memory limit
    keep_awake: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)  # of the process, beside ours
    ranks: int = 1  # processes that share each update
    backend: str = "ring"  # of mlx, by which they exchange numbers
    hostfile: Path | None = None  # of mlx.launch, where they are not all on this machine
    launcher: tuple[str, ...] = ()  # that starts mlx.launch then


@dataclass(frozen=True)
class Ending:
    """How the training process ended, and what was seen of it in its last seconds (sampling.RECENT_SECONDS).

    With several ranks this is the one that ended it for all, or rank 0 where all ended for the same reason.
    """

    pid: int
    return_code: int  # negative: a signal
    began: bool  # everything was loaded, and what an earlier run left was dealt with
    finished: Finished | None
    failed: Failed | None
    stderr_tail: str
    ended_by_us: str  # hang, limit, orphan, second signal, or empty
    overdue_seconds: float
    signal_passed_on: int  # 0 for none
    oom_kills: int
    limit: Limit
    last: MemorySample | None
    recent: Recent
    started_seconds: float  # wall clock
    started_monotonic_seconds: float
    rank: int | None = None  # that ended it; None: there is one, or all did
    ranks: int = 1
    host: str = ""  # that the rank was on; empty: this machine
