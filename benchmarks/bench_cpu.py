"""What each trick of safetrain/engine/cpu brings to an update on a Linux CPU: the same update without it.

    python -m benchmarks.bench_cpu

Each way is a process of its own, ROUNDS times in turn. LoRA of rank 16 on a 4-bit Llama with random weights.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import time

from benchmarks.machine import write_result

WITHOUT = {
    "OpenBLAS in front (blas)": "blas",
    "freed memory kept (blas)": "memory",
    "weights dequantized per use (quantized)": "quantized",
    "SwiGLU by powers of 2 (powers)": "swiglu",
    "cross-entropy by powers of 2 (powers)": "entropy",
    "attention by powers of 2 (attention)": "attention",
    "shards side by side (streams)": "streams",
}
ROUNDS, UPDATES = 3, 4
WIDTH, BLOCKS, VOCABULARY, ROWS, TOKENS = 512, 2, 16384, 8, 128
HEADER = ["trick", "update with all, ms", "without it, ms", "slower without it"]


def main() -> None:
    """One row a trick."""
    if len(sys.argv) > 1:
        print(update_seconds(sys.argv[1]))
        return
    found: dict[str, list[float]] = {way: [] for way in ("", *WITHOUT.values())}
    for _ in range(ROUNDS):
        for way, seconds in found.items():
            command = [sys.executable, "-m", "benchmarks.bench_cpu", way or "nothing"]
            seconds.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    best = {way: min(seconds) for way, seconds in found.items()}  # other programs only add to it
    rows: list[list[object]] = [
        [name, f"{1000 * best['']:.0f}", f"{1000 * best[way]:.0f}", f"{best[way] / best['']:.2f} x"]
        for name, way in WITHOUT.items()
    ]
    note = (
        f"{BLOCKS} blocks of width {WIDTH}, {VOCABULARY:,} words, {ROWS} rows of up to {TOKENS} tokens. The best of "
        f"{ROUNDS} processes, each the median of {UPDATES} updates."
    )
    write_result("bench_cpu", "What each trick brings on a Linux CPU", HEADER, rows, (note,))


def take_away(trick: str) -> None:
    """Put what mlx does by itself in the place of one trick; call before anything else of the engine is imported."""
    from safetrain.engine.cpu import blas

    if trick == "memory":
        blas._keep_freed_memory = lambda: None
    if trick != "blas":
        blas.load_fast_blas()
    import mlx.nn as nn

    from safetrain.engine import backend, loss, row_attention
    from safetrain.engine.upstream import loading

    here = backend.device()
    if trick == "swiglu":
        here = dataclasses.replace(here, avoids_exponentials=False)
    if trick == "streams":
        here = dataclasses.replace(here, shards=1)
    backend.device = lambda: here
    if trick == "quantized":
        loading.dequantize_per_use = lambda module: None
    if trick == "entropy":
        loss.cross_entropy = lambda logits, targets: nn.losses.cross_entropy(logits, targets)
    if trick == "attention":
        plain = row_attention.PASSES[row_attention.Way.SOFTMAX]
        row_attention.PASSES[row_attention.Way.POWERS] = plain


def update_seconds(trick: str) -> float:
    """Of an update without a trick, the median of a few."""
    os.environ.pop("MLX_BFS_MAX_WIDTH", None)
    take_away(trick)
    import mlx.core as mx

    from safetrain.core.data.row_order import Cursor
    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
    from safetrain.engine.batches import update_at
    from safetrain.engine.layout import training_layout
    from safetrain.engine.model import open_skeleton
    from safetrain.engine.selftest import settings_of
    from safetrain.engine.trainable import equip, optimizer_of
    from safetrain.engine.update import apply_gradient, measure

    config = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "intermediate_size": 1408,
        "num_attention_heads": WIDTH // 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY,
        "tie_word_embeddings": True, "quantization": {"group_size": 64, "bits": 4},
    }  # fmt: skip
    settings = settings_of(LoraSettings(16, 2.0, 0.0, BLOCKS, (ALL_LINEAR,)), ROWS, TOKENS)
    model = open_skeleton(config, float32=True)
    gradients, optimizer = equip(model, settings), optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    model.module.train()
    lengths = [TOKENS + 1 - 3 * row for row in range(ROWS)]
    data = TokenRows.of([token_row([(7 * i + n) % VOCABULARY for i in range(n)], [True] * n) for n in lengths])
    update = update_at(data, Cursor(0, 0), 1, ROWS, training_layout(model, ROWS, data.inputs()))
    seconds = list[float]()
    for number in range(1 + UPDATES):
        began = time.perf_counter()
        loss, gradient = gradients.of(update, number)
        apply_gradient(model, optimizer, gradient, measure(loss, gradient).grad_norm, 1e-5, 1.0)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
