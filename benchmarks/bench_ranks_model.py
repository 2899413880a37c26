"""What up to 64 ranks would bring, by the model of safetrain/plan/speed.py; nothing is measured.

python -m benchmarks.bench_ranks_model
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from safetrain.core.memory.terms import trained_parameters
from safetrain.core.model.files import ModelFiles, read_model_plan
from safetrain.core.records.settings import LoraSettings
from safetrain.plan.estimate_command import model_to_pretrain
from safetrain.plan.machines import read_profile
from safetrain.plan.speed import Link, SharedUpdate, flops_per_token, shared_update, update_seconds, wire_bytes

MACHINE, RANKS, GBPS = "m3-64gb", (2, 4, 8, 16, 32, 64), (1, 10, 100)
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
    },
}  # fmt: skip
CASES = (  # model, method, rows and tokens of an update
    ("Qwen2.5-0.5B", "lora", 64, 512),
    ("Qwen2.5-7B", "lora", 64, 512),
    ("85m", "full", 64, 2048),
    ("85m", "pretrain", 64, 2048),
    ("400m", "full", 64, 2048),
    ("400m", "pretrain", 64, 2048),
)
NOTES = (
    f"Nothing here is measured. One rank is an Apple M3 Max (conf/machine/{MACHINE}.yaml): 9.9 TFLOP/s in float32, as "
    "nanochat-mlx published; LoRA of rank 16 on all linear layers in bfloat16 is assumed to be as fast.",
    "An update has 64 rows of equal length: 32,768 tokens for LoRA, 131,072 else. 4 operations for a frozen weight "
    "and token, 6 for a trained one, and attention. What does not shrink: the optimizer's 36 bytes for each trained "
    "number, over 100 GB/s (assumed).",
    "Link: a ring all-reduce of the float32 gradient, 2 (N - 1) / N of it sent and received by each rank, and "
    "2 (N - 1) x 50 us of latency for each message of 64 MiB (assumed). Nothing overlaps with computing; all ranks are "
    "equally fast; switches carry all links at once.",
    "Pay: the most ranks of which each one added brings at least half of what a rank does alone; 64 is the end of what "
    "was asked, and of an update's rows.",
)


def main() -> None:
    """A row for each case and link."""
    rows = [row for case in CASES for row in rows_of(*case)]
    header = ["model", "method", "trained", "alone, s", "Gbit/s", "sent by each at 64"]
    header += [f"{ranks} ranks" for ranks in RANKS]
    write_result("bench_ranks_model", "Speed-up of an update over ranks, by a model", header, rows, NOTES)


def rows_of(name: str, method: str, rows: int, tokens: int) -> list[list[object]]:
    """One for each link."""
    model = model_of(name)
    trained = trained_parameters(model, LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",)), method)
    update = update_of(model, trained, rows, tokens)
    found = []
    for gbps in GBPS:
        link = Link(gbps)
        alone, sent = update_seconds(update, 1, link), wire_bytes(update.gradient_bytes, RANKS[-1]) / 1e6
        speed_ups = [alone / update_seconds(update, ranks, link) for ranks in RANKS]
        found.append([
            name, f"{method} rank 16" if method == "lora" else method, f"{trained / 1e6:,.1f}M", f"{alone:,.1f}", gbps,
            f"{sent:,.0f} MB", *(f"{each:.1f}" for each in speed_ups),
        ])  # fmt: skip
    return found


def model_of(name: str) -> ModelFiles:
    """By its shape alone."""
    if name not in SHAPES:
        return model_to_pretrain(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(SHAPES[name]), encoding="utf-8")
        return read_model_plan(path)


def update_of(model: ModelFiles, trained: int, rows: int, tokens: int) -> SharedUpdate:
    """On the machine whose speed is known."""
    flops = rows * tokens * flops_per_token(model, tokens, trained)
    update = shared_update(read_profile(MACHINE).speed, flops, trained, "metal", rows)
    assert update is not None
    return update


if __name__ == "__main__":
    main()
