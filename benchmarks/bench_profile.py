"""Where the time of an update goes on Linux CPU: the 91M Llama, 8 rows of 160 tokens, LoRA of rank 8 everywhere.

Each core computes half of the rows, so each operation is timed on half of the tokens with one thread, and counted as
often as a pass forward and backward does it. Their sum stands beside the time of whole updates.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.timing import fastest
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.engine.cpu.blas import blas_threads, cores, load_fast_blas
from tests.support.settings import SETTINGS

LAYERS, HIDDEN, INNER, HEADS, SIZE, VOCABULARY, RANK = 12, 768, 2048, 12, 64, 8192, 8
ROWS, WIDTH, UPDATES = 8, 160, 4
LORA = dataclasses.replace(SETTINGS.lora, rank=RANK, num_layers=LAYERS)


def main() -> None:
    """One row an operation, and what is left over."""
    load_fast_blas()
    parts = min(2, cores())
    whole = seconds_of_an_update()
    with blas_threads(parts):
        found = operations(ROWS // parts)
    rows: list[list[object]] = []
    for name, seconds in sorted(found.items(), key=lambda item: -item[1]):
        rows.append([name, f"{1e3 * seconds:.0f}", f"{seconds / whole:.0%}"])
    rest = whole - sum(found.values())
    rows.append(["everything else: sums, memory, Python, waiting", f"{1e3 * rest:.0f}", f"{rest / whole:.0%}"])
    rows.append([f"an update, {ROWS * WIDTH / whole:.0f} tokens/s", f"{1e3 * whole:.0f}", "100%"])
    write_result("bench_profile", "An update of the 91M model on Linux CPU", ["operation", "ms", "share"], rows)


def seconds_of_an_update() -> float:
    """The fastest of a few, forward, backward and optimizer."""
    import mlx.core as mx

    from safetrain.core.data.row_order import Cursor
    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import layout_for
    from safetrain.engine.optimizer import optimizer_of
    from safetrain.engine.trainable import prepare
    from safetrain.engine.update import apply_gradient, measure
    from tests.support.random_models import build_model

    changes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "head_dim": SIZE,
    }
    changes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCABULARY}
    row = token_row(range(5, WIDTH + 6), [place > WIDTH // 2 for place in range(WIDTH + 1)])
    with tempfile.TemporaryDirectory() as scratch:
        folder = build_model(Path(scratch) / "model", bits=4, **changes)
        model, gradients = prepare(folder, dataclasses.replace(SETTINGS, lora=LORA))
    optimizer = optimizer_of(SETTINGS)
    optimizer.init(model.module.trainable_parameters())
    update = update_at(TokenRows.of([row] * ROWS), Cursor(0, 0), 1, ROWS, layout_for(model, ROWS * WIDTH))
    model.module.train()
    seconds = []
    for step in range(UPDATES):
        began = time.perf_counter()
        loss, gradient = gradients.of(update, step)
        apply_gradient(model, optimizer, gradient, measure(loss, gradient).grad_norm, 1e-4, 1.0)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def operations(rows: int) -> dict[str, float]:
    """Seconds of each kind of operation in one pass of ``rows`` rows."""
    import mlx.core as mx

    from safetrain.engine.cpu.powers import swiglu
    from safetrain.engine.loss import chunked_loss
    from safetrain.engine.row_attention import Block, PackedRows
    from safetrain.engine.upstream.packing import PackedRowsCache, SlidingWindow, packed_attention

    tokens, labels = rows * WIDTH, rows * WIDTH // 2
    normal = mx.random.normal
    x, wide, q = normal((tokens, HIDDEN)), normal((tokens, INNER)), normal((tokens, HEADS, 1, SIZE))
    square, outward, inward = normal((HIDDEN, HIDDEN)), normal((INNER, HIDDEN)), normal((HIDDEN, INNER))
    low, high, head = normal((HIDDEN, RANK)), normal((RANK, HIDDEN)), normal((VOCABULARY, HIDDEN))
    offsets = mx.tile(mx.arange(WIDTH), rows)
    cache = PackedRowsCache(PackedRows(offsets, (Block(0, tokens, rows, WIDTH),)))
    scale, ones = SIZE**-0.5, mx.ones((HIDDEN,))
    targets, weights = mx.zeros((labels,), dtype=mx.int32), mx.ones((labels,))
    loss = chunked_loss(lambda hidden: hidden @ head.T, 64)
    mx.eval(x, wide, q, square, outward, inward, low, high, head, offsets, targets, weights)

    def product(inputs: mx.array, weight: mx.array) -> float:
        return fastest(lambda: (inputs @ weight.T) @ weight)

    def both_ways(function: Callable[..., mx.array], along: mx.array, *inputs: mx.array) -> float:
        return fastest(lambda: mx.vjp(function, list(inputs), [along]))

    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return packed_attention(q, k, v, cache=cache, scale=scale, mask=SlidingWindow(None))

    def rotation(q: mx.array) -> mx.array:
        return mx.fast.rope(q, SIZE, traditional=False, base=1e4, scale=1.0, offset=offsets)

    products = 4 * product(x, square) + 2 * product(x, outward) + product(wide, inward)
    return {
        "products with the frozen base": LAYERS * products,
        "products with the adapter": LAYERS * 10 * both_ways(lambda x, a, b: x @ a @ b, x, x, low, high),
        "attention": LAYERS * both_ways(attention, q, q, q, q),
        "SwiGLU": LAYERS * both_ways(swiglu, wide, wide, wide),
        "rotation of queries and keys": LAYERS * 2 * both_ways(rotation, q, q),
        "norms": (2 * LAYERS + 1) * both_ways(lambda x: mx.fast.rms_norm(x, ones, 1e-5), x, x),
        "output layer and cross-entropy": both_ways(lambda x: loss(x, targets, weights), mx.array(1.0), x[:labels]),
    }


if __name__ == "__main__":
    main()
