"""The measurements of `safetrain selftest --report` that need mlx: ``python -m safetrain.engine.report SECTION``.

A section is a process of its own, because what it measures may kill it. A figure is a line: section, tab, text.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from safetrain.core.formatting import counted, size_text
from safetrain.engine.child_process import die_with_parent, prefer_for_oom_kill
from safetrain.engine.cpu.blas import load_fast_blas


def main(section: str) -> None:
    """Print the figures of a section; sizes are small on a CPU, where large ones take minutes."""
    die_with_parent(os.getppid())
    prefer_for_oom_kill()
    load_fast_blas()
    from safetrain.engine.backend import device, keep_to_room

    keep_to_room()
    small = device().measures_small
    measure: dict[str, Callable[[], Iterator[str]]] = {
        "product": lambda: product(1024 if small else 4096),
        "attention": lambda: attention(*((2, 64) if small else (32, 128)), tokens=2048),
        "update": lambda: update(*((128, 2, 2048, 2, 128) if small else (2048, 4, 8192, 2, 512))),
    }
    for text in measure[section]():
        print(f"{section}\t{text}", flush=True)


def product(width: int) -> Iterator[str]:
    """A square product in each type that this backend multiplies fast."""
    import mlx.core as mx

    from safetrain.engine.backend import device
    from safetrain.engine.dtypes import time_operation

    for name in ("float32",) if device().measures_small else ("float32", "float16", "bfloat16"):
        matrix = mx.random.normal((width, width)).astype(getattr(mx, name))
        mx.eval(matrix)
        seconds, _ = time_operation(mx.matmul, matrix, matrix)
        yield f"{width:,} x {width:,} {name}: {2e-9 * width**3 / seconds:,.0f} GFLOP/s"


def attention(heads: int, head_dim: int, tokens: int) -> Iterator[str]:
    """Causal attention of one row, forward and with the gradient: safetrain's tiles, then mlx's own."""
    import mlx.core as mx

    from safetrain.engine.backend import device
    from safetrain.engine.dtypes import time_operation
    from safetrain.engine.row_attention import Block, block_attention

    def costs(name: str, attend: Callable[..., mx.array], *shape: int) -> Iterator[str]:
        inputs = [mx.random.normal(shape).astype(getattr(mx, dtype)) for _ in range(3)]
        mx.eval(inputs)
        gradient = mx.grad(lambda *parts: attend(*parts).sum(), argnums=(0, 1, 2))
        yield f"{name} forward: {_cost(*time_operation(attend, *inputs))}"
        yield f"{name} gradient: {_cost(*time_operation(gradient, *inputs))}"

    dtype, scale = "float32" if device().computes_in_float32 else "bfloat16", head_dim**-0.5
    yield f"{heads} heads of size {head_dim}, {tokens:,} tokens, {dtype}"
    tiles = block_attention(Block(0, tokens, 1, tokens, way=device().attention_ways[0]), scale, None)
    yield from costs("safetrain", tiles, tokens, heads, 1, head_dim)
    fused = functools.partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
    yield from costs("mx.fast", fused, 1, heads, tokens, head_dim)


def update(width: int, blocks: int, vocabulary: int, rows: int, tokens: int) -> Iterator[str]:
    """One update of a Llama with random weights: LoRA of rank 8 on all linear layers, a 4-bit base on a GPU."""
    import mlx.core as mx

    from safetrain.core.data.row_order import Cursor
    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
    from safetrain.engine.backend import device
    from safetrain.engine.batches import update_at
    from safetrain.engine.dtypes import time_operation
    from safetrain.engine.layout import training_layout
    from safetrain.engine.model import open_skeleton
    from safetrain.engine.optimizer import optimizer_of
    from safetrain.engine.selftest import settings_of
    from safetrain.engine.trainable import equip
    from safetrain.engine.update import apply_gradient, measure

    config = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": blocks, "intermediate_size": 3 * width,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 128, "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary, "tie_word_embeddings": True,
    }  # fmt: skip
    if not device().dequantizes_per_use:
        config["quantization"] = {"group_size": 64, "bits": 4}
    settings = settings_of(LoraSettings(8, 2.0, 0.0, blocks, (ALL_LINEAR,)), rows, tokens)
    model = open_skeleton(config, float32=device().computes_in_float32)
    gradients, optimizer = equip(model, settings), optimizer_of(settings)
    parameters = model.module.trainable_parameters
    optimizer.init(parameters())
    mx.eval(model.module.parameters(), optimizer.state)
    model.module.train()
    data = TokenRows.of([token_row(range(tokens + 1), [True] * (tokens + 1))] * rows)
    batch = update_at(data, Cursor(0, 0), 1, rows, training_layout(model, rows, data.inputs()))

    def step() -> Any:
        loss, gradient = gradients.of(batch, 0)
        norm = measure(loss, gradient).grad_norm
        apply_gradient(model, optimizer, gradient, norm, 1e-4, settings.max_grad_norm)
        return parameters(), optimizer.state

    yield f"{counted(blocks, 'block')} of width {width:,}, {rows} x {tokens} tokens: {_cost(*time_operation(step))}"


def _cost(seconds: float, peak_bytes: int) -> str:
    return f"{1000 * seconds:,.1f} ms, peak {size_text(peak_bytes)}"


if __name__ == "__main__":
    main(sys.argv[1])
