"""What each trick of safetrain/engine/cpu brings to an update on a Linux CPU: the same update without it.

    python -m benchmarks.bench_cpu

Each way is a process of its own, ROUNDS times in turn.
"""

import dataclasses
import subprocess
import sys

from benchmarks.machine import write_result

WITHOUT = {
    "OpenBLAS in front (blas)": "blas",
    "SwiGLU by powers of 2 (kernels)": "swiglu",
    "cross-entropy by powers of 2 (kernels)": "entropy",
    "shards side by side (kernels)": "streams",
    "128 labels' logits at once, not 32": "chunk",
}
ROUNDS = 3
WIDTH, BLOCKS, VOCABULARY, ROWS, TOKENS = 512, 2, 16384, 8, 128
CONFIG = {
    "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "intermediate_size": 3 * WIDTH,
    "num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 128, "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "tie_word_embeddings": True,
}  # fmt: skip
MANY_WORDS, HEAD_WIDTH, HEAD_BLOCKS = 128_000, 1024, 6  # of the model for the last trick, and for the update with it
HEADER = ["trick", "update with all, ms", "without it, ms", "slower without it"]


def main() -> None:
    """One row a trick."""
    if len(sys.argv) > 1:
        print(update_ms(sys.argv[1]))
        return
    found: dict[str, list[float]] = {way: [] for way in ("", *WITHOUT.values(), "many words")}
    for _ in range(ROUNDS):
        for way, times in found.items():
            command = [sys.executable, "-m", "benchmarks.bench_cpu", way or "nothing"]
            times.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    best = {way: min(times) for way, times in found.items()}  # other programs only add to it
    rows: list[list[object]] = []
    for name, way in WITHOUT.items():
        with_it = best["many words" if way == "chunk" else ""]
        rows.append([name, f"{with_it:.0f}", f"{best[way]:.0f}", f"{best[way] / with_it:.2f} x"])
    shape = f"{BLOCKS} blocks of width {WIDTH}, {VOCABULARY:,} words, {ROWS} rows of {TOKENS} tokens"
    note = f"LoRA on a Llama: {shape}. The best of {ROUNDS} processes."
    large = f"{HEAD_BLOCKS} blocks of width {HEAD_WIDTH}, {MANY_WORDS:,} words, half of the tokens labels"
    note += f" The last line: {large}."
    write_result("bench_cpu", "What each trick brings on a Linux CPU", HEADER, rows, (note,))


def take_away(trick: str) -> None:
    """Put what mlx does by itself in the place of one trick; call before anything else of the engine is imported."""
    from safetrain.engine.cpu import blas

    if trick != "blas":
        blas.load_fast_blas()
    import mlx.nn as nn
    from mlx_lm.models.activations import swiglu

    from safetrain.engine import backend, loss
    from safetrain.engine.cpu import kernels

    here = backend.device()
    if trick == "swiglu":
        kernels.swiglu = swiglu
    if trick == "streams":
        here = dataclasses.replace(here, shards=1)
    backend.device = lambda: here
    if trick == "entropy":
        loss.cross_entropy = lambda logits, targets: nn.losses.cross_entropy(logits, targets)


def update_ms(trick: str) -> float:
    """Milliseconds of an update of a Llama with random weights, LoRA on all linear layers, without a trick."""
    take_away(trick)
    import mlx.core as mx

    from safetrain.core.data.token_rows import TokenRows, token_row
    from safetrain.core.data.training_rows import Cursor
    from safetrain.core.records.settings import ALL_LINEAR, FEWEST_LABELS, MANY_LABELS, SMALLEST, LoraSettings
    from safetrain.engine.backend import time_operation
    from safetrain.engine.batches import training_layout, update_at
    from safetrain.engine.optimizer import apply_gradient, optimizer_of
    from safetrain.engine.update import equip, measure
    from tests.support.random_models import open_skeleton

    many = trick in ("chunk", "many words")
    head = {"vocab_size": MANY_WORDS, "hidden_size": HEAD_WIDTH, "num_hidden_layers": HEAD_BLOCKS} if many else {}
    lora = LoraSettings(8, 2.0, 0.0, HEAD_BLOCKS if many else BLOCKS, (ALL_LINEAR,))
    settings = dataclasses.replace(SMALLEST, batch_size=ROWS, max_seq_length=TOKENS, lora=lora)
    labels = FEWEST_LABELS if trick == "chunk" else MANY_LABELS
    model = open_skeleton({**CONFIG, **head})
    assert model.split is not None
    model = dataclasses.replace(model, split=dataclasses.replace(model.split, labels_at_once=labels))
    gradients, optimizer = equip(model, settings), optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    mx.eval(model.module.parameters(), optimizer.state)
    model.module.train()
    data = TokenRows.of(
        [token_row(range(TOKENS + 1), [index > TOKENS // 2 or not many for index in range(TOKENS + 1)])] * ROWS
    )
    batch = update_at(data, Cursor(0, 0), 1, ROWS, training_layout(model, ROWS, data))

    def step() -> object:
        loss, gradient = gradients.of(batch, 0)
        norm = measure(loss, gradient)[1]
        apply_gradient(model, optimizer, gradient, norm, 1e-4, settings.max_grad_norm)
        return model.module.trainable_parameters(), optimizer.state

    return 1000 * time_operation(step)


if __name__ == "__main__":
    main()
