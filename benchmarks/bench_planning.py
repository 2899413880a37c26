"""How long planning takes, cold, beside the training that it plans.

    python -m benchmarks.bench_planning [3m|91m|0.5b|7b ...]  # 7b only when it is named: it takes hours on two cores

The stages as they are, with an empty cache, on random quantized weights of four shapes and 600 chats. Planning is to
take at most a minute, or 3 % of the training, whichever is more. The training is predicted, not run.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import show_result, write_result
from benchmarks.quantized_model import write_quantized_model
from safetrain.core.formatting import duration_text
from tests.support.chaos.project import Project
from tests.support.random_models import EMBEDDED

ROWS, MOST_WORDS, TIMEOUT_SECONDS = 600, 200, 7200
WORDS = ("the", "capital", "of", "a", "country", "is", "city", "and", "an", "element", "has", "number")
STAGES = ("validate_data", "preflight", "recommend_config")
USUAL = ["3m", "91m", "0.5b"]
SHAPES: dict[str, dict[str, Any]] = {
    "3m": {},
    "91m": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12,
            "num_key_value_heads": 12, "vocab_size": 8192, "max_position_embeddings": 2048},
    "0.5b": {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
             "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 4096,
           "tie_word_embeddings": False},
}  # fmt: skip


def main() -> None:
    """One row for each shape."""
    named = sys.argv[1:] or USUAL
    rows = [measure(name) for name in named]
    header = ["model", *(f"{stage}, s" for stage in STAGES), "planning, s", "may take, s", "dry runs", "recommended",
              "training, predicted"]  # fmt: skip
    notes = ["Planning is preflight and recommend_config together, with Python's own start."]
    write = write_result if named == USUAL else show_result
    write("bench_planning", "Planning, cold", header, rows, notes)


def measure(name: str) -> list[object]:
    """Plan a training of one shape."""
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch) / "p", rows=made_up_rows())
        model = EMBEDDED if not SHAPES[name] else write_quantized_model(Path(scratch) / "model", **SHAPES[name])
        keys = ("batch_size", "gradient_accumulation", "num_epochs", "max_steps", "save_steps", "eval_steps")
        project.pin(model={"path": str(model)}, train=dict.fromkeys(keys), lora={"rank": None, "dropout": None})
        seconds, said = list[float](), ""
        for stage in STAGES:
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", f"stages.{stage}"], cwd=project.folder, env=project.environment,
                capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
            seconds.append(time.monotonic() - began)
            said = done.stdout
            print(name, stage, f"{seconds[-1]:.1f} s", said if stage == STAGES[-1] else "", done.stderr, flush=True)
            if done.returncode:
                raise RuntimeError(said + done.stderr)
        plan = json.loads((project.output / "recommended_config.json").read_text())
    total, planning = plan["total_seconds"] or 0.0, sum(seconds[1:])
    settings = plan["settings"]
    way = [f"{settings['batch_size']} x {settings['gradient_accumulation']}"]
    way += ["recomputed"] * settings["gradient_checkpointing"] + ["dequantized"] * settings["dequantize_base"]
    return [name, *(f"{each:.1f}" for each in seconds), f"{planning:.1f}", f"{max(60.0, 0.03 * total):.0f}",
            said.count("dry run of"), ", ".join(way), duration_text(total)]  # fmt: skip


def made_up_rows() -> list[dict[str, Any]]:
    """Chats of many lengths."""
    source = random.Random(1)

    def text(most: int) -> str:
        return " ".join(source.choice(WORDS) for _ in range(3 + int(most * source.random() ** 2)))

    return [{"prompt": f"number {index}: {text(MOST_WORDS)}", "completion": text(MOST_WORDS)} for index in range(ROWS)]


if __name__ == "__main__":
    main()
