"""Attention over rows of different lengths that lie one after the other in one list of tokens.

Everything else in a transformer works token by token, so a list needs no padding there. Two ways, chosen by backend:
rectangles of rows, with a softmax to base 2 and its own gradient (CPU, where ``mx.exp`` is slow, and Metal), and one
call under a block-diagonal mask (CUDA, whose backward pass is fused too).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.memory_terms import QUERY_TILE
from safetrain.engine.activations import LOG2_E

HIDDEN_SCORE = -1e30
LOWEST_EXPONENT = -126.0  # of a normal float32; powers below it are several times slower

Arrays = Any  # a tuple of arrays; mlx types custom gradients as object


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


@dataclass(frozen=True)
class Rows:
    """Where the rows lie. ``segments`` numbers the row of each token and is there for the masked way alone."""

    offsets: mx.array  # (tokens,) place of each token in its row
    blocks: tuple[Block, ...]
    segments: mx.array | None = None


@dataclass(frozen=True)
class Window:
    """Stands in for the mask that a model makes: how far back its layer may look, None for everything before."""

    size: int | None


class RowsCache:
    """Stands in for a key-value cache, which is how mlx-lm's layers learn positions: each token is a row of its own.

    Model code sees (tokens, 1) ids, rotates each token by its own offset, and hands this object to the attention.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.offset = rows.offsets

    def make_mask(self, _length: int, *, return_array: bool = False, window_size: int | None = None) -> Window:
        """What mlx-lm asks a cache for in place of a mask."""
        del return_array
        return Window(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Nothing is kept."""
        return keys, values


def rows_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention function, with the case of a ``RowsCache`` added."""

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(cache, RowsCache):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if sinks is not None or not isinstance(mask, Window):
            raise NotImplementedError("attention sinks, or a mask of the model's own")
        if cache.rows.segments is not None:
            return _masked(queries, keys, values, scale, cache.rows, mask)
        return _in_blocks(queries, keys, values, scale, cache.rows.blocks, mask)

    return attention


def _masked(q: mx.array, k: mx.array, v: mx.array, scale: float, rows: Rows, window: Window) -> mx.array:
    """(tokens, heads, 1, size) each; one call for all rows."""
    segments, offsets = rows.segments, rows.offsets
    if segments is None:
        raise ValueError("the masked way needs segments")
    distance = offsets[:, None] - offsets[None, :]
    seen = (segments[:, None] == segments[None, :]) & (distance >= 0)
    if window.size is not None:
        seen = seen & (distance < window.size)
    q, k, v = (part.transpose(2, 1, 0, 3) for part in (q, k, v))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen).transpose(2, 1, 0, 3)


def _in_blocks(
    q: mx.array, k: mx.array, v: mx.array, scale: float, blocks: tuple[Block, ...], window: Window
) -> mx.array:
    """(tokens, heads, 1, size) each; one rectangle after the other."""
    parts = [
        _block_attention(block, scale, window.size)(*(x[block.start : block.stop] for x in (q, k, v)))[0]
        for block in blocks
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _block_attention(block: Block, scale: float, window: int | None) -> Any:
    """Causal attention of one rectangle, its queries in tiles, so that keys after a tile are never scored.

    Takes and gives (tokens, heads, 1, size). The probabilities are kept for the gradient, which is written out.
    """

    def forward(q: mx.array, k: mx.array, v: mx.array) -> Arrays:
        queries, keys, values = _rectangles(block, q, k, v)
        scaled = queries * (scale * LOG2_E)
        outputs, kept = [], []
        for start, stop in _tiles(block.width):
            scores = scaled[..., start:stop, :] @ keys[..., :stop, :].swapaxes(-1, -2) + _hidden(start, stop, window)
            powers = mx.power(2.0, mx.maximum(scores - scores.max(axis=-1, keepdims=True), LOWEST_EXPONENT))
            powers = (powers / powers.sum(axis=-1, keepdims=True)).astype(values.dtype)  # scores are float32
            outputs.append(powers @ values[..., :stop, :])
            kept.append(powers)
        return (_list(block, _joined(outputs)), *kept)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        queries, keys, values = _rectangles(block, *primals)
        groups = primals[0].shape[1] // primals[1].shape[1]
        along, result = (_rectangle(block, x, groups, cotangent=True) for x in (cotangents[0], outputs[0]))
        inner = (along * result).sum(axis=-1, keepdims=True)  # over keys: powers times their gradient
        d_queries = []
        d_keys = d_values = None
        for (start, stop), powers in zip(_tiles(block.width), outputs[1:], strict=True):
            here = along[..., start:stop, :]
            d_powers = here @ values[..., :stop, :].swapaxes(-1, -2)
            d_scores = powers * (d_powers - inner[..., start:stop, :]) * scale
            d_queries.append(d_scores @ keys[..., :stop, :])
            d_keys = _grow(d_keys, _over_groups(d_scores.swapaxes(-1, -2) @ queries[..., start:stop, :]))
            d_values = _grow(d_values, _over_groups(powers.swapaxes(-1, -2) @ here))
        return tuple(_list(block, part) for part in (_joined(d_queries), d_keys, d_values))

    attend: Any = mx.custom_function(forward)
    attend.vjp(backward)
    return attend


def _rectangles(block: Block, q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    groups = q.shape[1] // k.shape[1]
    return _rectangle(block, q, groups), _rectangle(block, k, 1), _rectangle(block, v, 1)


def _rectangle(block: Block, part: mx.array, groups: int, *, cotangent: bool = False) -> mx.array:
    """(tokens, heads, 1, size) -> (rows, key heads, groups, width, size); a cotangent of padding is zero."""
    if block.gather is not None:
        part = part[block.gather.places]
        if cotangent:
            part = part * block.gather.real
    heads, size = part.shape[1], part.shape[3]
    return part.reshape(block.rows, block.width, heads // groups, groups, size).transpose(0, 2, 3, 1, 4)


def _list(block: Block, part: mx.array | None) -> mx.array:
    """(rows, key heads, groups, width, size) -> (tokens, heads, 1, size)."""
    if part is None:
        raise ValueError("a rectangle without rows")
    heads, size = part.shape[1] * part.shape[2], part.shape[4]
    whole = part.transpose(0, 3, 1, 2, 4).reshape(block.rows * block.width, heads, 1, size)
    return whole if block.gather is None else whole[block.gather.back]


def _over_groups(part: mx.array) -> mx.array:
    """Query heads that share a key head add up."""
    return part if part.shape[2] == 1 else part.sum(axis=2, keepdims=True)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)


def _tiles(width: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_TILE, width)) for start in range(0, width, QUERY_TILE)]


@functools.lru_cache(maxsize=64)
def _hidden(start: int, stop: int, window: int | None) -> mx.array:
    """(queries, keys): 0 for keys that a query may look at, far below any score for the others."""
    distance = np.arange(start, stop)[:, None] - np.arange(stop)[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return mx.array(np.where(seen, 0.0, HIDDEN_SCORE).astype(np.float32))


def _grow(total: mx.array | None, part: mx.array) -> mx.array:
    """Sum of gradients by key, where each part reaches further than the one before."""
    if total is None:
        return part
    old = total.shape[-2]
    return mx.concatenate([total + part[..., :old, :], part[..., old:, :]], axis=-2)
