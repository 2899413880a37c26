"""The measurements of `safetrain selftest --report` that need mlx: ``python -m safetrain.engine.report SECTION``.

A section is a separate process, because what it measures may kill it. A figure is a line: section, tab, text.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from safetrain.core.formatting import size_text
from safetrain.engine.child_process import die_with_parent, prefer_for_oom_kill
from safetrain.engine.cpu.blas import load_fast_blas

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
ROWS, TOKENS, RATE, SPREAD = 2, 64, 1e-2, 0.05
LOSSES = (6.323541, 5.683582, 5.094046, 4.819594, 4.293365)  # nats per label (recorded on Linux CPU, mlx 0.32.4)


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
        "training": training,
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
    from safetrain.engine.layout import GRADIENT_KERNEL, attention_graph
    from safetrain.engine.row_attention import Block, block_attention

    def costs(name: str, attend: Callable[..., mx.array], *shape: int) -> Iterator[str]:
        inputs = [mx.random.normal(shape).astype(getattr(mx, dtype)) for _ in range(3)]
        mx.eval(inputs)
        gradient = mx.grad(lambda *parts: attend(*parts).sum(), argnums=(0, 1, 2))
        for way, operation in (("forward", attend), ("gradient", gradient)):
            seconds, peak_bytes = time_operation(operation, *inputs)
            yield f"{name} {way}: {1000 * seconds:,.1f} ms, peak {size_text(peak_bytes)}"

    dtype, scale = "float32" if device().computes_in_float32 else "bfloat16", head_dim**-0.5
    graph = attention_graph(tokens, head_dim, getattr(mx, dtype), GRADIENT_KERNEL)
    takes = "mx.fast" if GRADIENT_KERNEL in graph else "safetrain"
    yield f"{heads} heads of size {head_dim}, {tokens:,} tokens, {dtype}; a training takes {takes}"
    tiles = block_attention(Block(0, tokens, 1, tokens, way=device().attention_ways[0]), scale, None)
    yield from costs("safetrain", tiles, tokens, heads, 1, head_dim)
    fused = functools.partial(mx.fast.scaled_dot_product_attention, scale=scale, mask="causal")
    yield from costs("mx.fast", fused, 1, heads, tokens, head_dim)


def training() -> Iterator[str]:
    """LoRA updates of a tiny Llama in float32, its losses compared with those recorded."""
    import mlx.core as mx

    mx.reset_peak_memory()
    began = time.perf_counter()
    losses = train_tiny(len(LOSSES))
    seconds = time.perf_counter() - began
    worst = max(abs(loss / expected - 1) for loss, expected in zip(losses, LOSSES, strict=True))
    yield f"{len(losses)} updates, loss {losses[0]:.6f} to {losses[-1]:.6f}: within {worst:.1e} of recorded"
    yield f"{seconds:.2f} s, peak {size_text(mx.get_peak_memory())}"


def train_tiny(updates: int) -> list[float]:
    """Losses of as many updates; all weights are NumPy's numbers, so that every machine begins with the same."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from safetrain.core.data.row_order import Cursor
    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import training_layout
    from safetrain.engine.model import open_skeleton
    from safetrain.engine.optimizer import optimizer_of
    from safetrain.engine.selftest import settings_of
    from safetrain.engine.update import apply_gradient, equip, measure

    settings = settings_of(LoraSettings(8, 2.0, 0.0, 2, (ALL_LINEAR,)), ROWS, TOKENS)
    model = open_skeleton(LLAMA, float32=True)
    gradients, optimizer = equip(model, settings), optimizer_of(settings)
    source = np.random.Generator(np.random.PCG64(7))
    shapes = {name: weight.shape for name, weight in sorted(tree_flatten(model.module.parameters()))}
    weights = {n: np.ones(s) if len(s) == 1 else SPREAD * source.standard_normal(s) for n, s in shapes.items()}
    model.module.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in weights.items()])
    optimizer.init(model.module.trainable_parameters())
    model.module.train()
    data = TokenRows.of([token_row(range(k, TOKENS + 1 + k), [True] * (TOKENS + 1)) for k in range(ROWS)])
    batch, losses = update_at(data, Cursor(0, 0), 1, ROWS, training_layout(model, ROWS, data.inputs())), list[float]()
    for _ in range(updates):
        loss, gradient = gradients.of(batch, 0)
        norm = measure(loss, gradient).grad_norm
        apply_gradient(model, optimizer, gradient, norm, RATE, settings.max_grad_norm)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        losses.append(float(np.array(loss)) / batch.trained_tokens)
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
