"""Quantized weights on a CPU: dequantized at each use, where ``mx.quantized_matmul`` takes forty times as long.

Dequantized again in the backward pass, so that no dequantized weight outlives its product.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from safetrain.engine.frozen import change_classes, dequantized

Arrays = Any  # a tuple of arrays; mlx types custom gradients as object


def product(x: mx.array, layer: Any) -> mx.array:
    """``x @ weight.T`` in the dtype of ``x``; a gradient in ``x`` alone."""
    return dequantizing_twice(lambda x: x @ dequantized(layer).astype(x.dtype).T)(x)


def dequantizing_twice(plain: Callable[[mx.array], mx.array]) -> Any:
    """``plain``, whose backward pass computes again and so keeps nothing of the forward pass."""
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


def dequantize_per_use(module: Any) -> None:
    """Let every quantized layer of ``module`` but experts dequantize its weight at each use."""
    kinds = {nn.QuantizedLinear: LinearDequantizedPerUse, nn.QuantizedEmbedding: EmbeddingDequantizedPerUse}
    change_classes(module, kinds)
