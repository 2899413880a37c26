"""Where mlx computes, and everything that the engine does otherwise for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.engine.blas import cores
from safetrain.engine.row_attention import Way


@dataclass(frozen=True)
class Device:
    """A CPU computes at once, in float32, and each number costs time; on a GPU each kernel does, and it runs ahead."""

    name: str  # cpu, metal or cuda
    shards: int  # of a micro-batch
    side_by_side: bool  # shards are computed at once, on a stream each, as soon as their graph is built
    packs_without_padding: bool  # rows of any length in one list; else in rectangles of few shapes
    attention_ways: tuple[Way, ...]  # that a model has to allow
    computes_in_float32: bool  # whatever type the model is stored in
    dequantizes_per_use: bool  # quantized weights; else mlx multiplies them as they are
    avoids_exponentials: bool  # powers of 2 are faster
    fuses_loss: bool  # mlx has a kernel for the cross-entropy
    compiles: bool  # kernels and programs, when a shape is first met
    waits_for_each_update: bool  # having nothing else to do meanwhile
    bounds_own_cache: bool  # mlx keeps few freed buffers
    fills_host_memory: bool  # unwatched: a process has to be kept to what is available
    measures_small: bool  # sizes that are timed: large ones would take minutes

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
    cpu = name == "cpu"
    return Device(
        name=name,
        shards=min(cores(), MOST_SHARDS) if cpu else 1,
        side_by_side=cpu,
        packs_without_padding=cpu,
        attention_ways=(Way.POWERS,) if cpu else (Way.SOFTMAX, Way.FUSED),
        computes_in_float32=cpu,
        dequantizes_per_use=cpu,
        avoids_exponentials=cpu,
        fuses_loss=not cpu,
        compiles=not cpu,
        waits_for_each_update=cpu,
        bounds_own_cache=cpu,
        fills_host_memory=cpu,
        measures_small=cpu,
    )


def name_now() -> str:
    """Of the device; what tests replace to take a GPU's paths on a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
