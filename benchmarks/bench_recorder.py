"""What the flight recorder costs: the time inside it against the time of the updates, in real trainings.

    python -m benchmarks.bench_recorder

The embedded model of 3 million parameters is the worst case: its updates are the shortest there are.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.random_models import build_model
from tests.support.settings import SETTINGS

EMBEDDED = Path(__file__).resolve().parent.parent / "models" / "encyclopedia-3m"
UPDATES = 60
LORA = dataclasses.replace(SETTINGS.lora, rank=16, num_layers=6)
USUAL = dataclasses.replace(
    SETTINGS, batch_size=16, gradient_accumulation=1, max_seq_length=64, num_epochs=1000, max_steps=UPDATES,
    eval_steps=20, save_steps=20, log_steps=10, lora=LORA, learning_rate=1e-4,
)  # fmt: skip
ONE_BY_ONE = dataclasses.replace(USUAL, batch_size=1, gradient_accumulation=16)
LARGER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
CASES: tuple[tuple[str, dict[str, Any], TrainSettings], ...] = (
    ("embedded, 16 rows of about 26 tokens at a time (the example)", {}, USUAL),
    ("embedded, the same rows one by one", {}, ONE_BY_ONE),
    ("12 layers of width 768, the same rows", LARGER, dataclasses.replace(USUAL, max_steps=20)),
)


class TimedRecorder(Recorder):
    """Counts its own records and the seconds in them."""

    def __init__(self, path: Path) -> None:
        self.records, self.seconds = 0, 0.0
        super().__init__(path)

    def write(self, phase: Phase, edge: Edge, work: Work) -> None:
        began = time.perf_counter()
        super().write(phase, edge, work)
        self.seconds += time.perf_counter() - began
        self.records += 1


def main() -> None:
    """Train each case and write the table."""
    load_fast_blas()
    table: list[list[object]] = []
    for name, changes, settings in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            base = build_model(Path(scratch) / "model", bits=4, **changes) if changes else EMBEDDED
            recorder, elapsed_seconds = trained(base, settings, Path(scratch))
        updates = settings.max_steps or 1
        figures = [f"{1000 * elapsed_seconds / updates:.1f}", recorder.records // updates]
        figures += [
            f"{1e6 * recorder.seconds / recorder.records:.1f}",
            f"{100 * recorder.seconds / elapsed_seconds:.3f} %",
        ]
        table.append([name, *figures])
    header = ["model and micro-batches", "update, ms", "records", "microseconds per record", "of the updates' time"]
    write_result("bench_recorder", "What the flight recorder costs", header, table)


def trained(base: Path, settings: TrainSettings, output: Path) -> tuple[TimedRecorder, float]:
    """The recorder of a training, and the seconds of its updates. Everything recorded is charged to the updates."""
    from safetrain.core.records.run_state import RunIdentity
    from safetrain.engine.run import Watcher
    from safetrain.engine.training import train
    from tests.support.jobs import job_of

    def nothing(_old: list[StepRecord], _step: int = 0, _adaptation: str = "") -> None:
        return

    identity, recorder = RunIdentity("base", "train", "valid", "{}"), TimedRecorder(output / "recorder.bin")
    job = job_of(output, base, rows(400, 1), rows(30, 2), settings, identity)
    result = train(job, Watcher(nothing, nothing, lambda: 0, recorder))
    assert result is not None
    return recorder, result.state.elapsed_seconds


def rows(count: int, seed: int) -> TokenRows:
    """As long as the example's."""
    source = np.random.default_rng(seed)
    lengths = source.integers(14, 38, count).tolist()
    return TokenRows.of(
        [token_row(source.integers(5, 2000, n).tolist(), [i >= n // 2 for i in range(n)]) for n in lengths]
    )


if __name__ == "__main__":
    main()
