"""Measures the training process and the machine from outside, a few times a second."""

import contextlib
import statistics
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.memory.system import (
    PRESSURE_LEVEL,
    footprint_bytes,
    memory_groups,
    memory_limit_bytes,
    oom_kills,
    sysctl_number,
)
from safetrain.core.records.metrics import StepRecord

MACHINE = "the machine's memory"
RECENT_SECONDS = 10.0  # readings this long before the end count as evidence
PRESSURE = Path("/proc/pressure/memory")
USUAL_RECORDS = 4  # records needed to know the usual speed
SLOW_SHARE = 0.5  # of the usual speed
SWAP_GROWTH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment, in bytes."""

    footprint_bytes: int  # resident memory; on macOS the system's footprint, with Metal's buffers
    data_bytes: int  # private writable memory; the footprint if unknown
    available_bytes: int  # on the machine
    swap_used_bytes: int
    stalled_percent: float  # share of ten seconds in which all processes waited for memory; 0: unknown
    pressure_level: int  # macOS: 1 normal, 2 warning, 4 critical; 0 unknown


@dataclass(frozen=True)
class Limit:
    """The smallest of the limits on the training process's memory."""

    size_bytes: int
    name: str


@dataclass(frozen=True)
class RecentMemory:
    """Highest and lowest readings of a process's last seconds, in bytes."""

    peak_footprint_bytes: int = 0
    peak_data_bytes: int = 0
    least_available_bytes: int = 2**63
    most_stalled_percent: float = 0.0
    most_pressure_level: int = 0
    oom_kills: int = 0  # the kernel's count in that time


class Sampler:
    """Samples one process, and keeps the samples of the last RECENT_SECONDS."""

    def __init__(self, own_limit_bytes: int | None) -> None:
        self._groups = memory_groups()
        self._kills = oom_kills(self._groups)  # the kernel's count at the start
        self._samples: deque[tuple[float, MemorySample, int]] = deque()
        self.limit = limit_now(own_limit_bytes)

    def sample(self, pid: int) -> MemorySample | None:
        """Measure the memory; None if the process is gone."""
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            return None
        if memory.rss == 0:  # a zombie
            return None
        footprint = footprint_bytes(pid) if sys.platform == "darwin" else memory.rss
        return MemorySample(
            footprint_bytes=footprint,
            data_bytes=getattr(memory, "data", 0) or footprint,
            available_bytes=psutil.virtual_memory().available,
            swap_used_bytes=psutil.swap_memory().used,
            stalled_percent=_stalled_percent(),
            pressure_level=sysctl_number(PRESSURE_LEVEL) if sys.platform == "darwin" else 0,
        )

    def remember(self, seconds: float, sample: MemorySample) -> None:
        """Keep a sample as evidence; ``seconds`` is its time on the monotonic clock."""
        self._samples.append((seconds, sample, oom_kills(self._groups)))
        while self._samples[0][0] < seconds - RECENT_SECONDS:
            self._samples.popleft()

    def recent(self) -> RecentMemory:
        """Maxima and minima of the kept samples."""
        samples = [sample for _, sample, _ in self._samples]
        if not samples:
            return RecentMemory(oom_kills=oom_kills(self._groups) - self._kills)
        return RecentMemory(
            peak_footprint_bytes=max(sample.footprint_bytes for sample in samples),
            peak_data_bytes=max(sample.data_bytes for sample in samples),
            least_available_bytes=min(sample.available_bytes for sample in samples),
            most_stalled_percent=max(sample.stalled_percent for sample in samples),
            most_pressure_level=max(sample.pressure_level for sample in samples),
            oom_kills=oom_kills(self._groups) - self._samples[0][2],
        )


class Thrashing:
    """Detects swapping: the speed falls while the swap in use grows."""

    def __init__(self) -> None:
        self._speeds: list[float] = []
        self._swap_bytes: int | None = None

    def warning(self, record: StepRecord, swap_used_bytes: int) -> str:
        """Return a warning about a record; empty without swapping."""
        before, self._swap_bytes = self._swap_bytes, swap_used_bytes
        if record.labels_per_second is None:
            return ""
        usual = statistics.median(self._speeds) if len(self._speeds) >= USUAL_RECORDS else None
        self._speeds.append(record.labels_per_second)
        grown = 0 if before is None else swap_used_bytes - before
        if usual is None or record.labels_per_second > SLOW_SHARE * usual or grown < SWAP_GROWTH_BYTES:
            return ""
        return (
            f"warning: at step {record.step} the speed is {100 * record.labels_per_second / usual:.0f} % of normal, "
            f"and swap has grown by {size_text(grown)}. The machine is short of memory: close other programs, or stop "
            "(Ctrl-C saves) and continue with a smaller train.batch_size; the result is the same"
        )


def limit_now(own: int | None) -> Limit:
    """The smallest of the machine's memory, the container's limit, and ``own``."""
    total, group = psutil.virtual_memory().total, memory_limit_bytes(memory_groups())
    candidates = [Limit(total, MACHINE)]
    candidates += [Limit(group, "the limit of this container or service")] if group else []
    candidates += [Limit(own, OWN_LIMIT)] if own else []
    return min(candidates, key=lambda limit: limit.size_bytes)


def _stalled_percent() -> float:
    """Read from the Linux kernel the share of ten seconds lost waiting for memory; 0 if unknown."""
    with contextlib.suppress(OSError):  # another system, another kernel, or switched off
        for line in PRESSURE.read_text().splitlines():
            if line.startswith("full"):
                return float(line.split("avg10=")[1].split()[0])
    return 0.0
