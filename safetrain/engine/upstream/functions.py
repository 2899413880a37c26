"""Functions of mlx-lm that this engine computes in its own way: attention over packed rows, SwiGLU, the delta rule.

mlx-lm's model files import them by name. ``replace`` puts ours under that name in the files of one model's classes.
Each of ours hands on to mlx-lm's whatever is not its own case.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.gated_delta import gated_delta_update

from safetrain.engine.backend import device
from safetrain.engine.cpu import kernels
from safetrain.engine.layers import recomputed
from safetrain.engine.upstream.packing import packed_attention

Function = Callable[..., Any]


def fast_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's SwiGLU; on a CPU without exponentials."""
    return kernels.swiglu(gate, x) if device().avoids_exponentials else swiglu(gate, x)


def delta_rule_in_stretches(
    q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array,
    state: mx.array | None = None, mask: mx.array | None = None, *, use_kernel: bool = True, **how: Any,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """mlx-lm's gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear), where a gradient is wanted.

    mlx-lm keeps what each token's state was made of: gigabytes a block at usual widths. In stretches of the square root
    of n tokens, whose states the backward pass makes again, two square roots are kept.
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


OURS: Sequence[tuple[Function, Function]] = (
    (scaled_dot_product_attention, packed_attention),
    (swiglu, fast_swiglu),
    (gated_delta_update, delta_rule_in_stretches),
)


def replace(module: Any) -> bool:
    """Let the files of mlx-lm that ``module`` is made of use our functions; whether its attention is among them."""
    kinds = {kind for _, part in module.named_modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("mlx_lm.models.")}
    for file in (sys.modules[name] for name in names):
        for name, value in list(vars(file).items()):
            for theirs, ours in OURS:
                if value is theirs:
                    setattr(file, name, ours)
    return any(value is packed_attention for name in names for value in vars(sys.modules[name]).values())
