"""Attention over rows of different lengths that lie one after the other in one list of tokens.

Everything else in a transformer works token by token, so a list needs no padding there. Two ways, chosen by backend:
rectangles of rows of one width, with a softmax to base 2 and its own gradient (CPU, where ``mx.exp`` is slow and a
fused kernel is missing), and one fused call under a block-diagonal mask (GPU).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from safetrain.core.memory import QUERY_TILE

LOG2_E = 1.4426950408889634
HIDDEN_SCORE = -1e30

Arrays = Any  # a tuple of arrays; mlx types custom gradients as object


@dataclass(frozen=True)
class Block:
    """``rows`` rows of ``width`` tokens each, from ``start`` in the list; shorter rows are padded at their end."""

    start: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.start + self.rows * self.width


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
    groups = q.shape[1] // k.shape[1]
    parts = []
    for block in blocks:
        qb, kb, vb = (_rectangle(part, block) for part in (q, k, v))
        qb = qb.reshape(block.rows, k.shape[1], groups, block.width, -1)
        attend = _block_attention(scale, window.size)
        out = attend(qb, kb[:, :, None], vb[:, :, None])[0]  # (rows, key heads, groups, width, size)
        parts.append(out.transpose(0, 3, 1, 2, 4).reshape(block.rows * block.width, q.shape[1], 1, v.shape[-1]))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _rectangle(part: mx.array, block: Block) -> mx.array:
    """(tokens, heads, 1, size) -> (rows, heads, width, size)."""
    heads, size = part.shape[1], part.shape[3]
    return part[block.start : block.stop].reshape(block.rows, block.width, heads, size).transpose(0, 2, 1, 3)


def _block_attention(scale: float, window: int | None) -> Any:
    """Causal attention of one rectangle, its queries in tiles, so that keys after a tile are never scored."""

    def forward(q: mx.array, k: mx.array, v: mx.array) -> Arrays:
        scaled = q * (scale * LOG2_E)
        outputs, kept = [], []
        for start, stop in _tiles(q.shape[-2]):
            scores = scaled[..., start:stop, :] @ k[..., :stop, :].swapaxes(-1, -2)
            scores = mx.where(_visible(start, stop, window), scores, HIDDEN_SCORE)
            powers = mx.power(2.0, mx.maximum(scores - scores.max(axis=-1, keepdims=True), -126.0))
            powers = powers / powers.sum(axis=-1, keepdims=True)
            outputs.append(powers @ v[..., :stop, :])
            kept.append(powers)
        return (mx.concatenate(outputs, axis=-2) if len(outputs) > 1 else outputs[0], *kept)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        q, k, v = primals
        along, queries = cotangents[0], []
        dk = dv = None
        for (start, stop), powers in zip(_tiles(q.shape[-2]), outputs[1:], strict=True):
            here = along[..., start:stop, :]
            d_powers = here @ v[..., :stop, :].swapaxes(-1, -2)
            # the sum over keys of d_powers * powers is the sum over features of along * output
            inner = (here * outputs[0][..., start:stop, :]).sum(axis=-1, keepdims=True)
            d_scores = powers * (d_powers - inner) * scale
            queries.append(d_scores @ k[..., :stop, :])
            dk = _grow(dk, (d_scores.swapaxes(-1, -2) @ q[..., start:stop, :]).sum(axis=2, keepdims=True))
            dv = _grow(dv, (powers.swapaxes(-1, -2) @ here).sum(axis=2, keepdims=True))
        return mx.concatenate(queries, axis=-2) if len(queries) > 1 else queries[0], dk, dv

    attend: Any = mx.custom_function(forward)
    attend.vjp(backward)
    return attend


def _tiles(width: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_TILE, width)) for start in range(0, width, QUERY_TILE)]


def _visible(start: int, stop: int, window: int | None) -> mx.array:
    """(queries, keys): which keys a query may look at."""
    distance = mx.arange(start, stop)[:, None] - mx.arange(stop)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _grow(total: mx.array | None, part: mx.array) -> mx.array:
    """Sum of gradients by key, where each part reaches further than the one before."""
    if total is None:
        return part
    old = total.shape[-2]
    return mx.concatenate([total + part[..., :old, :], part[..., old:, :]], axis=-2)
