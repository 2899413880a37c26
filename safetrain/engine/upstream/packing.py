"""Rows of different lengths as one list of tokens through a model of mlx-lm, its attention replaced.

Whether it gives the numbers that each row gives alone is found by comparing them on a few tokens, never by the model's
name. Without a ``PackedRowsCache`` the attention is mlx-lm's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from safetrain.engine.row_attention import Block, PackedRows, Way, block_attention
from safetrain.engine.upstream.probing import Refusal, asked, through_few_blocks, trunk_of

PROBE_ROWS = ((1, 2, 3, 5, 7, 11, 13, 17), (2, 3, 5))
TOLERANCE, TOLERANCE_16_BIT = 1e-2, 5e-2  # largest difference, relative to the largest number


@dataclass(frozen=True)
class SlidingWindow:
    """Stands in for the mask that a model makes: how far back its layer may look, None for everything before."""

    size: int | None


class PackedRowsCache:
    """Stands in for a key-value cache, which is how mlx-lm's layers learn positions: each token is a row of its own.

    Model code sees (tokens, 1) ids, rotates each token by its own offset, and hands this object to the attention.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows
        self.offset = rows.offsets

    def make_mask(self, _length: int, *, return_array: bool = False, window_size: int | None = None) -> SlidingWindow:
        """The stand-in for a mask that mlx-lm gets from a cache."""
        del return_array
        return SlidingWindow(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Nothing is kept."""
        return keys, values


def packed_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention function, with the case of a ``PackedRowsCache`` added."""
    if not isinstance(cache, PackedRowsCache):
        return scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if sinks is not None:
        raise Refusal("its attention has sinks")
    if not isinstance(mask, SlidingWindow):
        raise Refusal("its attention has its own mask")
    outputs = [
        block_attention(block, scale, mask.size)(*(x[block.start : block.stop] for x in (queries, keys, values)))
        for block in cache.rows.blocks
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def packing_refusal(module: Any, ways: Sequence[Way] = tuple(Way)) -> str:
    """Why rows in one list do not give the numbers that each gives alone in these ways; empty where they do."""
    try:
        return through_few_blocks(module, lambda: "" if _agree(module, ways) else "other numbers than row by row")
    except Refusal as refusal:
        return str(refusal)


def call_packed(call: Callable[..., mx.array], layers: int, ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model or its trunk on (tokens,) ids that lie as ``rows`` says; returns (tokens, features)."""
    return call(ids[:, None], cache=[PackedRowsCache(rows)] * layers).squeeze(1)


def call_padded(call: Callable[..., mx.array], ids: mx.array, rows: PackedRows) -> mx.array:
    """The same for a model that takes no lists, of rows in one rectangle."""
    (block,) = rows.blocks
    values = call(ids.reshape(block.rows, block.width))
    return values.reshape(-1, values.shape[-1])


def _agree(module: Any, ways: Sequence[Way]) -> bool:
    call = trunk_of(module) or module  # the head sees one token at a time
    alone = [asked(call, mx.array([row]))[0] for row in PROBE_ROWS]
    tolerance = tolerance_of(alone[0].dtype) * max(_largest(values) for values in alone)
    offsets = mx.array([place for row in PROBE_ROWS for place in range(len(row))])
    ids, layers = mx.array([token for row in PROBE_ROWS for token in row]), len(module.layers)
    for way in ways:
        blocks, start = list[Block](), 0
        for row in PROBE_ROWS:
            blocks.append(Block(start, start + len(row), 1, len(row), way=way))
            start += len(row)
        packed = asked(call_packed, call, layers, ids, PackedRows(offsets, tuple(blocks)))
        for block, values in zip(blocks, alone, strict=True):
            here = packed[block.start : block.stop]
            if here.shape != values.shape or not _largest(here.astype(mx.float32) - values) <= tolerance:
                return False
    return True


def tolerance_of(dtype: Any) -> float:
    """The largest difference that is rounding."""
    return TOLERANCE if dtype == mx.float32 else TOLERANCE_16_BIT


def _largest(values: mx.array) -> float:
    return float(np.array(mx.abs(values.astype(mx.float32)).max()))
