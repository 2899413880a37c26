"""Attention over rows of different lengths that lie one after the other in one list of tokens.

Everything else in a transformer works token by token, so a list needs no padding there. Attention takes the rows in
rectangles, each in one of three ways that BatchLayout chooses by backend.

Two of these never have all scores in memory, and give their own gradient. Queries are scored in tiles, each against the
keys up to its last query, and a tile waits for the one before. The forward pass keeps one float32 a query at most, its
log-sum-exp; the backward pass makes each tile's probabilities again (FlashAttention-2, arXiv 2307.08691, without tiles
of keys). In tiles, queries are (lines, groups, width, size), keys and values (lines, 1, width, size): a line is a key
head of a row.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.memory.terms import CPU_TILES, GPU_TILES, Tiles
from safetrain.engine.activations import LOG2_E

HIDDEN_SCORE = -1e30
LOWEST_EXPONENT = -60.0  # a smaller power changes no float32 sum; its products would be subnormal, and very slow

Arrays = tuple[mx.array, ...]
Pass = Callable[..., Arrays]  # (scale, window, *arrays)


class Way(enum.Enum):
    """How a rectangle's attention is computed."""

    POWERS = enum.auto()  # in tiles, by powers of 2: CPU
    SOFTMAX = enum.auto()  # in tiles, by mlx's softmax: a GPU
    FUSED = enum.auto()  # in one kernel of mlx, where the backend has one


@dataclass(frozen=True)
class Gather:
    """How rows of different lengths become a rectangle and come back; indices count from the block's start."""

    places: mx.array  # (rows * width,) the token at each place, any for padding
    real: mx.array  # (rows * width, 1, 1, 1) 1.0, and 0.0 for padding
    back: mx.array  # (tokens,) the place of each token


@dataclass(frozen=True)
class Block:
    """``rows`` rows of at most ``width`` tokens that are computed as one rectangle; ``gather`` if they differ.

    They lie in the list from ``start`` to ``stop``, one after the other.
    """

    start: int
    stop: int
    rows: int
    width: int
    gather: Gather | None = None
    way: Way = Way.POWERS


@dataclass(frozen=True)
class PackedRows:
    """Where the rows lie."""

    offsets: mx.array  # (tokens,) place of each token in its row
    blocks: tuple[Block, ...]


def block_attention(block: Block, scale: float, window: int | None) -> Callable[..., mx.array]:
    """Causal attention of one rectangle: takes and gives (tokens, heads, 1, size)."""
    if block.way is not Way.FUSED:
        return _tiled(block, scale, window, block.way)
    if window is not None and window < block.width:  # the kernels know no window
        return _tiled(block, scale, window, Way.SOFTMAX)
    return _fused(block, scale)


def _fused(block: Block, scale: float) -> Callable[..., mx.array]:
    """Without a mask array: mlx would make one of (heads, width, width) numbers."""

    def attend(*parts: mx.array) -> mx.array:
        q, k, v = (_from_list(block, part).transpose(0, 2, 1, 3) for part in parts)
        output = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        return _to_list(block, output.transpose(0, 2, 1, 3))

    return attend


def _tiled(block: Block, scale: float, window: int | None, way: Way) -> Callable[..., mx.array]:
    forward_pass, backward_pass, tiles = PASSES[way]

    def forward(*parts: mx.array) -> Arrays:
        output, *kept = line_by_line(forward_pass, tiles, scale, window, _all_lines(block, *parts))
        return (_of_lines(block, output, parts[0]), *kept)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        groups = primals[0].shape[1] // primals[1].shape[1]
        along, output = (_lines(block, part, groups) for part in (cotangents[0], outputs[0]))
        made = line_by_line(
            backward_pass, tiles, scale, window, (*_all_lines(block, *primals), along, output, *outputs[1:])
        )
        return tuple(_of_lines(block, part, primal) for part, primal in zip(made, primals, strict=True))

    attend: Any = mx.custom_function(forward)
    attend.vjp(backward)
    return lambda *parts: attend(*parts)[0]


def _all_lines(block: Block, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    return _lines(block, q, q.shape[1] // k.shape[1]), _lines(block, k, 1), _lines(block, v, 1)


def _lines(block: Block, part: mx.array, groups: int) -> mx.array:
    """(tokens, heads, 1, size) -> (rows * key heads, groups, width, size)."""
    heads, size = part.shape[1], part.shape[3]
    split = _from_list(block, part).reshape(block.rows, block.width, heads // groups, groups, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(-1, groups, block.width, size)


def _of_lines(block: Block, part: mx.array, like: mx.array) -> mx.array:
    """(rows * key heads, groups, width, size) -> (tokens, heads, 1, size), as ``like`` is."""
    heads, groups, size = like.shape[1], part.shape[1], part.shape[3]
    split = part.reshape(block.rows, heads // groups, groups, block.width, size).transpose(0, 3, 1, 2, 4)
    return _to_list(block, split.reshape(block.rows, block.width, heads, size))


def _from_list(block: Block, part: mx.array) -> mx.array:
    """(tokens, heads, 1, size) -> (rows, width, heads, size), padding zero."""
    if block.gather is not None:
        part = part[block.gather.places] * block.gather.real
    return part.reshape(block.rows, block.width, part.shape[1], part.shape[3])


def _to_list(block: Block, part: mx.array) -> mx.array:
    """(rows, width, heads, size) -> (tokens, heads, 1, size)."""
    whole = part.reshape(block.rows * block.width, part.shape[2], 1, part.shape[3])
    return whole if block.gather is None else whole[block.gather.back]


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
        powers = _powers(scores - peaks[-1])
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
        powers = _powers(scores)
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


def _powers(scores: mx.array) -> mx.array:
    """Of 2, and exactly 0 for hidden scores."""
    return mx.power(2.0, mx.maximum(scores, LOWEST_EXPONENT)) - 2.0**LOWEST_EXPONENT


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


PASSES: dict[Way, tuple[Pass, Pass, Tiles]] = {
    Way.POWERS: (powers_forward, powers_backward, CPU_TILES),
    Way.SOFTMAX: (softmax_forward, softmax_backward, GPU_TILES),
}
