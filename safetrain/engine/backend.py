"""The device that mlx computes on, how the engine adapts to it, and its memory limits.

mlx's limits are set before the model is loaded. At its memory limit mlx does not fail: it waits until running work
frees memory. Without a limit it allocates up to a hundred operations ahead of the computation. A limit just above the
need makes it wait instead: it exceeds the limit by one allocation, and loses no measurable time even when the limit is
only 3 % above the minimum (measured on CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory.system import DATA_BESIDE_BYTES, machine_room_bytes, read_memory
from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.engine.child_process import limit_memory
from safetrain.engine.cpu.blas import cores

# mlx's cache of freed buffers; without a limit it grows to all memory. On Metal it counts towards the memory limit.
CACHE_SHARE, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 0.1, 2**27, 2**31
WIRED_SHARE = 0.9  # wired memory, at most, as a share of the working set that Metal recommends


@dataclass(frozen=True)
class Device:
    """The device that mlx computes on.

    On a CPU arithmetic takes the time: rows are packed without padding, numbers are float32, quantized weights are
    dequantized at each use, exponentials are powers of 2, and shards of a micro-batch run in parallel. On a GPU
    launching kernels takes time: rows are padded to rectangles of few shapes, which mlx compiles, and work is queued.
    """

    name: str  # cpu, metal or cuda
    shards: int  # of a micro-batch

    @property
    def on_cpu(self) -> bool:
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


def keep_to_room(own_limit_bytes: int | None = None) -> None:
    """Limit this process, which measures or tests, to the memory of a training run and to ``own_limit_bytes``.

    On CPU a training run has the available memory, plus private memory that is reserved but not used. A GPU has its own
    memory, and on a Mac the parent process watches memory. A limit set in the shell applies already.
    """
    room = machine_room_bytes(read_memory()) + DATA_BESIDE_BYTES if device().on_cpu else None
    limit_memory(min((size for size in (room, own_limit_bytes) if size is not None), default=None))
