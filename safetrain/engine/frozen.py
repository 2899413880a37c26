"""Quantized weights as each backend multiplies them best: on CPU dequantized at each use, on a GPU as one matrix.

``mx.quantized_matmul`` takes forty times as long there as dequantizing and multiplying (measured:
benchmarks/bench_ops.py). Dequantized again in the backward pass, so that no dequantized weight outlives its product.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ALL = slice(None)
Arrays = Any  # a tuple of arrays; mlx types custom gradients as object


def dequantized(layer: Any, rows: slice = ALL) -> mx.array:
    """The weight of a quantized layer in full, of a plain one as it is; or some rows of it."""
    if "scales" not in layer:
        return layer.weight[rows]
    biases = layer.get("biases")
    return mx.dequantize(
        layer.weight[rows],
        layer.scales[rows],
        None if biases is None else biases[rows],
        group_size=layer.group_size,
        bits=layer.bits,
        mode=getattr(layer, "mode", "affine"),
    )


def product(x: mx.array, layer: Any) -> mx.array:
    """``x @ weight.T`` in the dtype of ``x``; a gradient in ``x`` alone."""
    return dequantizing_twice(lambda x: x @ dequantized(layer).astype(x.dtype).T)(x)


def dequantizing_twice(plain: Callable[[mx.array], mx.array]) -> Any:
    """``plain``, whose backward pass starts anew and so keeps nothing of the forward pass."""
    function: Any = mx.custom_function(plain)

    @function.vjp
    def backward(primals: Arrays, cotangent: Arrays, output: Arrays) -> Arrays:
        del output
        return mx.vjp(plain, [primals], [cotangent])[1][0]

    return function


class LinearDequantizedPerUse(nn.QuantizedLinear):
    """A quantized linear layer. Made by changing the class of one, so names and weights stay."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product(x, self)
        return y + self["bias"] if "bias" in self else y


class EmbeddingDequantizedPerUse(nn.QuantizedEmbedding):
    """A quantized embedding in float32, as everything on CPU; its use as a head dequantizes it."""

    def __call__(self, ids: mx.array) -> mx.array:
        return super().__call__(ids).astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of hidden states."""
        return product(x, self)


class OneMatrix(nn.QuantizedLinear):
    """A quantized linear layer for a GPU, whose input is one matrix whatever its shape.

    mlx's CUDA backend multiplies (tokens, 1, width) token by token and reads the whole weight for each
    (backend/cuda/quantized/qmm/qmm_utils.h, ``make_problem_shape``).
    """

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class EmbeddingOneMatrix(nn.QuantizedEmbedding):
    """A quantized embedding for a GPU; the same holds for its use as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of hidden states."""
        return super().as_linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def dequantize_per_use(module: Any) -> None:
    """Let every quantized layer of ``module`` but experts dequantize its weight at each use."""
    kinds = {nn.QuantizedLinear: LinearDequantizedPerUse, nn.QuantizedEmbedding: EmbeddingDequantizedPerUse}
    change_classes(module, kinds)


def multiply_as_one_matrix(module: Any) -> None:
    """Let every quantized layer of ``module`` take its input as one matrix."""
    change_classes(module, {nn.QuantizedLinear: OneMatrix, nn.QuantizedEmbedding: EmbeddingOneMatrix})


def change_classes(module: Any, kinds: Mapping[type, type]) -> None:
    """Give every part of ``module`` that is exactly of one of these classes the other one."""
    for _, part in module.named_modules():
        if type(part) in kinds:
            part.__class__ = kinds[type(part)]
