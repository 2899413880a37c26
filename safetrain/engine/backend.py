"""The device that mlx computes on, how the engine adapts to it, and its memory limits.

mlx's limits are set before the model is loaded. No backend refuses more: mlx waits for running work, and frees. It
allocates up to a hundred operations ahead of what is computed. With a limit at its need it waits instead, oversteps by
one allocation, and loses no time beyond noise, even with 3 % more than the least (measured on CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory.budget import (
    DATA_BESIDE_BYTES,
    PROCESS_BYTES,
    budget_bytes,
    machine_room_bytes,
    read_memory,
)
from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.core.recorder import Allocator
from safetrain.engine.child_process import limit_memory
from safetrain.engine.cpu.blas import cores
from safetrain.engine.row_attention import Way

# Freed buffers that are kept; unlimited, they grow to all memory. On Metal they count within the memory limit.
CACHE_SHARE, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 0.1, 2**27, 2**31
WIRED_SHARE = 0.9  # of the working set that Metal recommends, at most


@dataclass(frozen=True)
class Device:
    """Properties of a device. On a CPU each number costs time; on a GPU each kernel does, and the GPU runs ahead.

    The defaults describe a CPU.
    """

    name: str  # cpu, metal or cuda
    shards: int  # of a micro-batch
    side_by_side: bool = True  # shards are computed at once, on a stream each, as soon as their graph is built
    packs_without_padding: bool = True  # rows of any length in one list; else in rectangles of few shapes
    attention_ways: tuple[Way, ...] = (Way.POWERS,)  # that a model has to allow
    computes_in_float32: bool = True  # whatever type the model is stored in
    dequantizes_per_use: bool = True  # quantized weights; else mlx multiplies them as they are
    avoids_exponentials: bool = True  # powers of 2 are faster
    fuses_loss: bool = False  # mlx has a kernel for the cross-entropy
    compiles: bool = False  # kernels and programs, when a shape is first met
    waits_for_each_update: bool = True  # having nothing else to do meanwhile
    bounds_own_cache: bool = True  # mlx keeps few freed buffers
    fills_host_memory: bool = True  # unwatched: a process has to be kept to what is available
    measures_small: bool = True  # sizes that are timed: large ones would take minutes

    @property
    def facts(self) -> Mapping[str, Any]:
        """mlx's facts about a GPU; empty for a CPU."""
        return {} if self.name == "cpu" else mx.device_info()

    @property
    def label(self) -> str:
        """mlx's name of the device."""
        return "cpu" if self.name == "cpu" else str(mx.default_device())


def device() -> Device:
    """The device that mlx computes on."""
    name = name_now()
    if name == "cpu":
        return Device(name, shards=min(cores(), MOST_SHARDS))
    return Device(
        name, shards=1, side_by_side=False, packs_without_padding=False, attention_ways=(Way.SOFTMAX, Way.FUSED),
        computes_in_float32=False, dequantizes_per_use=False, avoids_exponentials=False, fuses_loss=True, compiles=True,
        waits_for_each_update=False, bounds_own_cache=False, fills_host_memory=False, measures_small=False,
    )  # fmt: skip


def name_now() -> str:
    """The device's name; tests replace it to run a GPU's code on a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def allocator() -> Allocator:
    """Current memory use of mlx."""
    return Allocator(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def set_limits(mlx_limit_bytes: int) -> None:
    """Set memory, cache and wired limits for a run. On CPU the cache keeps mlx's default of 32 MiB.

    On Metal wired memory makes training a seventh faster (mlx #2006), but too much of it slows the system.
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
    """Memory that mlx may use now, in bytes."""
    here = device()
    name = "free_memory" if here.name == "cuda" else "max_recommended_working_set_size"
    return max(0, budget_bytes(here.name, int(here.facts.get(name, 0)), read_memory()) - PROCESS_BYTES)


def keep_to_room(own_limit_bytes: int | None = None) -> None:
    """Limit this process, which measures or tests, to a training's memory and to ``own_limit_bytes``.

    On CPU that is what is available, and the private memory that is reserved and not used; a GPU's memory is its own,
    and a Mac's is watched by who started the process. A limit of the shell holds already.
    """
    room = machine_room_bytes(read_memory()) + DATA_BESIDE_BYTES if device().fills_host_memory else None
    limit_memory(min((size for size in (room, own_limit_bytes) if size is not None), default=None))
