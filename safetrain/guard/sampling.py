"""Looks at the training process and the machine from outside, a few times a second."""

import contextlib
import ctypes
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.cgroup import memory_groups, memory_limit_bytes, oom_kills

OWN_LIMIT, MACHINE = "train.memory_limit_gb", "the machine's memory"
VRAM_SECONDS = 10.0
PRESSURE = Path("/proc/pressure/memory")
FOOTPRINT_PLACE = 72  # of ri_phys_footprint in macOS's rusage_info_v0, in bytes


@dataclass(frozen=True)
class Sample:
    """Memory at a moment, in bytes."""

    footprint_bytes: int  # resident; on macOS what the system charges to the process, Metal's buffers included
    data_bytes: int  # private writable, 0 where unknown
    available_bytes: int  # on the machine
    swap_used_bytes: int
    stalled_percent: float  # of ten seconds, in which all processes waited for memory; macOS: 0, 50, 100
    vram_used_bytes: int  # of the NVIDIA device, 0 without one


@dataclass(frozen=True)
class Limit:
    """The smallest amount of memory that the training process could have."""

    size_bytes: int
    name: str


class Sampler:
    """Samples one process."""

    def __init__(self, pid: int, own_limit_bytes: int | None) -> None:
        self._pid, self._groups = pid, memory_groups()
        self._kills_before = oom_kills(self._groups)
        self._vram, self._vram_seen = 0, 0.0
        self._nvidia = shutil.which("nvidia-smi")
        self.limit = limit_now(own_limit_bytes)

    def sample(self) -> Sample | None:
        """Now; None once the process is gone."""
        try:
            memory = psutil.Process(self._pid).memory_info()
        except psutil.Error:
            return None
        if memory.rss == 0:  # a zombie
            return None
        footprint = _phys_footprint(self._pid) if sys.platform == "darwin" else memory.rss
        data = getattr(memory, "data", 0)
        available, swap = psutil.virtual_memory().available, psutil.swap_memory().used
        return Sample(footprint, data, available, swap, _pressure(), self._vram_used())

    def oom_kills(self) -> int:
        """Processes that the kernel killed in our memory group since the start."""
        return oom_kills(self._groups) - self._kills_before

    def _vram_used(self) -> int:
        """Asked in a thread of its own, because the driver may take its time."""
        if self._nvidia is not None and time.monotonic() - self._vram_seen > VRAM_SECONDS:
            self._vram_seen = time.monotonic()
            threading.Thread(target=self._ask_nvidia, args=(self._nvidia,), daemon=True).start()
        return self._vram

    def _ask_nvidia(self, program: str) -> None:
        query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False).stdout
            self._vram = max((int(line) for line in answer.split() if line.isdigit()), default=0) * 2**20
        except (OSError, subprocess.TimeoutExpired):
            self._nvidia = None


def limit_now(own: int | None) -> Limit:
    """The smallest of the machine's memory, the container's limit, and ``own``."""
    total, group = psutil.virtual_memory().total, memory_limit_bytes(memory_groups())
    candidates = [Limit(total, MACHINE)]
    candidates += [Limit(group, "the limit of this container or service")] if group else []
    candidates += [Limit(own, OWN_LIMIT)] if own else []
    return min(candidates, key=lambda limit: limit.size_bytes)


def _pressure() -> float:
    """Share of time lost to memory, from the kernel; 0 where it does not say."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # not in this kernel, or switched off
            for line in PRESSURE.read_text().splitlines():
                if line.startswith("full"):
                    return float(line.split("avg10=")[1].split()[0])
    if sys.platform == "darwin":
        level, size = ctypes.c_int(0), ctypes.c_size_t(4)
        name = b"kern.memorystatus_vm_pressure_level"
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
        return {2: 50.0, 4: 100.0}.get(level.value, 0.0)
    return 0.0


def _phys_footprint(pid: int) -> int:
    """What Activity Monitor shows (macOS, libproc)."""
    buffer = ctypes.create_string_buffer(512)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, 0, buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[FOOTPRINT_PLACE : FOOTPRINT_PLACE + 8], "little")
