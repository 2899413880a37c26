"""What each trick of safetrain/engine/cpu brings to an update on a Linux CPU: the same update without it.

    python -m benchmarks.bench_cpu

Each way is a process of its own, ROUNDS times in turn. What dequantizing at each use brings is in bench_ops.
"""

import dataclasses
import re
import subprocess
import sys

from benchmarks.machine import write_result

WITHOUT = {
    "OpenBLAS in front (blas)": "blas",
    "freed memory kept (blas)": "memory",
    "SwiGLU by powers of 2 (powers)": "swiglu",
    "cross-entropy by powers of 2 (powers)": "entropy",
    "attention by powers of 2 (attention)": "attention",
    "shards side by side (streams)": "streams",
}
ROUNDS = 3
WIDTH, BLOCKS, VOCABULARY, ROWS, TOKENS = 512, 2, 16384, 8, 128
HEADER = ["trick", "update with all, ms", "without it, ms", "slower without it"]


def main() -> None:
    """One row a trick."""
    if len(sys.argv) > 1:
        print(update_ms(sys.argv[1]))
        return
    found: dict[str, list[float]] = {way: [] for way in ("", *WITHOUT.values())}
    for _ in range(ROUNDS):
        for way, times in found.items():
            command = [sys.executable, "-m", "benchmarks.bench_cpu", way or "nothing"]
            times.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    best = {way: min(times) for way, times in found.items()}  # other programs only add to it
    rows: list[list[object]] = [
        [name, f"{best['']:.0f}", f"{best[way]:.0f}", f"{best[way] / best['']:.2f} x"] for name, way in WITHOUT.items()
    ]
    shape = f"{BLOCKS} blocks of width {WIDTH}, {VOCABULARY:,} words, {ROWS} rows of {TOKENS} tokens"
    note = f"LoRA on a Llama: {shape}. The best of {ROUNDS} processes."
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

    here = backend.device()
    if trick == "swiglu":
        here = dataclasses.replace(here, avoids_exponentials=False)
    if trick == "streams":
        here = dataclasses.replace(here, shards=1)
    backend.device = lambda: here
    if trick == "entropy":
        loss.cross_entropy = lambda logits, targets: nn.losses.cross_entropy(logits, targets)
    if trick == "attention":
        plain = row_attention.PASSES[row_attention.Way.SOFTMAX]
        row_attention.PASSES[row_attention.Way.POWERS] = plain


def update_ms(trick: str) -> float:
    """Milliseconds of an update without a trick."""
    take_away(trick)
    from safetrain.engine.report import update

    (text,) = update(WIDTH, BLOCKS, VOCABULARY, ROWS, TOKENS)
    found = re.search(r"([\d,.]+) ms", text)
    assert found is not None, text
    return float(found[1].replace(",", ""))


if __name__ == "__main__":
    main()
