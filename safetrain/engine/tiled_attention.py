"""Causal attention of rows of one width that never has all its scores in memory, with its own gradient.

Queries are scored in tiles, each against the keys up to its last query, and a tile waits for the one before. The
forward pass keeps one float32 a query at most, its log-sum-exp; the backward pass makes each tile's probabilities again
(FlashAttention-2, arXiv 2307.08691, without tiles of keys).

Queries are (lines, groups, width, size), keys and values (lines, 1, width, size): a line is a key head of a row.
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from safetrain.core.memory.terms import CPU_TILES, GPU_TILES, Tiles
from safetrain.engine.activations import LOG2_E

HIDDEN_SCORE = -1e30
LOWEST_EXPONENT = -126.0  # of a normal float32; powers below it are several times slower

Arrays = tuple[mx.array, ...]
Pass = Callable[..., Arrays]  # (scale, window, *arrays)


def powers_forward(scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    """For CPU, in float32: outputs, and the log-sum-exp to base 2 of each query (lines, groups, width, 1).

    ``mx.exp`` and ``mx.softmax`` are slow there, so probabilities are powers of 2. One more column in the factors of a
    product sums each line of powers at no cost, or adds a number to each score (measured: benchmarks/bench_attention).
    """
    scaled, keys, values = q * (scale * LOG2_E), mx.contiguous(k), _with_column(v, 1.0)
    outputs, peaks = list[mx.array](), list[mx.array]()
    for start, stop in _tiles(q.shape[2], CPU_TILES):
        (here,) = _after(outputs[-1:], scaled[..., start:stop, :])
        scores = here @ _transposed(keys[..., :stop, :]) + _hidden(start, stop, q.shape[2], window, CPU_TILES)
        peaks.append(scores.max(axis=-1, keepdims=True))
        powers = mx.power(2.0, mx.maximum(scores - peaks[-1], LOWEST_EXPONENT))
        outputs.append(powers @ values[..., :stop, :])
    output = _joined(outputs)
    total = output[..., -1:]
    return output[..., :-1] / total, _joined(peaks) + mx.log2(total)


def powers_backward(
    scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array, along: mx.array, output: mx.array,
    log_sums: mx.array,
) -> Arrays:  # fmt: skip
    """Gradients of queries, keys and values, from that of the outputs."""
    inner = (along * output).sum(axis=-1, keepdims=True)  # over keys: powers times their gradient
    scaled, onward = _with_column(q * (scale * LOG2_E), -log_sums), _with_column(along, -inner)
    keys, values = _with_column(k, 1.0), _with_column(v, 1.0)
    d_queries, sums = list[mx.array](), list[mx.array]()
    for start, stop in _tiles(q.shape[2], CPU_TILES):
        queries, here = _after([*d_queries[-1:], *sums], scaled[..., start:stop, :], onward[..., start:stop, :])
        scores = queries @ _transposed(keys[..., :stop, :]) + _hidden(start, stop, q.shape[2], window, CPU_TILES)
        powers = mx.power(2.0, mx.maximum(scores, LOWEST_EXPONENT))
        d_scores = powers * (here @ _transposed(values[..., :stop, :]))
        d_queries.append(d_scores @ keys[..., :stop, :])
        sums = _grown(sums, _transposed(d_scores) @ queries, _transposed(powers) @ here)
    d_keys, d_values = sums
    return _joined(d_queries)[..., :-1] * scale, d_keys[..., :-1] * (1 / LOG2_E), d_values[..., :-1]


def softmax_forward(scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    """For a GPU, where a softmax is one kernel: the outputs alone, in the type of the inputs."""
    scaled, k, v, outputs = q * scale, mx.contiguous(k), mx.contiguous(v), list[mx.array]()
    for start, stop in _tiles(q.shape[2], GPU_TILES):
        (here,) = _after(outputs[-1:], scaled[..., start:stop, :])
        powers = _softmax(here, k[..., :stop, :], _hidden(start, stop, q.shape[2], window, GPU_TILES))
        outputs.append(powers @ v[..., :stop, :])
    return (_joined(outputs),)


def softmax_backward(
    scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array, along: mx.array, output: mx.array
) -> Arrays:
    """Gradients of queries, keys and values, from that of the outputs."""
    inner = (along * output).astype(mx.float32).sum(axis=-1, keepdims=True)
    scaled, k, v, along = q * scale, mx.contiguous(k), mx.contiguous(v), mx.contiguous(along)
    d_queries, sums = list[mx.array](), list[mx.array]()
    for start, stop in _tiles(q.shape[2], GPU_TILES):
        before = [*d_queries[-1:], *sums]
        queries, here = _after(before, scaled[..., start:stop, :], along[..., start:stop, :])
        powers = _softmax(queries, k[..., :stop, :], _hidden(start, stop, q.shape[2], window, GPU_TILES))
        d_powers = here @ _transposed(v[..., :stop, :])
        d_scores = (powers * (d_powers - inner[..., start:stop, :])).astype(q.dtype)
        d_queries.append(d_scores @ k[..., :stop, :])
        sums = _grown(sums, _transposed(d_scores) @ queries, _transposed(powers) @ here)
    return _joined(d_queries) * scale, *sums


def line_by_line(compute: Pass, tiles: Tiles, scale: float, window: int | None, arrays: Sequence[mx.array]) -> Arrays:
    """``compute`` some lines after the others, so that tiles stay small whatever the rows and heads."""
    count, groups, width, _ = arrays[0].shape
    step, made = tiles.lines(groups, width, arrays[0].itemsize), list[Arrays]()
    for start in range(0, count, step):
        given = _after(made[-1] if made else (), *(each[start : start + step] for each in arrays))
        made.append(compute(scale, window, *given))
    return made[0] if len(made) == 1 else tuple(mx.concatenate(list(parts)) for parts in zip(*made, strict=True))


def _tiles(width: int, tiles: Tiles) -> list[tuple[int, int]]:
    """First query of each tile, and the one after its last, which is the number of keys that it is scored against."""
    size = tiles.queries(width)
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def _softmax(queries: mx.array, keys: mx.array, hidden: mx.array) -> mx.array:
    scores = queries @ _transposed(keys)
    return mx.softmax(scores + hidden.astype(scores.dtype), axis=-1, precise=True)  # in float16 minus infinity


def _after(before: Sequence[mx.array], *arrays: mx.array) -> Sequence[mx.array]:
    """The same arrays, computed when ``before`` is: mlx would else start on many tiles, each with its memory."""
    return mx.depends(list(arrays), list(before)) if before else arrays


def _with_column(part: mx.array, column: mx.array | float) -> mx.array:
    """(..., size) -> (..., size + 1)"""
    if not isinstance(column, mx.array):
        column = mx.full((*part.shape[:-1], 1), column, part.dtype)
    return mx.concatenate([part, column], axis=-1)


def _transposed(part: mx.array) -> mx.array:
    return part.swapaxes(-1, -2)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)


def _grown(sums: list[mx.array], *parts: mx.array) -> list[mx.array]:
    """Gradients by key, where each tile reaches further than the one before; query heads that share one add up."""
    added = [part if part.shape[1] == 1 else part.sum(axis=1, keepdims=True) for part in parts]
    if not sums:
        return added
    old = sums[0].shape[-2]
    return [
        mx.concatenate([total + part[..., :old, :], part[..., old:, :]], axis=-2)
        for total, part in zip(sums, added, strict=True)
    ]


def _hidden(start: int, stop: int, width: int, window: int | None, tiles: Tiles) -> mx.array:
    """(queries, keys) of a tile: 0 for keys that a query may look at, far below any score for the others."""
    before = -(-width // tiles.most_queries) * tiles.most_queries
    return _band(before, window, tiles.most_queries)[: stop - start, before - start : before - start + stop]


@functools.lru_cache(maxsize=4)
def _band(before: int, window: int | None, queries: int) -> mx.array:
    """(queries, before + queries): the same for queries that have ``before`` keys to their left.

    All tiles are parts of the last one's, so that nothing is kept that grows with the square of a row.
    """
    distance = before + np.arange(queries)[:, None] - np.arange(before + queries)[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return mx.array(np.where(seen, 0.0, HIDDEN_SCORE).astype(np.float32))
