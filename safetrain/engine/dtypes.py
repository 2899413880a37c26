"""Measures whether a GPU is faster in float32 than in bfloat16, which NVIDIA GPUs emulate before Ampere.

It times a layer, plain or quantized: quantized products use other kernels, which before Ampere use no tensor
cores in any type (mlx, backend/cuda/quantized/qmm: ``supports_qmm_sm80``, ``make_tiled_mma``).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ENOUGH_SECONDS, MOST_RUNS = 0.1, 5
NATIVE_CAPABILITY = 8  # Ampere; a T4 has 7.5, a V100 7.0
NOISE = 1.2  # float32 must be this many times faster: it takes twice the memory
TOKENS, WIDTH = 1024, 2048  # of the timed layer; four timings take less than half a second


def probed_dtype(
    device: Mapping[str, object], *, metal: bool, quantized: bool, speed: Callable[[Any, bool], float] | None = None
) -> str | None:
    """The type to compute in with a bfloat16 base: float32 if it is faster by more than noise, else None.

    ``device`` is ``mx.device_info()`` of a GPU; one with bfloat16 in hardware is not timed. ``speed`` times a layer,
    and returns 0 if it fails.
    """
    capability, measured = device.get("compute_capability_major"), speed or layer_speed
    if metal or not isinstance(capability, int) or capability >= NATIVE_CAPABILITY:
        return None
    return "float32" if measured(mx.float32, quantized) > NOISE * measured(mx.bfloat16, quantized) else None


def layer_speed(dtype: Any, quantized: bool) -> float:
    """Gradients per second through a linear layer, forward and backward; 0 if mlx cannot compute them."""
    layer: Any = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.set_dtype(dtype)

    def summed(x: mx.array) -> mx.array:
        return layer(x).square().sum()

    try:
        if quantized:
            layer = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)
        x = mx.random.normal((TOKENS, WIDTH)).astype(dtype)
        mx.eval(x, layer.parameters())
        return 1 / time_operation(mx.grad(summed), x)[0]
    except (RuntimeError, ValueError):  # from mlx: no such kernel, or no memory
        return 0.0


def time_operation(function: Callable[..., Any], *arguments: mx.array) -> tuple[float, int]:
    """Seconds of the fastest of a few runs after the first, which may compile, and peak bytes that a run adds."""
    mx.clear_cache()
    seconds, peak = list[float](), 0
    while len(seconds) < 2 or (sum(seconds) < ENOUGH_SECONDS and len(seconds) < MOST_RUNS):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        began = time.perf_counter()
        mx.eval(function(*arguments))
        seconds.append(time.perf_counter() - began)
        peak = max(peak, mx.get_peak_memory() - before)
    return min(seconds[1:]), peak
