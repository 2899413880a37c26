"""Attention in tiles of queries, so that memory never holds all scores; with mlx's softmax, for a GPU.

Each tile is scored against the keys up to its last query, and waits for the one before. The backward pass recomputes
its probabilities (FlashAttention-2, arXiv 2307.08691, without tiles of keys). Queries are (lines, groups, width,
size), keys and values (lines, 1, width, size): a line is a key head of a row.
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from safetrain.core.memory.terms import GPU_TILES, Tiles

HIDDEN_SCORE = -1e30

Arrays = tuple[mx.array, ...]
Pass = Callable[..., Arrays]  # (scale, window, *arrays)


def softmax_forward(scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array) -> Arrays:
    """Attention for a GPU, where a softmax is one kernel; returns only the outputs, in the inputs' type."""
    scaled, k, v, outputs = q * scale, mx.contiguous(k), mx.contiguous(v), list[mx.array]()
    for start, stop in spans(q.shape[2], GPU_TILES):
        (here,) = after(outputs[-1:], scaled[..., start:stop, :])
        powers = _softmax(here, k[..., :stop, :], hidden(start, stop, q.shape[2], window, GPU_TILES))
        outputs.append(powers @ v[..., :stop, :])
    return (joined(outputs),)


def softmax_backward(
    scale: float, window: int | None, q: mx.array, k: mx.array, v: mx.array, along: mx.array, output: mx.array
) -> Arrays:
    """Gradients of queries, keys and values, from the gradient of the outputs."""
    inner = (along * output).astype(mx.float32).sum(axis=-1, keepdims=True)
    scaled, k, v, along = q * scale, mx.contiguous(k), mx.contiguous(v), mx.contiguous(along)
    d_queries, sums = list[mx.array](), list[mx.array]()
    for start, stop in spans(q.shape[2], GPU_TILES):
        before = [*d_queries[-1:], *sums]
        queries, here = after(before, scaled[..., start:stop, :], along[..., start:stop, :])
        powers = _softmax(queries, k[..., :stop, :], hidden(start, stop, q.shape[2], window, GPU_TILES))
        d_powers = here @ transposed(v[..., :stop, :])
        d_scores = (powers * (d_powers - inner[..., start:stop, :])).astype(q.dtype)
        d_queries.append(d_scores @ k[..., :stop, :])
        sums = grown(sums, transposed(d_scores) @ queries, transposed(powers) @ here)
    return joined(d_queries) * scale, *sums


def _softmax(queries: mx.array, keys: mx.array, hidden: mx.array) -> mx.array:
    scores = queries @ transposed(keys)
    return mx.softmax(scores + hidden.astype(scores.dtype), axis=-1, precise=True)  # in float16 minus infinity


def spans(width: int, tiles: Tiles) -> list[tuple[int, int]]:
    """First query of each tile, and the one after its last, which is the number of keys that it is scored against."""
    size = tiles.queries(width)
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def after(before: Sequence[mx.array], *arrays: mx.array) -> Sequence[mx.array]:
    """Delay arrays until ``before`` is computed: mlx would start many tiles at once, each using memory."""
    return mx.depends(list(arrays), list(before)) if before else arrays


def transposed(part: mx.array) -> mx.array:
    return part.swapaxes(-1, -2)


def joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)


def grown(sums: list[mx.array], *parts: mx.array) -> list[mx.array]:
    """Gradients by key, where each tile reaches further than the one before; query heads that share one add up."""
    added = [part if part.shape[1] == 1 else part.sum(axis=1, keepdims=True) for part in parts]
    if not sums:
        return added
    old = sums[0].shape[-2]
    return [
        mx.concatenate([total + part[..., :old, :], part[..., old:, :]], axis=-2)
        for total, part in zip(sums, added, strict=True)
    ]


def hidden(start: int, stop: int, width: int, window: int | None, tiles: Tiles) -> mx.array:
    """(queries, keys) of a tile: 0 for keys that a query sees, far below any score for the others."""
    before = -(-width // tiles.most_queries) * tiles.most_queries
    return _band(before, window, tiles.most_queries)[: stop - start, before - start : before - start + stop]


@functools.lru_cache(maxsize=4)
def _band(before: int, window: int | None, queries: int) -> mx.array:
    """(queries, before + queries): the same for queries that have ``before`` keys to their left.

    All tiles are parts of the last one's, so nothing cached grows with the square of a row's length.
    """
    distance = before + np.arange(queries)[:, None] - np.arange(before + queries)[None, :]
    is_visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return mx.array(np.where(is_visible, 0.0, HIDDEN_SCORE).astype(np.float32))
