"""The closed-form estimate of core/memory/estimate.py against mlx's own peak, each training in a process of its own."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from safetrain.core.memory.estimate import predicted_peak, total_bytes
from safetrain.core.memory.terms import Setup
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import LoraSettings, Shape

WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 8}
DEEP = {"hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE_VOCABULARY = {"vocab_size": 32768}
CAPPED: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 32,
}
CASES: list[tuple[str, dict[str, Any], int, int, int]] = [  # name and how, config, rows, tokens, LoRA rank
    ("embedded", {}, 16, 32, 16),
    ("embedded", {}, 8, 256, 16),
    ("embedded", {}, 1, 512, 4),
    ("deep, long rows", {**DEEP, "max_position_embeddings": 4096}, 1, 2048, 8),
    ("deep, long rows", {**DEEP, "max_position_embeddings": 4096}, 1, 4096, 8),
    ("wide", WIDE, 4, 128, 8),
    ("wide", WIDE, 8, 256, 64),
    ("deep", DEEP, 8, 128, 8),
    ("deep", DEEP, 2, 512, 8),
    ("large vocabulary", LARGE_VOCABULARY, 4, 128, 8),
    ("large vocabulary", LARGE_VOCABULARY, 8, 256, 8),
    ("capped logits", CAPPED, 4, 128, 8),
    ("capped logits", CAPPED, 8, 256, 8),
    ("deep, recomputed", DEEP, 8, 128, 8),
    ("deep, recomputed", DEEP, 2, 512, 8),
    ("wide, quantized", WIDE, 4, 128, 8),
    ("wide, full", WIDE, 4, 128, 8),
    ("wide, on disk", WIDE, 4, 128, 8),
    ("deep, long rows, on disk", {**DEEP, "max_position_embeddings": 4096}, 1, 4096, 8),
]


def main() -> None:
    """One row a case, the signed error of the prediction."""
    if len(sys.argv) > 1:
        print(measure(*json.loads(sys.argv[1])))
        return
    rows: list[list[object]] = []
    for name, changes, batch, tokens, rank in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            asked = json.dumps([scratch, name, changes, batch, tokens, rank])
            command = [sys.executable, "-m", "benchmarks.bench_memory_estimate", asked]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            predicted, measured = map(int, done.stdout.split())
        error = 100 * (predicted - measured) / measured
        shape = f"{name}, {batch} x {tokens} tokens, rank {rank}"
        rows.append([shape, f"{predicted / 2**20:.0f}", f"{measured / 2**20:.0f}", f"{error:+.0f} %"])
    header = ["training", "predicted, MiB", "measured, MiB", "error"]
    write_result("bench_memory_estimate", "The closed-form memory estimate", header, rows)


def measure(scratch: str, name: str, changes: dict[str, Any], batch: int, tokens: int, rank: int) -> str:
    """Predicted and measured peak of three updates, in bytes of mlx's allocator."""
    from safetrain.engine.cpu.blas import load_fast_blas

    load_fast_blas()
    import mlx.core as mx

    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.data.training_rows import Cursor
    from safetrain.engine.batches import layout_for, update_at
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.update import measure as measure_update
    from safetrain.engine.update import prepare
    from tests.support.random_models import build_model
    from tests.support.settings import SETTINGS

    how = name.rpartition(", ")[2]
    folder = build_model(Path(scratch) / "model", bits=None if how == "full" else 4, **changes)
    files = read_model_files(folder)
    lora = LoraSettings(rank, 2.0, 0.0, files.num_layers, ("all-linear",))
    method, checkpointing, stream = "full" if how == "full" else "lora", how == "recomputed", how == "on disk"
    dequantized = how not in ("quantized", "on disk")
    settings = dataclasses.replace(
        SETTINGS, lora=lora, method=method, gradient_checkpointing=checkpointing, dequantize_base=dequantized,
        stream_base=stream,
    )  # fmt: skip
    shape = Shape(batch, tokens, batch * tokens, batch * tokens)
    predicted = total_bytes(predicted_peak(Setup(files, settings, "cpu"), shape))
    if stream:  # it bounds what mlx computes ahead
        mx.set_memory_limit(predicted)
    model, gradients = prepare(folder, settings)
    optimizer = optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    layout = layout_for(model, batch * tokens)
    rows = TokenRows.of([token_row([place % 500 for place in range(tokens + 1)], [True] * (tokens + 1))] * batch)
    for step in range(3):
        mx.reset_peak_memory()
        model.module.train()
        loss, gradient = gradients.of(update_at(rows, Cursor(0, 0), 1, batch, layout), step)
        apply_gradient(model, optimizer, gradient, measure_update(loss, gradient)[1], 1e-3, 1.0)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        del loss, gradient  # as in a training, where the next update begins without them
    return f"{predicted} {mx.get_peak_memory()}"


if __name__ == "__main__":
    main()
