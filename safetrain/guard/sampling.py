"""Looks at the training process and the machine from outside, a few times a second."""

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.memory.cgroup import memory_groups, memory_limit_bytes, oom_kills
from safetrain.core.memory.macos import PRESSURE_LEVEL, sysctl_number
from safetrain.core.memory.process import footprint_bytes

MACHINE = "the machine's memory"
VRAM_SECONDS = 10.0
RECENT_SECONDS = 10.0  # before the end are evidence of why it ended
PRESSURE = Path("/proc/pressure/memory")


@dataclass(frozen=True)
class MemorySample:
    """Memory at a moment, in bytes."""

    footprint_bytes: int  # resident; on macOS what the system charges to the process, Metal's buffers included
    data_bytes: int  # private writable; the footprint where the system does not say
    available_bytes: int  # on the machine
    swap_used_bytes: int
    stalled_percent: float  # of ten seconds, in which all processes waited for memory; 0 where that is not told
    pressure_level: int  # on memory, by macOS: 1 normal, 2 warning, 4 critical; 0 unknown
    vram_used_bytes: int  # of the NVIDIA device, 0 without one


@dataclass(frozen=True)
class Limit:
    """The smallest of the limits on the training process's memory."""

    size_bytes: int
    name: str


@dataclass(frozen=True)
class Recent:
    """What was seen in a process's last seconds, in bytes."""

    peak_footprint_bytes: int = 0
    peak_data_bytes: int = 0
    least_available_bytes: int = 2**63
    most_stalled_percent: float = 0.0
    most_pressure_level: int = 0
    peak_vram_bytes: int = 0
    oom_kills_before: int = 0  # that the kernel had counted when these seconds began


class LastSeconds:
    """The samples of the last RECENT_SECONDS."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, MemorySample, int]] = deque()

    def add(self, seconds: float, sample: MemorySample, oom_kills: int) -> None:
        """One more, at a time of a monotonic clock, with the kernel's count of kills until then."""
        self._seen.append((seconds, sample, oom_kills))
        while self._seen[0][0] < seconds - RECENT_SECONDS:
            self._seen.popleft()

    def summary(self) -> Recent:
        """Maxima and minima of the samples."""
        samples = [sample for _, sample, _ in self._seen]
        if not samples:
            return Recent()
        return Recent(
            peak_footprint_bytes=max(sample.footprint_bytes for sample in samples),
            peak_data_bytes=max(sample.data_bytes for sample in samples),
            least_available_bytes=min(sample.available_bytes for sample in samples),
            most_stalled_percent=max(sample.stalled_percent for sample in samples),
            most_pressure_level=max(sample.pressure_level for sample in samples),
            peak_vram_bytes=max(sample.vram_used_bytes for sample in samples),
            oom_kills_before=self._seen[0][2],
        )


class Sampler:
    """Samples one process."""

    def __init__(self, pid: int, own_limit_bytes: int | None) -> None:
        self.pid, self._groups = pid, memory_groups()
        self._kills_before = oom_kills(self._groups)
        self._vram, self._vram_seen = 0, 0.0
        self._nvidia = shutil.which("nvidia-smi")
        self.limit = limit_now(own_limit_bytes)

    def sample(self, gpu_uuid: str = "") -> MemorySample | None:
        """Now; None once the process is gone. ``gpu_uuid``: the NVIDIA device that it uses, empty for all."""
        try:
            memory = psutil.Process(self.pid).memory_info()
        except psutil.Error:
            return None
        if memory.rss == 0:  # a zombie
            return None
        footprint = footprint_bytes(self.pid) if sys.platform == "darwin" else memory.rss
        return MemorySample(
            footprint_bytes=footprint,
            data_bytes=getattr(memory, "data", 0) or footprint,
            available_bytes=psutil.virtual_memory().available,
            swap_used_bytes=psutil.swap_memory().used,
            stalled_percent=_stalled_percent(),
            pressure_level=sysctl_number(PRESSURE_LEVEL) if sys.platform == "darwin" else 0,
            vram_used_bytes=self._vram_used(gpu_uuid),
        )

    def oom_kills(self) -> int:
        """Processes that the kernel killed in our memory group since the start."""
        return oom_kills(self._groups) - self._kills_before

    def _vram_used(self, gpu_uuid: str) -> int:
        """Asked in a thread of its own, because the driver may take its time."""
        if self._nvidia is not None and time.monotonic() - self._vram_seen > VRAM_SECONDS:
            self._vram_seen = time.monotonic()
            query = nvidia_query(self._nvidia, gpu_uuid)
            threading.Thread(target=self._ask_nvidia, args=(query,), daemon=True).start()
        return self._vram

    def _ask_nvidia(self, query: list[str]) -> None:
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False).stdout
            self._vram = vram_used_bytes(answer)
        except (OSError, subprocess.TimeoutExpired):
            self._nvidia = None


def nvidia_query(program: str, gpu_uuid: str) -> list[str]:
    """The command that tells a device's used memory; of all devices without a UUID.

    nvidia-smi does not know CUDA_VISIBLE_DEVICES, so the first device of a process may be any of its own.
    """
    chosen = [f"--id={gpu_uuid}"] if gpu_uuid else []
    return [program, *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]


def vram_used_bytes(answer: str) -> int:
    """The largest of nvidia-smi's answers, which are in MiB, a line each; 0 where it has none ("[N/A]", an error)."""
    return max((int(line) for line in answer.split() if line.isdigit()), default=0) * 2**20


def limit_now(own: int | None) -> Limit:
    """The smallest of the machine's memory, the container's limit, and ``own``."""
    total, group = psutil.virtual_memory().total, memory_limit_bytes(memory_groups())
    candidates = [Limit(total, MACHINE)]
    candidates += [Limit(group, "the limit of this container or service")] if group else []
    candidates += [Limit(own, OWN_LIMIT)] if own else []
    return min(candidates, key=lambda limit: limit.size_bytes)


def _stalled_percent() -> float:
    """Share of ten seconds lost to memory, from Linux's kernel; 0 where it does not say."""
    with contextlib.suppress(OSError):  # another system, another kernel, or switched off
        for line in PRESSURE.read_text().splitlines():
            if line.startswith("full"):
                return float(line.split("avg10=")[1].split()[0])
    return 0.0
