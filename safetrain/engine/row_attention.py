"""Causal attention over rows of different lengths, packed into one list of tokens, or padded to one length on a GPU.

Everything else in a transformer works token by token, so packed rows need no padding. Attention computes them in
rectangles, in tiles of queries, so that memory never holds all scores: each tile is scored against the keys up to its
last query, and waits for the tile before. The backward pass recomputes the probabilities (FlashAttention-2,
arXiv 2307.08691, without tiles of keys). Tiles take powers of 2 in float32, which a CPU computes three times as fast
as mlx's softmax. A GPU uses mlx's own kernels, and tiles only for shapes without a kernel.

In tiles, queries have shape (lines, groups, width, size), keys and values (lines, 1, width, size): a line is a key head
of a row.
"""

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from safetrain.core.memory.terms import CPU_TILES, CUDA_WIDTH, GPU_TILES, MOST_METAL_BYTES, Tiles, metal_row_bytes
from safetrain.engine.backend import device
from safetrain.engine.layers import with_gradient

HIDDEN_SCORE = -1e30
LOG2_E = 1.4426950408889634  # exp(x) is 2 ** (x * LOG2_E)
LOWEST_EXPONENT = -60.0  # a smaller power changes no float32 sum; its products would be subnormal, and very slow
GRADIENT_KERNEL = "ScaledDotProductAttentionVJP"  # as mlx's graphs name it

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True)
class Gather:
    """How rows of different lengths become a rectangle and come back; indices count from the block's start."""

    places: mx.array  # (rows * width,) the token at each place; any token for padding
    real: mx.array  # (rows * width, 1, 1, 1) 1.0 for tokens, 0.0 for padding
    back: mx.array  # (tokens,) the place of each token


@dataclass(frozen=True)
class Block:
    """``rows`` rows of up to ``width`` tokens, computed as one rectangle; with ``gather`` if their lengths differ.

    Its tokens are those from ``start`` to ``stop`` in the packed list.
    """

    start: int
    stop: int
    rows: int
    width: int
    gather: Gather | None = None


@dataclass(frozen=True)
class PackedRows:
    """Positions of packed rows."""

    offsets: mx.array  # (tokens,) position of each token in its row
    blocks: tuple[Block, ...]


