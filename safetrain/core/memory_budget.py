"""How much memory a training may take: the rules, for this machine now and for one that is only described."""

import resource
from dataclasses import dataclass

import psutil

from safetrain.core.cgroup import memory_groups, memory_room_bytes

GIB = 2**30
METAL_SHARE = 0.9  # of the working set that Metal recommends: more is wired, and the desktop stutters
METAL_RESERVE_BYTES, LARGE_METAL_RESERVE_BYTES = 2 * GIB, 4 * GIB  # for everything else; the second above 16 GiB
LARGE_MACHINE_BYTES = 16 * GIB
CUDA_RESERVE_BYTES = 3 * GIB // 4  # context and workspaces
DATA_BESIDE_BYTES = (
    GIB // 10
)  # private memory beside what the estimate counts (measured, Linux CPU: 0.3 GiB in all at the least)
ADDRESSES_BESIDE_BYTES = GIB  # addresses that are reserved and never used: libraries, thread arenas


@dataclass(frozen=True)
class Device:
    """What the engine said of the device."""

    backend: str  # cpu, metal, cuda
    working_set_bytes: int = 0  # Metal's recommendation
    free_bytes: int = 0  # of a CUDA device


def metal_budget_bytes(working_set_bytes: int, total_bytes: int, available_bytes: int) -> int:
    """A share of the working set, leaving a reserve to everything else, but half of what is available at least."""
    reserve = METAL_RESERVE_BYTES if total_bytes <= LARGE_MACHINE_BYTES else LARGE_METAL_RESERVE_BYTES
    return min(int(METAL_SHARE * working_set_bytes), max(available_bytes - reserve, available_bytes // 2))


def cuda_budget_bytes(free_bytes: int) -> int:
    """What is free, less the context."""
    return max(0, free_bytes - CUDA_RESERVE_BYTES)


def budget_bytes(device: Device) -> int:
    """Memory that a training may take on this machine now."""
    if device.backend == "cuda":
        return cuda_budget_bytes(device.free_bytes)
    available = host_room_bytes()
    if device.backend == "metal":
        return metal_budget_bytes(device.working_set_bytes, psutil.virtual_memory().total, available)
    return available


def host_room_bytes() -> int:
    """What is available, within the limits of container and shell."""
    rooms = [psutil.virtual_memory().available, container_room_bytes(), shell_room_bytes()]
    return min(room for room in rooms if room is not None)


def container_room_bytes() -> int | None:
    """What the container or service may still take; None without a limit."""
    return memory_room_bytes(memory_groups())


def shell_room_bytes() -> int | None:
    """What the limits that a process inherits leave to a training; None without one."""
    beside = {resource.RLIMIT_DATA: DATA_BESIDE_BYTES, resource.RLIMIT_AS: ADDRESSES_BESIDE_BYTES}
    limits = {kind: resource.getrlimit(kind)[0] for kind in beside}
    rooms = [max(0, limits[kind] - beside[kind]) for kind in beside if limits[kind] != resource.RLIM_INFINITY]
    return min(rooms, default=None)


def within_own_limit(budget: int, memory_limit_gb: float | None) -> int:
    """The budget under train.memory_limit_gb."""
    return within_data_limit(budget, own_limit_bytes(memory_limit_gb))


def within_data_limit(budget: int, limit_bytes: int | None) -> int:
    """The budget under a limit that counts private memory."""
    return budget if limit_bytes is None else min(budget, max(0, limit_bytes - DATA_BESIDE_BYTES))


def own_limit_bytes(memory_limit_gb: float | None) -> int | None:
    """train.memory_limit_gb in bytes."""
    return None if memory_limit_gb is None else int(memory_limit_gb * GIB)
