"""The memory budget of a training, from readings of this machine or the description of another one."""

import resource
import sys
from dataclasses import dataclass

import psutil

from safetrain.core.memory.system import (
    CRITICAL,
    FREE_PERCENT,
    PRESSURE_LEVEL,
    memory_groups,
    memory_room_bytes,
    sysctl_number,
)

OWN_LIMIT = "train.memory_limit_gb"  # the name of a limit that the user has set
GIB = 2**30
# Shares of the working set that Metal recommends, for machines up to 16 GiB and larger ones: an M5 Pro of 24 GB starved
# at 0.93, an 8 GB M1 trained at 0.9 (published: tests/core/readings.py).
METAL_SHARE, LARGE_METAL_SHARE = 0.9, 0.85
# Memory left to macOS, in addition to wired memory: macOS compresses and swaps the rest on demand.
METAL_RESERVE_BYTES, METAL_RESERVE_SHARE = 3 * GIB // 2, 0.1  # the share applies above 16 GiB
LARGE_MACHINE_BYTES = 16 * GIB
TYPICAL_WIRED_BYTES, LARGE_WIRED_BYTES = 8 * GIB // 5, 3 * GIB  # if no reading is available; the second above 8 GiB
LEAST_FREE_PERCENT = 10  # by kern.memorystatus_level: below this, macOS has no memory left to give
# A CUDA context takes 0.13 to 0.75 GiB; cuBLAS workspaces and fragmentation take the rest (published: readings.py).
CUDA_SHARE, CUDA_RESERVE_BYTES = 0.92, GIB // 2
PROCESS_BYTES = 200 * 2**20  # Python, mlx and its libraries, unless measured (measured, Linux CPU: 140)
DATA_BESIDE_BYTES = GIB // 10  # private memory outside mlx and PROCESS_BYTES (measured, Linux CPU: 0.3 GiB with those)
ADDRESSES_BESIDE_BYTES = GIB  # address space that is reserved but never used: libraries, thread arenas


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budget of a training process, and the part that Python and libraries use outside mlx's allocator."""

    total_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def mlx_bytes(self) -> int:
        """The part of the budget for mlx's allocator."""
        return max(0, self.total_bytes - self.process_bytes)


@dataclass(frozen=True)
class Readings:
    """The host's memory at one moment, in bytes. The last three exist only on macOS; 0 if unknown."""

    total_bytes: int
    available_bytes: int
    wired_bytes: int = 0
    pressure_level: int = 0
    free_percent: int = 0

    @property
    def is_critical(self) -> bool:
        """Whether macOS has no memory left to give; it compresses and swaps long before that."""
        return self.pressure_level >= CRITICAL or 0 < self.free_percent < LEAST_FREE_PERCENT


def read_memory() -> Readings:
    """Read the host's memory."""
    memory = psutil.virtual_memory()
    if sys.platform != "darwin":
        return Readings(memory.total, memory.available)
    level, free = sysctl_number(PRESSURE_LEVEL), sysctl_number(FREE_PERCENT)
    return Readings(memory.total, memory.available, memory.wired, level, free)


def metal_budget_bytes(
    working_set_bytes: int, total_bytes: int, wired_bytes: int = 0, process_bytes: int = PROCESS_BYTES
) -> int:
    """Memory budget on Metal: a share of the working set plus the process, limited by what wired memory leaves.

    The working set bounds Metal's buffers only, not Python's memory. psutil's ``available`` (inactive and free pages)
    is not used: macOS keeps it small on purpose, 0.5 to 2.7 GiB on Macs of 8 GB on which a 7B was trained
    (MakazhanAlpamys/Soup #663, giampaolo/psutil #1503).
    """
    large = total_bytes > LARGE_MACHINE_BYTES
    share = LARGE_METAL_SHARE if large else METAL_SHARE
    reserve = int(METAL_RESERVE_SHARE * total_bytes) if large else METAL_RESERVE_BYTES
    typical = TYPICAL_WIRED_BYTES if total_bytes <= LARGE_MACHINE_BYTES // 2 else LARGE_WIRED_BYTES
    remaining = total_bytes - (wired_bytes or typical) - reserve
    return max(0, min(int(share * working_set_bytes) + process_bytes, remaining))


def cuda_budget_bytes(free_bytes: int) -> int:
    """Memory budget on CUDA: a share of the device's free memory, minus the CUDA context."""
    return max(0, int(CUDA_SHARE * (free_bytes - CUDA_RESERVE_BYTES)))


def budget_bytes(backend: str, device_bytes: int, host: Readings, process_bytes: int = PROCESS_BYTES) -> int:
    """Memory that a training process may use on this machine now.

    ``device_bytes``: the working set that Metal recommends, or the free memory of a CUDA device; 0 on a CPU.
    """
    if backend == "cuda":
        return cuda_budget_bytes(device_bytes)
    if backend == "metal":
        return metal_budget_bytes(device_bytes, host.total_bytes, host.wired_bytes, process_bytes)
    return host_room_bytes(host)


def host_room_bytes(host: Readings) -> int:
    """Available memory, within the limits of container and shell."""
    room, shell = machine_room_bytes(host), shell_room_bytes()
    return room if shell is None else min(room, shell)


def machine_room_bytes(host: Readings) -> int:
    """Available memory, within the limit of the container."""
    container = memory_room_bytes(memory_groups())
    return host.available_bytes if container is None else min(host.available_bytes, container)


def shell_room_bytes() -> int | None:
    """Memory that inherited limits (ulimit) leave to a training; None without a limit.

    macOS enforces the limit on address space too, but does not count Metal's buffers (XNU, kern_resource.c).
    """
    beside = {resource.RLIMIT_DATA: DATA_BESIDE_BYTES, resource.RLIMIT_AS: ADDRESSES_BESIDE_BYTES}
    limits = {kind: resource.getrlimit(kind)[0] for kind in beside}
    rooms = [max(0, limits[kind] - beside[kind]) for kind in beside if limits[kind] != resource.RLIM_INFINITY]
    return min(rooms, default=None)


def within_data_limit(budget: int, limit_bytes: int | None) -> int:
    """The budget under a limit that counts private memory."""
    return budget if limit_bytes is None else min(budget, max(0, limit_bytes - DATA_BESIDE_BYTES))


def own_limit_bytes(memory_limit_gb: float | None) -> int | None:
    """train.memory_limit_gb in bytes."""
    return None if memory_limit_gb is None else int(memory_limit_gb * GIB)
