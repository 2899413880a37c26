"""Functions of mlx-lm that this engine replaces: attention over packed rows, SwiGLU, the gated delta rule.

mlx-lm's model files import them by name. ``replace`` swaps them in the files that define one model's classes.
Each replacement calls mlx-lm's own function outside its special case.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.gated_delta import gated_delta_update

from safetrain.engine.backend import device
from safetrain.engine.cpu import kernels
from safetrain.engine.layers import recomputed
from safetrain.engine.row_attention import PackedRows, block_attention
from safetrain.engine.upstream.probing import Refusal


@dataclass(frozen=True)
class SlidingWindow:
    """Takes the place of a model's attention mask: how many tokens a query sees, None for all before it."""

    size: int | None


class PackedRowsCache:
    """Takes the place of a key-value cache, from which mlx-lm's layers read positions: each token is a row of one.

    Model code sees (tokens, 1) ids, rotates each token by its own offset, and passes this object to the attention.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows
        self.offset = rows.offsets

    def make_mask(self, _length: int, *, return_array: bool = False, window_size: int | None = None) -> SlidingWindow:
        """Return the window where mlx-lm expects a mask."""
        del return_array
        return SlidingWindow(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return both unchanged: nothing is cached."""
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
    """mlx-lm's attention function, extended to take a ``PackedRowsCache``."""
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


def call_packed(call: Callable[..., mx.array], layers: int, ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model or its trunk on (tokens,) ids laid out as in ``rows``; returns (tokens, features)."""
    return call(ids[:, None], cache=[PackedRowsCache(rows)] * layers).squeeze(1)


def call_padded(call: Callable[..., mx.array], ids: mx.array, rows: PackedRows) -> mx.array:
    """Run a model that cannot take packed rows, on rows of one rectangle; returns the same."""
    (block,) = rows.blocks
    values = call(ids.reshape(block.rows, block.width))
    return values.reshape(-1, values.shape[-1])


def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's SwiGLU, or one without exponentials on a CPU."""
    return kernels.swiglu(gate, x) if device().avoids_exponentials else swiglu(gate, x)


def delta_rule_in_stretches(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array,
    state: mx.array | None = None, mask: mx.array | None = None, *, use_kernel: bool = True, **how: Any,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """mlx-lm's gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear), with less memory for its gradient.

    mlx-lm keeps the intermediate results of all n tokens: gigabytes per block at usual widths. In stretches of sqrt(n)
    tokens, which the backward pass recomputes, only 2 sqrt(n) are kept.
    """
    if use_kernel or mask is not None:
        return gated_delta_update(q, k, v, a, b, a_log, dt_bias, state, mask, use_kernel=use_kernel, **how)

    def step(*arrays: mx.array) -> list[mx.array]:
        *stretch, before = arrays[:6]
        return list(gated_delta_update(*stretch, *arrays[6:], before, None, use_kernel=False, **how))

    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), mx.float32)
    tokens, outputs = q.shape[1], list[mx.array]()
    size = math.isqrt(max(1, tokens - 1)) + 1
    for start in range(0, tokens, size):
        stretch = [each[:, start : start + size] for each in (q, k, v, a, b)]
        values, state = recomputed(step, 0)(*stretch, state, a_log, dt_bias)
        outputs.append(values)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


OURS = (
    (scaled_dot_product_attention, packed_attention),
    (swiglu, fast_swiglu),
    (gated_delta_update, delta_rule_in_stretches),
)


def replace(module: Any) -> bool:
    """Put our functions into the mlx-lm files that define ``module``; returns whether attention is among them."""
    kinds = {kind for _, part in module.named_modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("mlx_lm.models.")}
    for file in (sys.modules[name] for name in names):
        for name, value in list(vars(file).items()):
            for theirs, ours in OURS:
                if value is theirs:
                    setattr(file, name, ours)
    return any(value is packed_attention for name in names for value in vars(sys.modules[name]).values())
