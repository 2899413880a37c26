"""Products and attention for the self-test's report, at a 7B's widths on a GPU and at small ones on a CPU."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.formatting import counted
from safetrain.core.protocol.selftest import Line, Shapes, Timed
from safetrain.engine.backend import device

ENOUGH_SECONDS, MOST_RUNS = 0.1, 5
GROUP_SIZE, BITS = 64, 4


@dataclass(frozen=True)
class OperationSizes:
    """Of the operations: tokens and features of products, heads and tokens of attention."""

    tokens: int
    width: int
    hidden: int
    square: int  # rows and columns of plain products
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: Any


def sizes() -> OperationSizes:
    """For this backend."""
    if device().measures_small:  # whose quantized and 16-bit products run on one core, without the BLAS
        return OperationSizes(4, 1024, 1024, 256, 1, 64, (512, 2048), mx.float32)
    return OperationSizes(2048, 4096, 14336, 4096, 32, 128, (512, 2048), mx.bfloat16)


def products(size: OperationSizes) -> Iterator[Line]:
    """A quantized product with the same tokens in three shapes, and plain products in three types."""
    yield Shapes(
        f"{BITS} bits, {size.width} -> {size.hidden}, {size.tokens} tokens; plain {size.square} x {size.square}"
    )
    weights = mx.quantize(mx.random.normal((size.hidden, size.width)).astype(mx.bfloat16), GROUP_SIZE, BITS)
    shapes = {
        "(1,T,width)": (1, size.tokens, size.width),
        "(T,1,width)": (size.tokens, 1, size.width),
        "(T,width)": (size.tokens, size.width),
    }
    multiply = functools.partial(mx.quantized_matmul, transpose=True, group_size=GROUP_SIZE, bits=BITS)
    for name, shape in shapes.items():
        x = mx.random.normal(shape).astype(mx.bfloat16)
        mx.eval(x, weights)
        yield timed(name, multiply, x, *weights)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        a = mx.random.normal((size.square, size.square)).astype(dtype)
        mx.eval(a)
        yield timed(_name(dtype), mx.matmul, a, a)


def attention(size: OperationSizes) -> Iterator[Line]:
    """One row: under a boolean mask, causal, and as softmax of all scores; forward, and with its gradient."""
    yield Shapes(f"{counted(size.heads, 'head')} of size {size.head_dim}, {_name(size.dtype)}")
    for length in size.lengths:
        q = mx.random.normal((1, size.heads, length, size.head_dim)).astype(size.dtype)
        mask = mx.tril(mx.ones((length, length))).astype(mx.bool_)
        mx.eval(q, mask)
        ways: dict[str, Callable[[mx.array], mx.array]] = {
            "boolean mask": functools.partial(fused, mask=mask),
            "causal": functools.partial(fused, mask="causal"),
            "unfused": functools.partial(unfused, mask=mask),
        }
        for name, attend in ways.items():
            yield timed(f"{name} {length} forward", attend, q)
            yield timed(f"{name} {length} gradient", mx.grad(functools.partial(_summed, attend)), q)


def fused(q: mx.array, mask: Any) -> mx.array:
    """mlx's own attention of (rows, heads, tokens, size) with itself."""
    return mx.fast.scaled_dot_product_attention(q, q, q, scale=q.shape[-1] ** -0.5, mask=mask)


def unfused(q: mx.array, mask: mx.array) -> mx.array:
    """The same by its definition."""
    scores = mx.where(mask, (q * q.shape[-1] ** -0.5) @ q.swapaxes(-1, -2), mx.array(-mx.inf, q.dtype))
    return mx.softmax(scores, axis=-1, precise=True) @ q


def timed(name: str, function: Callable[..., Any], *arguments: mx.array) -> Timed:
    """Compute ``function(*arguments)`` a few times; the first run on a GPU compiles and is not counted."""
    mx.clear_cache()
    seconds, peak, least = list[float](), 0, 2 if device().compiles else 1
    try:
        while len(seconds) < least or (sum(seconds) < ENOUGH_SECONDS and len(seconds) < MOST_RUNS):
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            began = time.perf_counter()
            mx.eval(function(*arguments))
            seconds.append(time.perf_counter() - began)
            peak = max(peak, mx.get_peak_memory() - before)
    except (RuntimeError, ValueError) as error:  # what mlx throws: no such kernel, no memory
        return Timed(name, 0.0, 0, str(error).partition("\n")[0])
    return Timed(name, min(seconds[1:] or seconds), peak)


def _summed(attend: Callable[[mx.array], mx.array], q: mx.array) -> mx.array:
    return attend(q).sum()


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
