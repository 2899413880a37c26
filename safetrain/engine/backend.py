"""The device that mlx computes on, how the engine adapts to it, what it is fast at, and its memory limits.

What decides how a GPU computes is timed on it. NVIDIA GPUs before Ampere emulate bfloat16. Quantized products have
kernels of their own: without tensor cores in every backward pass, and before Ampere in all (mlx,
backend/cuda/quantized/qmm: ``supports_qmm_sm80`` wants a transposed weight).

mlx's limits are set before the model is loaded. At its memory limit mlx does not fail: it waits until running work
frees memory. Without a limit it allocates up to a hundred operations ahead of the computation. A limit just above the
need makes it wait instead: it exceeds the limit by one allocation, and loses no measurable time even when the limit is
only 3 % above the minimum (measured on CPU).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from safetrain.core.memory.system import DATA_BESIDE_BYTES, machine_room_bytes, read_memory
from safetrain.core.memory.terms import MOST_SHARDS
from safetrain.core.records.settings import CHUNKS, MANY_LABELS
from safetrain.engine.child_process import limit_memory
from safetrain.engine.cpu.blas import cores

# mlx's cache of freed buffers; without a limit it grows to all memory. On Metal it counts towards the memory limit.
CACHE_SHARE, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 0.1, 2**27, 2**31
ENOUGH_SECONDS, MOST_RUNS = 0.1, 5
NATIVE_CAPABILITY = 8  # Ampere; a T4 has 7.5, a V100 7.0
NOISE = 1.2  # what takes more memory must be this many times faster
NEARLY = 0.9  # share of the time of a label: more labels at once must save at least a tenth
TIMED_TOKENS, TIMED_WIDTH = 1024, 2048  # of a layer; a timing takes a tenth of a second
HEAD_WIDTH, HEAD_WORDS = 1024, 2**15  # of a head: 64 MiB, more than a GPU's cache holds
TIMED = mx.bfloat16, mx.float32
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


def product_gflops(width: int) -> float:
    """Speed of a square matrix product in float32, in GFLOP/s."""
    matrix = mx.random.normal((width, width))
    mx.eval(matrix)
    return 2e-9 * width**3 / time_operation(mx.matmul, matrix, matrix)


def probed_dtype(facts: Mapping[str, object], *, quantized: bool) -> str | None:
    """The type to compute in with a bfloat16 base: float32 if it is faster by more than noise, else None.

    ``facts``: ``mx.device_info()`` of a GPU; a GPU with bfloat16 in hardware is not timed.
    """
    capability = facts.get("compute_capability_major")
    if not isinstance(capability, int) or capability >= NATIVE_CAPABILITY:
        return None
    return "float32" if layer_speed(mx.float32, quantized) > NOISE * layer_speed(mx.bfloat16, quantized) else None


def dequantizing_pays(facts: Mapping[str, object]) -> bool:
    """Whether a layer of a CUDA device is faster dequantized, by more than noise: it takes four times the memory."""
    if "compute_capability_major" not in facts:
        return False
    plain, quantized = (max(layer_speed(each, is_quantized) for each in TIMED) for is_quantized in (False, True))
    return plain > NOISE * quantized


def labels_at_once(facts: Mapping[str, object]) -> int:
    """The number of labels from which on more, computed together, take hardly less time for each.

    A head's matrix is read twice for every chunk of labels, whatever their number. A CPU is not timed.
    """
    if not facts:
        return MANY_LABELS
    fewer, *others = reversed(CHUNKS)
    seconds = head_seconds(fewer)
    for more in others if seconds < ENOUGH_SECONDS else ():
        longer = head_seconds(more)
        if longer / more > NEARLY * seconds / fewer:
            break
        fewer, seconds = more, longer
    return fewer


def head_seconds(labels: int) -> float:
    """Seconds for the loss of so many labels in half precision, and its gradient, through a head."""

    def loss(states: mx.array, matrix: mx.array, targets: mx.array) -> mx.array:
        return mx.fast.cross_entropy(states @ matrix.T, targets).sum()

    states, matrix = (mx.random.normal((rows, HEAD_WIDTH)).astype(mx.float16) for rows in (labels, HEAD_WORDS))
    targets = mx.zeros(labels, mx.int32)
    mx.eval(states, matrix, targets)
    return time_operation(mx.value_and_grad(loss), states, matrix, targets)


def layer_speed(dtype: Any, quantized: bool) -> float:
    """Forward and backward passes per second through a linear layer; 0 if mlx cannot compute them."""
    layer: Any = nn.Linear(TIMED_WIDTH, TIMED_WIDTH, bias=False)
    layer.set_dtype(dtype)

    def summed(x: mx.array) -> mx.array:
        return layer(x).square().sum()

    try:
        if quantized:
            layer = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)
        x = mx.random.normal((TIMED_TOKENS, TIMED_WIDTH)).astype(dtype)
        mx.eval(x, layer.parameters())
        return 1 / time_operation(mx.grad(summed), x)
    except (RuntimeError, ValueError):  # from mlx: no such kernel, or no memory
        return 0.0


def time_operation(function: Callable[..., Any], *arguments: mx.array) -> float:
    """Seconds of the fastest of a few runs after the first, which may compile."""
    mx.clear_cache()
    seconds = list[float]()
    while len(seconds) < 2 or (sum(seconds) < ENOUGH_SECONDS and len(seconds) < MOST_RUNS):
        began = time.perf_counter()
        mx.eval(function(*arguments))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
