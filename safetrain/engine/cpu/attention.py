"""Attention in tiles by powers of 2, in float32: ``mx.exp`` and ``mx.softmax`` are slow on a CPU.

The forward pass keeps one number a query, its log-sum-exp. One more column in the factors of a product sums each line
of powers at no cost, or adds a number to each score.
"""

import mlx.core as mx

from safetrain.core.memory.terms import CPU_TILES
from safetrain.engine.cpu.powers import LOG2_E
from safetrain.engine.tiles import Arrays, after, grown, hidden, joined, spans, transposed

LOWEST_EXPONENT = -60.0  # a smaller power changes no float32 sum; its products would be subnormal, and very slow


def powers_forward(scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    """Outputs, and the log-sum-exp to base 2 of each query (lines, groups, width, 1)."""
    scaled, keys, values = q * (scale * LOG2_E), mx.contiguous(k), _with_column(v, 1.0)
    outputs, peaks = list[mx.array](), list[mx.array]()
    for start, stop in spans(q.shape[2], CPU_TILES):
        (here,) = after(outputs[-1:], scaled[..., start:stop, :])
        scores = here @ transposed(keys[..., :stop, :]) + hidden(start, stop, q.shape[2], window, CPU_TILES)
        peaks.append(scores.max(axis=-1, keepdims=True))
        powers = powers_of(scores - peaks[-1])
        outputs.append(powers @ values[..., :stop, :])
    output = joined(outputs)
    total = output[..., -1:]
    return output[..., :-1] / total, joined(peaks) + mx.log2(total)


def powers_backward(
    scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array, along: mx.array, output: mx.array,
    log_sums: mx.array,
) -> Arrays:  # fmt: skip
    """Gradients of queries, keys and values, from that of the outputs."""
    inner = (along * output).sum(axis=-1, keepdims=True)  # over keys: powers times their gradient
    scaled, onward = _with_column(q * (scale * LOG2_E), -log_sums), _with_column(along, -inner)
    keys, values = _with_column(k, 1.0), _with_column(v, 1.0)
    d_queries, sums = list[mx.array](), list[mx.array]()
    for start, stop in spans(q.shape[2], CPU_TILES):
        queries, here = after([*d_queries[-1:], *sums], scaled[..., start:stop, :], onward[..., start:stop, :])
        scores = queries @ transposed(keys[..., :stop, :]) + hidden(start, stop, q.shape[2], window, CPU_TILES)
        powers = powers_of(scores)
        d_scores = powers * (here @ transposed(values[..., :stop, :]))
        d_queries.append(d_scores @ keys[..., :stop, :])
        sums = grown(sums, transposed(d_scores) @ queries, transposed(powers) @ here)
    d_keys, d_values = sums
    return joined(d_queries)[..., :-1] * scale, d_keys[..., :-1] * (1 / LOG2_E), d_values[..., :-1]


def powers_of(scores: mx.array) -> mx.array:
    """Powers of 2 of the scores, exactly 0 for hidden ones."""
    return mx.power(2.0, mx.maximum(scores, LOWEST_EXPONENT)) - 2.0**LOWEST_EXPONENT


def _with_column(part: mx.array, column: mx.array | float) -> mx.array:
    """(..., size) -> (..., size + 1)"""
    if not isinstance(column, mx.array):
        column = mx.full((*part.shape[:-1], 1), column, part.dtype)
    return mx.concatenate([part, column], axis=-1)
