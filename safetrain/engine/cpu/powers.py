"""SwiGLU and cross-entropy without ``mx.exp``: ``mx.power(2, x)`` is three times as fast on a CPU.

Gradients are written out, so that only the sigmoid, or the softmax, is kept next to the inputs.
"""

from typing import Any

import mlx.core as mx

LOG2_E = 1.4426950408889634
LARGEST_EXPONENT = 126.0  # 2^127 is the largest power of two in float32; a sigmoid of 2^-126 is 0 to it

Arrays = Any  # a tuple of arrays; mlx types custom gradients as object


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, of two arrays of one shape."""
    product, _sigmoid = _swiglu(gate, x)
    return product


def _forward(gate: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    """The product and the sigmoid, which the gradient needs."""
    sigmoid = 1.0 / (1.0 + mx.power(2.0, mx.minimum(gate * -LOG2_E, LARGEST_EXPONENT)))
    return gate * sigmoid * x, sigmoid


def _backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    """d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))."""
    gate, x = primals
    sigmoid, along = outputs[1], cotangents[0]
    scaled = along * sigmoid
    return scaled * x * (1.0 + gate * (1.0 - sigmoid)), scaled * gate


_swiglu: Any = mx.custom_function(_forward)
_swiglu.vjp(_backward)


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Losses in nats, shape (tokens,), of (tokens, vocabulary) float32 logits."""
    losses, _softmax = _cross_entropy(logits, targets)
    return losses


def _entropies(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Losses (tokens,) and the softmax (tokens, vocabulary), which the gradient needs."""
    peak = logits.max(axis=-1, keepdims=True)
    powers = mx.power(2.0, (logits - peak) * LOG2_E)
    total = powers.sum(axis=-1, keepdims=True)
    label_logits = mx.take_along_axis(logits, targets[:, None], axis=-1)
    return (mx.log(total) + peak - label_logits).squeeze(-1), powers / total


def _entropy_gradient(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
    """Gradient of the losses; that of the softmax is not needed and not given."""
    logits, targets = primals
    hit = mx.arange(logits.shape[-1]) == targets[:, None]
    return (outputs[1] - hit) * cotangents[0][:, None], mx.zeros_like(targets)


_cross_entropy: Any = mx.custom_function(_entropies)
_cross_entropy.vjp(_entropy_gradient)