def padded_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of rows padded to one length on a GPU; all arrays are (rows, heads, width, size).

    On Metal, mlx's kernels take a few rows at a time: the backward pass holds tiles of all heads for all rows of a
    call. On CUDA they take rows whose width is a multiple of CUDA_WIDTH: no token sees those after it, so more padding
    changes nothing.
    """
    rows, heads, width, size = queries.shape
    on_metal = mx.metal.is_available()
    more = 0 if on_metal else -width % CUDA_WIDTH
    if values.shape[-1] == size and has_gradient_kernel(width + more, size, queries.dtype):
        if more:  # without any, mlx copies too
            padding = [(0, 0), (0, 0), (0, more), (0, 0)]
            queries, keys, values = (mx.pad(part, padding) for part in (queries, keys, values))
        step = max(1, MOST_METAL_BYTES // metal_row_bytes(heads, width, queries.itemsize)) if on_metal else rows
        pieces = (mx.split(part, list(range(step, rows, step))) for part in (queries, keys, values))
        kernel = functools.partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
        return mx.concatenate([kernel(*some) for some in zip(*pieces, strict=True)])[:, :, :width]
    listed = (
        part.transpose(0, 2, 1, 3).reshape(rows * width, part.shape[1], 1, part.shape[3])
        for part in (queries, keys, values)
    )
    output = block_attention(Block(0, rows * width, rows, width), scale, None)(*listed)
    return output.reshape(rows, width, heads, -1).transpose(0, 2, 1, 3)


@functools.cache
def has_gradient_kernel(width: int, head_size: int, dtype: mx.Dtype) -> bool:
    """Whether mlx has a kernel for the gradient of causal attention of this shape. Without one, mlx keeps all scores.

    mlx chooses its kernels when it builds a graph, so nothing is computed.
    """
    attend = functools.partial(mx.fast.scaled_dot_product_attention, scale=1.0, mask="causal")
    part, graph = mx.zeros((1, 1, width, head_size), dtype), io.StringIO()
    mx.export_to_dot(graph, *mx.vjp(attend, [part] * 3, [part])[1])
    return GRADIENT_KERNEL in graph.getvalue()


def block_attention(block: Block, scale: float, window: int | None) -> Callable[..., mx.array]:
    """Attention in one rectangle, in tiles; inputs and outputs are (tokens, heads, 1, size)."""
    tiles = CPU_TILES if device().on_cpu else GPU_TILES

    def forward(*parts: mx.array) -> Arrays:
        lines = [_lines(block, part, part.shape[1] // parts[1].shape[1]) for part in parts]
        output, log_sums = line_by_line(_tiles_forward, tiles, scale, window, lines)
        return _of_lines(block, output, parts[0]), log_sums

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        parts = (*primals, cotangents[0], outputs[0])
        lines = [_lines(block, part, part.shape[1] // primals[1].shape[1]) for part in parts]
        gradients = line_by_line(_tiles_backward, tiles, scale, window, (*lines, outputs[1]))
        return tuple(_of_lines(block, part, primal) for part, primal in zip(gradients, primals, strict=True))

    attend = with_gradient(forward, backward)
    return lambda *parts: attend(*parts)[0]


def line_by_line(
    compute: Callable[..., Arrays], tiles: Tiles, scale: float, window: int | None, arrays: Sequence[mx.array]
) -> Arrays:
    """Call ``compute`` for a few lines at a time, so that tiles stay small for any number of rows and heads."""
    count, groups, width, _ = arrays[0].shape
    step, made = tiles.lines(groups, width, arrays[0].itemsize), list[Arrays]()
    for start in range(0, count, step):
        lines = _after(made[-1] if made else (), *(each[start : start + step] for each in arrays))
        made.append(compute(tiles, scale, window, *lines))
    return made[0] if len(made) == 1 else tuple(mx.concatenate(list(parts)) for parts in zip(*made, strict=True))


def _tiles_forward(tiles: Tiles, scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    """Outputs, and each query's base-2 log-sum-exp, (lines, groups, width, 1).

    An extra column in the factors of a product sums each query's powers for free, or adds a number to each score.
    """
    scaled, keys, values = q * (scale * LOG2_E), mx.contiguous(k), _with_column(v, 1.0)
    outputs, peaks = list[mx.array](), list[mx.array]()
    for start, stop in _spans(q.shape[2], tiles):
        (here,) = _after(outputs[-1:], scaled[..., start:stop, :])
        scores = here @ _transposed(keys[..., :stop, :]) + _hidden(start, stop, window)
        peaks.append(scores.max(axis=-1, keepdims=True))
        outputs.append(powers_of(scores - peaks[-1]) @ values[..., :stop, :])
    output = _joined(outputs)
    total = output[..., -1:]
    return output[..., :-1] / total, _joined(peaks) + mx.log2(total)


def _tiles_backward(
    tiles: Tiles, scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array, along: mx.array,
    output: mx.array, log_sums: mx.array,
) -> Arrays:  # fmt: skip
    """Gradients of queries, keys and values, from the gradient of the outputs."""
    inner = (along * output).sum(axis=-1, keepdims=True)  # over keys: powers times their gradient
    scaled, onward = _with_column(q * (scale * LOG2_E), -log_sums), _with_column(along, -inner)
    keys, values = _with_column(k, 1.0), _with_column(v, 1.0)
    d_queries, sums = list[mx.array](), list[mx.array]()
    for start, stop in _spans(q.shape[2], tiles):
        queries, here = _after([*d_queries[-1:], *sums], scaled[..., start:stop, :], onward[..., start:stop, :])
        powers = powers_of(queries @ _transposed(keys[..., :stop, :]) + _hidden(start, stop, window))
        d_scores = powers * (here @ _transposed(values[..., :stop, :]))
        d_queries.append(d_scores @ keys[..., :stop, :])
        sums = _grown(sums, _transposed(d_scores) @ queries, _transposed(powers) @ here)
    d_keys, d_values = sums
    return _joined(d_queries)[..., :-1] * scale, d_keys[..., :-1] * (1 / LOG2_E), d_values[..., :-1]


def powers_of(scores: mx.array) -> mx.array:
    """Powers of 2 of the scores, exactly 0 for hidden ones."""
    return mx.power(2.0, mx.maximum(scores, LOWEST_EXPONENT)) - 2.0**LOWEST_EXPONENT


def _with_column(part: mx.array, column: mx.array | float) -> mx.array:
    """(..., size) -> (..., size + 1)"""
    if not isinstance(column, mx.array):
        column = mx.full((*part.shape[:-1], 1), column, part.dtype)
    return mx.concatenate([part, column], axis=-1)


def _spans(width: int, tiles: Tiles) -> list[tuple[int, int]]:
    """Start and stop of the queries of each tile; ``stop`` is also the number of keys that a tile is scored against."""
    size = tiles.queries(width)
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def _hidden(start: int, stop: int, window: int | None) -> mx.array:
    """Numbers to add to a tile's scores, (queries, keys): 0 for keys that a query sees, else very low."""
    distance = mx.arange(start, stop)[:, None] - mx.arange(stop)
    is_visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return mx.where(is_visible, 0.0, HIDDEN_SCORE)


def _after(before: Sequence[mx.array], *arrays: mx.array) -> Sequence[mx.array]:
    """Delay arrays until ``before`` is computed; otherwise mlx would start many tiles at once, each using memory."""
    return mx.depends(list(arrays), list(before)) if before else arrays


def _transposed(part: mx.array) -> mx.array:
    return part.swapaxes(-1, -2)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)


def _grown(sums: list[mx.array], *parts: mx.array) -> list[mx.array]:
    """Add a tile's gradients by key: each tile has more keys than the last. Heads that share a key head are summed."""
    added = [part if part.shape[1] == 1 else part.sum(axis=1, keepdims=True) for part in parts]
    if not sums:
        return added
    old = sums[0].shape[-2]
    return [
        mx.concatenate([total + part[..., :old, :], part[..., old:, :]], axis=-2)
        for total, part in zip(sums, added, strict=True)
    ]


def _lines(block: Block, part: mx.array, groups: int) -> mx.array:
    """(tokens, heads, 1, size) -> (rows * key heads, groups, width, size), with zeros for padding, in float32."""
    heads, size = part.shape[1], part.shape[3]
    if block.gather is not None:
        part = part[block.gather.places] * block.gather.real
    split = part.astype(mx.float32).reshape(block.rows, block.width, heads // groups, groups, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(-1, groups, block.width, size)


def _of_lines(block: Block, part: mx.array, like: mx.array) -> mx.array:
    """(rows * key heads, groups, width, size) -> (tokens, heads, 1, size), the heads and type of ``like``."""
    heads, groups, size = like.shape[1], part.shape[1], part.shape[3]
    split = part.reshape(block.rows, heads // groups, groups, block.width, size).transpose(0, 3, 1, 2, 4)
    rows = split.reshape(block.rows * block.width, heads, 1, size).astype(like.dtype)
    return rows if block.gather is None else rows[block.gather.back]
