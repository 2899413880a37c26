"""Weights that are not trained: in full, and on a GPU multiplied as one matrix."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ALL = slice(None)


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


def multiply_as_one_matrix(module: Any) -> None:
    """Let every quantized layer of ``module`` take its input as one matrix."""
    change_classes(module, {nn.QuantizedLinear: OneMatrix, nn.QuantizedEmbedding: EmbeddingOneMatrix})


def change_classes(module: Any, kinds: Mapping[type, type]) -> None:
    """Give every part of ``module`` that is exactly of one of these classes the other one."""
    for _, part in module.named_modules():
        if type(part) in kinds:
            part.__class__ = kinds[type(part)]
