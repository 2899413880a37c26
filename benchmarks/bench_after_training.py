"""From the last update to the end of `evaluate`, beside the time of the updates, at 3M, 91M and 0.5B parameters.

`python -m benchmarks.bench_after_training [3m 91m 0.5b]`. The two larger models have random weights; rows are chats of
270 tokens in the median, 3,000 to train on, 300 to validate on and 300 to test.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_validate import clone, stage, write_rows
from benchmarks.machine import write_result
from safetrain.core.recorder import Edge, Phase, read_flight
from tests.support.random_models import EMBEDDED, write_quantized_model

Shape = dict[str, Any]
MODELS: dict[str, tuple[Shape, int]] = {  # None: the embedded model; updates
    "3m": ({}, 300),
    "91m": (
        {
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
            "intermediate_size": 2048,
        },
        60,
    ),
    "0.5b": (
        {
            "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "vocab_size": 151_936,
        },
        12,
    ),
}  # fmt: skip
ROWS = {"train": 3000, "valid": 300, "test": 300}
BATCH = 8
HEADER = ["model", "updates", "last update to the end of train", "evaluate", "both", "share", "test rows", "answered"]


def main(names: list[str]) -> None:
    """One training and evaluation of each."""
    rows: list[list[object]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append([name, *measured(Path(scratch), *MODELS[name])])
            print(rows[-1], flush=True)
    write_result("bench_after_training", "What comes after the last update", HEADER, rows)


def measured(scratch: Path, shape: Shape, updates: int) -> list[object]:
    """The stages up to evaluate, as a person runs them."""
    project = clone(scratch)
    data = project / "data/many"
    data.mkdir()
    for name, count in ROWS.items():
        write_rows(data / f"{name}.jsonl", count, len(name))
    model = write_quantized_model(scratch / "model", **shape) if shape else EMBEDDED
    overrides = (
        "data.path=data/many", f"model.path={model}", f"train.max_steps={updates}", f"train.batch_size={BATCH}",
        "train.gradient_accumulation=1", f"train.eval_steps={updates}", "train.warmup_steps=2",
    )  # fmt: skip
    stage(project, "validate_data", *overrides)
    stage(project, "preflight", *overrides, "preflight.level=quick")
    stage(project, "recommend_config", *overrides)
    stage(project, "train", *overrides)
    ended = time.time()
    results = project / "checkpoints_qlora"
    flight = read_flight(next(results.glob("**/flight/recorder.bin")))
    last = max(each.wall_seconds for each in flight.records if (each.phase, each.edge) == (Phase.OPTIMIZER, Edge.AFTER))
    seconds = json.loads((results / "training_summary.json").read_text())["elapsed_seconds"]
    evaluation = stage(project, "evaluate", *overrides).seconds
    found = json.loads((results / "evaluation.json").read_text())
    both = ended - last + evaluation
    return [
        f"{seconds:.0f} s", f"{ended - last:.0f} s", f"{evaluation:.0f} s", f"{both:.0f} s", f"{both / seconds:.0%}",
        f"{found['rows']:,} of {found['rows_available']:,}", f"{found['answered']} of {found['questions']}",
    ]  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
