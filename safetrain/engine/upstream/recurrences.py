"""Recurrences token by token, in stretches whose states are made again in the backward pass.

mlx-lm keeps what each token's state was made of: gigabytes a block at usual widths. Jamba's does worse: it writes the
states one by one into an array of all of them, which mlx copies for each token, because the state before is a view of
it. So a row of n tokens takes n times its states, and 64 tokens of a wide mixer 23 GB. In stretches of the square root
of n tokens, two square roots are kept. (measured: benchmarks/bench_families)
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.bailing_moe_linear import recurrent_gla  # its successor has another, in chunks
from mlx_lm.models.gated_delta import gated_delta_update

from safetrain.engine.checkpointing import recomputed
from safetrain.engine.upstream.rebind import give, rebind

Step = Callable[..., tuple[mx.array, mx.array]]  # a stretch of each sequence, the state, what all share


def by_stretches(
    step: Step, sequences: Sequence[mx.array], state: mx.array, shared: Sequence[mx.array] = (), axis: int = 1
) -> tuple[mx.array, mx.array]:
    """What ``step`` gives for the whole of ``sequences``, along ``axis``, and the last state."""
    tokens, made, count = sequences[0].shape[axis], list[mx.array](), len(sequences)
    size = math.isqrt(max(1, tokens - 1)) + 1

    def compute(*arrays: mx.array) -> list[mx.array]:
        return list(step(arrays[:count], arrays[count], arrays[count + 1 :]))

    cuts = list(range(size, tokens, size))
    parts = [mx.split(sequence, cuts, axis=axis) if cuts else [sequence] for sequence in sequences]
    for stretch in zip(*parts, strict=True):
        values, state = recomputed(compute, 0)(*stretch, state, *shared)
        made.append(values)
    return made[0] if len(made) == 1 else mx.concatenate(made, axis=axis), state


def train_in_stretches(module: Any) -> None:
    """Let every recurrence of ``module`` that is known here compute so while it trains."""
    rebind(module, {gated_delta_update: _gated_delta_update, recurrent_gla: _recurrent_gla})
    for _, part in module.named_modules():
        kind = type(part)
        if own := OWN_METHODS.get((kind.__module__, kind.__name__)):
            give(part, own)


def _gated_delta_update(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array,
    state: mx.array | None = None, mask: mx.array | None = None, *, use_kernel: bool = True, **how: Any,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """mlx-lm's gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear); it uses no kernel where a gradient is wanted."""
    if use_kernel or mask is not None:
        return gated_delta_update(q, k, v, a, b, a_log, dt_bias, state, mask, use_kernel=use_kernel, **how)

    def step(stretch: Sequence[mx.array], state: mx.array, shared: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        return gated_delta_update(*stretch, *shared, state, None, use_kernel=False, **how)

    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), mx.float32)
    return by_stretches(step, (q, k, v, a, b), state, (a_log, dt_bias))


def _recurrent_gla(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """mlx-lm's linear attention (Bailing's)."""

    def step(stretch: Sequence[mx.array], state: mx.array, shared: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        return recurrent_gla(*stretch, *shared, scale, state)

    if h is None:
        h = mx.zeros((*q.shape[:2], k.shape[-1], v.shape[-1]), q.dtype)
    return by_stretches(step, (q, k, v), h, (g,), axis=2)


def _jamba_ssm_step(self: Any, x: mx.array, a: mx.array, state: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Jamba's selective state space of ``x`` (rows, tokens, width), after arXiv 2312.00752 and 2403.19887."""
    rank, size = self.time_step_rank, self.ssm_state_size
    delta, b, c = mx.split(self.x_proj(x), [rank, rank + size], axis=-1)
    delta = nn.softplus(self.dt_proj(self.dt_layernorm(delta)))
    b, c = self.b_layernorm(b), self.c_layernorm(c)

    def step(stretch: Sequence[mx.array], state: mx.array, shared: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        delta, x, b, c = stretch
        made = []
        for t in range(x.shape[1]):
            kept = state * mx.exp(delta[:, t, :, None] * shared[0])
            state = kept + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
            made.append((state @ c[:, t, :, None]).squeeze(-1))
        return mx.stack(made, axis=1), state

    if state is None:
        state = mx.zeros((x.shape[0], x.shape[2], size), x.dtype)
    y, state = by_stretches(step, (delta, x, b, c), state, (a,))
    return y + self.D * x, state


def _wkv7(
    self: Any, r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """RWKV-7's, which on Metal is a kernel without a gradient."""
    kind: Any = next(kind for kind in type(self).__mro__ if "_wkv7" in vars(kind) and vars(kind)["_wkv7"] is not _wkv7)
    if not self.training:
        return kind._wkv7(self, r, w, k, v, a, b, state)
    one = sys.modules[kind.__module__]._wkv7_step_ops

    def step(stretch: Sequence[mx.array], state: mx.array, shared: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        del shared
        made = []
        for t in range(stretch[0].shape[1]):
            y, state = one(*(part[:, t] for part in stretch), state)
            made.append(y)
        return mx.stack(made, axis=1), state

    if state is None:
        state = mx.zeros((r.shape[0], self.num_heads, self.head_dim, self.head_dim), r.dtype)
    y, state = by_stretches(step, (r, w, k, v, a, b), state)
    return y.astype(r.dtype), state


OWN_METHODS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("mlx_lm.models.jamba", "JambaMambaMixer"): {"ssm_step": _jamba_ssm_step},
    ("mlx_lm.models.rwkv7", "Rwkv7TimeMixing"): {"_wkv7": _wkv7},
}
