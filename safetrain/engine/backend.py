"""Where mlx computes, and everything that the engine does otherwise for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.core.recorder import Allocator
from safetrain.engine.cpu.blas import cores
from safetrain.engine.row_attention import Way


@dataclass(frozen=True)
class Device:
    """A CPU computes at once, in float32, and each number costs time; on a GPU each kernel does, and it runs ahead.

    What is not said is so on a CPU.
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
        """What mlx knows of a GPU; nothing of a CPU."""
        return {} if self.name == "cpu" else mx.device_info()

    @property
    def label(self) -> str:
        """As mlx calls it."""
        return "cpu" if self.name == "cpu" else str(mx.default_device())


def device() -> Device:
    """Where mlx computes now."""
    name = name_now()
    if name == "cpu":
        return Device(name, shards=min(cores(), MOST_SHARDS))
    return Device(
        name, shards=1, side_by_side=False, packs_without_padding=False, attention_ways=(Way.SOFTMAX, Way.FUSED),
        computes_in_float32=False, dequantizes_per_use=False, avoids_exponentials=False, fuses_loss=True, compiles=True,
        waits_for_each_update=False, bounds_own_cache=False, fills_host_memory=False, measures_small=False,
    )  # fmt: skip


def name_now() -> str:
    """Of the device; what tests replace to take a GPU's paths on a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def allocator() -> Allocator:
    """mlx's memory now."""
    return Allocator(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())
