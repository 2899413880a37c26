"""Attention over rows of different lengths, packed into one list of tokens.

Everything else in a transformer works token by token, so it needs no padding. Attention computes the rows in
rectangles, each in one of three ways, which BatchLayout chooses by backend.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from safetrain.core.memory.terms import CPU_TILES, GPU_TILES, MOST_METAL_BYTES, Tiles, metal_row_bytes
from safetrain.engine.cpu.kernels import powers_backward, powers_forward
from safetrain.engine.layers import with_gradient
from safetrain.engine.tiles import Arrays, Pass, after, softmax_backward, softmax_forward


class Way(enum.Enum):
    """How a rectangle's attention is computed."""

    POWERS = enum.auto()  # in tiles, with powers of 2: CPU
    SOFTMAX = enum.auto()  # in tiles, with mlx's softmax: GPU
    FUSED = enum.auto()  # with mlx's own kernels, if it has them


@dataclass(frozen=True)
class Gather:
    """How rows of different lengths become a rectangle and come back; indices count from the block's start."""

    places: mx.array  # (rows * width,) the token at each place; any token for padding
    real: mx.array  # (rows * width, 1, 1, 1) 1.0 for tokens, 0.0 for padding
    back: mx.array  # (tokens,) the place of each token


@dataclass(frozen=True)
class Block:
    """``rows`` rows of up to ``width`` tokens, computed as one rectangle; with ``gather`` if their lengths differ.

    They are the tokens from ``start`` to ``stop`` in the list.
    """

    start: int
    stop: int
    rows: int
    width: int
    gather: Gather | None = None
    way: Way = Way.POWERS


@dataclass(frozen=True)
class PackedRows:
    """Positions of packed rows."""

    offsets: mx.array  # (tokens,) position of each token in its row
    blocks: tuple[Block, ...]


def block_attention(block: Block, scale: float, window: int | None) -> Callable[..., mx.array]:
    """Causal attention in one rectangle; inputs and outputs are (tokens, heads, 1, size)."""
    if block.way is not Way.FUSED:
        return _tiled(block, scale, window, block.way)
    if window is not None and window < block.width:  # the kernels have no sliding window
        return _tiled(block, scale, window, Way.SOFTMAX)
    return _fused(block, scale)


def _fused(block: Block, scale: float) -> Callable[..., mx.array]:
    """Attention with mlx's kernels and no mask array, which would have (heads, width, width) numbers.

    On Metal it takes a few rows at a time: the backward pass holds tiles of all heads for all rows of a call.
    """

    def attend(*parts: mx.array) -> mx.array:
        step = block.rows
        if mx.metal.is_available():
            step = max(1, MOST_METAL_BYTES // metal_row_bytes(parts[0].shape[1], block.width, parts[0].itemsize))
        places = list(range(step, block.rows, step))
        pieces = (mx.split(_from_list(block, part).transpose(0, 2, 1, 3), places) for part in parts)
        kernel = functools.partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
        output = mx.concatenate([kernel(*rows) for rows in zip(*pieces, strict=True)])
        return _to_list(block, output.transpose(0, 2, 1, 3))

    return attend


def _tiled(block: Block, scale: float, window: int | None, way: Way) -> Callable[..., mx.array]:
    forward_pass, backward_pass, tiles = PASSES[way]

    def forward(*parts: mx.array) -> Arrays:
        lines = [_lines(block, part, part.shape[1] // parts[1].shape[1]) for part in parts]
        output, *rest = line_by_line(forward_pass, tiles, scale, window, lines)
        return (_of_lines(block, output, parts[0]), *rest)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        parts = (*primals, cotangents[0], outputs[0])
        lines = [_lines(block, part, part.shape[1] // primals[1].shape[1]) for part in parts]
        gradients = line_by_line(backward_pass, tiles, scale, window, (*lines, *outputs[1:]))
        return tuple(_of_lines(block, part, primal) for part, primal in zip(gradients, primals, strict=True))

    attend = with_gradient(forward, backward)
    return lambda *parts: attend(*parts)[0]


def _lines(block: Block, part: mx.array, groups: int) -> mx.array:
    """(tokens, heads, 1, size) -> (rows * key heads, groups, width, size)."""
    heads, size = part.shape[1], part.shape[3]
    split = _from_list(block, part).reshape(block.rows, block.width, heads // groups, groups, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(-1, groups, block.width, size)


def _of_lines(block: Block, part: mx.array, like: mx.array) -> mx.array:
    """(rows * key heads, groups, width, size) -> (tokens, heads, 1, size), the shape of ``like``."""
    heads, groups, size = like.shape[1], part.shape[1], part.shape[3]
    split = part.reshape(block.rows, heads // groups, groups, block.width, size).transpose(0, 3, 1, 2, 4)
    return _to_list(block, split.reshape(block.rows, block.width, heads, size))


def _from_list(block: Block, part: mx.array) -> mx.array:
    """(tokens, heads, 1, size) -> (rows, width, heads, size), with zeros for padding."""
    if block.gather is not None:
        part = part[block.gather.places] * block.gather.real
    return part.reshape(block.rows, block.width, part.shape[1], part.shape[3])


def _to_list(block: Block, part: mx.array) -> mx.array:
    """(rows, width, heads, size) -> (tokens, heads, 1, size)."""
    rows = part.reshape(block.rows * block.width, part.shape[2], 1, part.shape[3])
    return rows if block.gather is None else rows[block.gather.back]


def line_by_line(compute: Pass, tiles: Tiles, scale: float, window: int | None, arrays: Sequence[mx.array]) -> Arrays:
    """Call ``compute`` for a few lines at a time, so that tiles stay small for any number of rows and heads."""
    count, groups, width, _ = arrays[0].shape
    step, made = tiles.lines(groups, width, arrays[0].itemsize), list[Arrays]()
    for start in range(0, count, step):
        lines = after(made[-1] if made else (), *(each[start : start + step] for each in arrays))
        made.append(compute(scale, window, *lines))
    return made[0] if len(made) == 1 else tuple(mx.concatenate(list(parts)) for parts in zip(*made, strict=True))


PASSES: dict[Way, tuple[Pass, Pass, Tiles]] = {
    Way.POWERS: (powers_forward, powers_backward, CPU_TILES),
    Way.SOFTMAX: (softmax_forward, softmax_backward, GPU_TILES),
}
