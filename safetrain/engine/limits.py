"""mlx's limits, set before the model is loaded. No backend refuses more: mlx waits for running work, and frees.

mlx allocates up to a hundred operations ahead of what is computed. With a limit at its need it waits instead,
oversteps by one allocation, and loses no time beyond noise, even with 3 % more than the least (measured on CPU).
"""

import mlx.core as mx

from safetrain.core.memory.budget import (
    DATA_BESIDE_BYTES,
    PROCESS_BYTES,
    DeviceMemory,
    budget_bytes,
    machine_room_bytes,
    read_memory,
)
from safetrain.engine.backend import device
from safetrain.engine.child_process import limit_memory

# Freed buffers that are kept; unlimited, they grow to all memory. On Metal they count within the memory limit.
CACHE_SHARE, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 0.1, 2**27, 2**31
WIRED_SHARE = 0.9  # of the working set that Metal recommends, at most


def set_limits(mlx_limit_bytes: int) -> None:
    """Memory, cache and wired limits of a run that needs so much. On CPU the cache stays at mlx's own 32 MiB.

    Wired memory is a seventh faster on Metal (mlx #2006), and the system is the worse for it when too much is wired.
    """
    mx.set_memory_limit(mlx_limit_bytes)
    here = device()
    if here.bounds_own_cache:
        return
    mx.set_cache_limit(min(MOST_CACHE_BYTES, max(LEAST_CACHE_BYTES, int(CACHE_SHARE * mlx_limit_bytes))))
    most_wired = int(WIRED_SHARE * int(here.facts.get("max_recommended_working_set_size", 0)))
    if most_wired:  # Metal
        mx.set_wired_limit(min(most_wired, mlx_limit_bytes))


def room_bytes() -> int:
    """What mlx may take here now."""
    here = device()
    working_set, free = (int(here.facts.get(name, 0)) for name in ("max_recommended_working_set_size", "free_memory"))
    return max(0, budget_bytes(DeviceMemory(here.name, working_set, free), read_memory()) - PROCESS_BYTES)


def keep_to_room(own_limit_bytes: int | None = None) -> None:
    """Cap this process, which measures or tests, at what a training may take here, and at ``own_limit_bytes``.

    On CPU that is what is available, and the private memory that is reserved and not used; a GPU's memory is its own,
    and a Mac's is watched by who started the process. A limit of the shell holds already.
    """
    room = machine_room_bytes(read_memory()) + DATA_BESIDE_BYTES if device().fills_host_memory else None
    limit_memory(min((size for size in (room, own_limit_bytes) if size is not None), default=None))
