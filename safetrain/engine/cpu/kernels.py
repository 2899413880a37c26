"""Faster versions of operations that are slow in mlx on a CPU (benchmarks/bench_cpu.py).

``mx.exp`` and ``mx.softmax`` are three times as slow as ``mx.power(2, x)``: SwiGLU and cross-entropy use powers of
two, in float32, with explicit gradients (attention: engine/row_attention.py). ``mx.quantized_matmul`` is forty times
as slow as a product with the dequantized weight. Only products use several threads, so shards of a micro-batch run in
parallel, each on its own stream.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from safetrain.core.memory.terms import rows_dequantized_together
from safetrain.engine.backend import device
from safetrain.engine.cpu.blas import blas_threads
from safetrain.engine.layers import Arrays, dequantized, inputs_of, with_gradient
from safetrain.engine.row_attention import LOG2_E

LARGEST_EXPONENT = 126.0  # 2^127 is the largest power of two in float32; a sigmoid of 2^-126 counts as 0

Given = TypeVar("Given")
Made = TypeVar("Made")


def _swiglu_forward(gate: mx.array, x: mx.array) -> Arrays:
    """silu(gate) * x, and the gate's sigmoid, which the gradient needs."""
    sigmoid = 1.0 / (1.0 + mx.power(2.0, mx.minimum(gate * -LOG2_E, LARGEST_EXPONENT)))
    return gate * sigmoid * x, sigmoid


def _swiglu_backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    """d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))."""
    gate, x = primals
    sigmoid, along = outputs[1], cotangents[0]
    scaled = along * sigmoid
    return scaled * x * (1.0 + gate * (1.0 - sigmoid)), scaled * gate


def _entropy_forward(logits: mx.array, targets: mx.array) -> Arrays:
    """Losses (tokens,) and the softmax (tokens, vocabulary), which the gradient needs."""
    peak = logits.max(axis=-1, keepdims=True)
    powers = mx.power(2.0, (logits - peak) * LOG2_E)
    total = powers.sum(axis=-1, keepdims=True)
    losses = mx.log(total) + peak - mx.take_along_axis(logits, targets[:, None], axis=-1)
    return losses.squeeze(-1), powers / total


def _entropy_backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    """Gradient of the losses; the softmax, a second output, gets none."""
    _logits, targets = primals
    label = targets[:, None]
    at_label = mx.take_along_axis(outputs[1], label, axis=-1) - 1.0
    return mx.put_along_axis(outputs[1], label, at_label, axis=-1) * cotangents[0][:, None], mx.zeros_like(targets)


_swiglu = with_gradient(_swiglu_forward, _swiglu_backward)
_cross_entropy = with_gradient(_entropy_forward, _entropy_backward)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, for arrays of the same shape."""
    return _swiglu(gate, x)[0]


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Losses in nats, shape (tokens,), of (tokens, vocabulary) float32 logits."""
    return _cross_entropy(logits, targets)[0]


def dequantizing_twice(plain: Callable[[mx.array], mx.array]) -> Any:
    """``plain``, with a backward pass that recomputes it, so that no dequantized weight outlives its product."""

    def backward(x: Arrays, cotangent: Arrays, output: Arrays) -> Arrays:
        del output
        return mx.vjp(plain, [x], [cotangent])[1][0]

    return with_gradient(plain, backward)


def _product(layer: Any, x: mx.array) -> mx.array:
    """``x @ weight.T`` in the dtype of ``x``; only ``x`` gets a gradient.

    Each slice of the weight's rows is dequantized after the product before it, and multiplied while the processor's
    cache still holds it. Layers of a 7B model take 0.4 to 0.9 of the time, and a twentieth of the memory, that they
    take with whole weights.
    """
    outputs, inputs = layer.weight.shape[0], inputs_of(layer)
    step = rows_dequantized_together(inputs)
    slices = [slice(start, start + step) for start in range(0, outputs, step)]

    def forward(x: mx.array) -> mx.array:
        parts = [x]
        for rows in slices:
            parts.append(x @ dequantized(layer, rows, after=parts[-1]).astype(x.dtype).T)
        return mx.concatenate(parts[1:], axis=-1)

    def backward(x: Arrays, cotangent: Arrays, output: Arrays) -> Arrays:
        del x, output
        total: Any = None
        for rows in slices:
            weight = dequantized(layer, rows, after=cotangent if total is None else total)
            own = cotangent[..., rows] @ weight.astype(cotangent.dtype)
            total = own if total is None else total + own
        return total

    return with_gradient(forward, backward)(x)


class LinearDequantizedPerUse(nn.QuantizedLinear):
    """A quantized linear layer that dequantizes at each use. A layer's class is changed, so names and weights stay."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class EmbeddingDequantizedPerUse(nn.QuantizedEmbedding):
    """A quantized embedding that returns float32, as all layers do on CPU; as a head it dequantizes at each use."""

    def __call__(self, ids: mx.array) -> mx.array:
        return super().__call__(ids).astype(mx.float32)

    as_linear = _product


PER_USE: dict[type, type] = {
    nn.QuantizedLinear: LinearDequantizedPerUse, nn.QuantizedEmbedding: EmbeddingDequantizedPerUse,
}  # fmt: skip


def side_by_side(compute: Callable[[Given], Made], shards: Sequence[Given]) -> list[Made]:
    """Call ``compute`` for each shard. On a CPU each has its own stream, and all are evaluated at the same time."""
    if not device().on_cpu:
        return [compute(shard) for shard in shards]
    results = []
    with blas_threads(len(shards)):
        for index, shard in enumerate(shards):
            with mx.stream(stream_of(index)):
                results.append(compute(shard))
        mx.eval(results)
    return results


@functools.cache
def stream_of(index: int) -> mx.Stream:
    """A stream for one shard. Cached, because mlx gives each a thread and frees none."""
    return mx.new_stream(mx.cpu)
