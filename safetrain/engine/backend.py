"""The device that mlx computes on, how the engine adapts to it, and its memory limits.

mlx's limits are set before the model is loaded. No backend refuses more: mlx waits for running work, and frees. It
allocates up to a hundred operations ahead of what is computed. With a limit at its need it waits instead, oversteps by
one allocation, and loses no time beyond noise, even with 3 % more than the least (measured on CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory.system import (
    DATA_BESIDE_BYTES,
    PROCESS_BYTES,
    budget_bytes,
    machine_room_bytes,
    read_memory,
)
from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.engine.child_process import limit_memory
from safetrain.engine.cpu.blas import cores

# Freed buffers that are kept; unlimited, they grow to all memory. On Metal they count within the memory limit.
CACHE_SHARE, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 0.1, 2**27, 2**31
WIRED_SHARE = 0.9  # of the working set that Metal recommends, at most


@dataclass(frozen=True)
class Device:
    """The device that mlx computes on.

    On a CPU each number costs time: rows are packed without padding, numbers are float32, quantized weights are
    dequantized at each use, exponentials are powers of 2, and shards of a micro-batch run side by side. On a GPU each
    kernel costs time: rows are padded to rectangles of few shapes, whose programs mlx compiles, and the GPU runs ahead.
    """

    name: str  # cpu, metal or cuda
    shards: int  # of a micro-batch

    @property
    def on_cpu(self) -> bool:
        """Whether mlx computes on a CPU."""
        return self.name == "cpu"

    @property
    def facts(self) -> Mapping[str, Any]:
        """mlx's facts about a GPU; empty for a CPU."""
        return {} if self.on_cpu else mx.device_info()

    @property
    def label(self) -> str:
        """mlx's name of the device."""
        return "cpu" if self.on_cpu else str(mx.default_device())


def device() -> Device:
    """The device that mlx computes on."""
    name = name_now()
    return Device(name, min(cores(), MOST_SHARDS) if name == "cpu" else 1)


def name_now() -> str:
    """The device's name; tests replace it to run a GPU's code on a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def set_limits(mlx_limit_bytes: int) -> None:
    """Set memory, cache and wired limits for a run. On CPU the cache keeps mlx's default of 32 MiB.

    On Metal wired memory makes training a seventh faster (mlx #2006), but too much of it slows the system.
    """
    mx.set_memory_limit(mlx_limit_bytes)
    here = device()
    if here.on_cpu:
        return
    mx.set_cache_limit(min(MOST_CACHE_BYTES, max(LEAST_CACHE_BYTES, int(CACHE_SHARE * mlx_limit_bytes))))
    most_wired = int(WIRED_SHARE * int(here.facts.get("max_recommended_working_set_size", 0)))
    if most_wired:  # Metal
        mx.set_wired_limit(min(most_wired, mlx_limit_bytes))


def room_bytes() -> int:
    """Memory that mlx may use now, in bytes."""
    here = device()
    name = "free_memory" if here.name == "cuda" else "max_recommended_working_set_size"
    return max(0, budget_bytes(here.name, int(here.facts.get(name, 0)), read_memory()) - PROCESS_BYTES)


def keep_to_room(own_limit_bytes: int | None = None) -> None:
    """Limit this process, which measures or tests, to a training run's memory and to ``own_limit_bytes``.

    On CPU that is what is available, and the private memory that is reserved and not used; a GPU's memory is its own,
    and a Mac's is watched by who started the process. A limit of the shell holds already.
    """
    room = machine_room_bytes(read_memory()) + DATA_BESIDE_BYTES if device().on_cpu else None
    limit_memory(min((size for size in (room, own_limit_bytes) if size is not None), default=None))
