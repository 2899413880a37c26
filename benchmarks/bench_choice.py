"""Is the recommended configuration one that runs, and the fastest that does? Against an exhaustive search.

    python -m benchmarks.bench_choice [--quick]

For each model and memory limit: the stages plan a long training under train.memory_limit_gb, then its first updates are
run under that limit, which the kernel enforces (RLIMIT_DATA: an allocation beyond it fails, on CPU with a segfault).
The seed is one whose first updates are as large as any that planning reckons with, or more would survive these few.
Beside it, every micro-batch size in every way of computing is trained under the same limit, the fastest without a limit
first, until none can be faster than the fastest that got to its end in one process; what is refused does not. Then
the recommended one and that one are trained again in turns, and the best of each counts.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from safetrain.core.data.store import open_store, store_path
from safetrain.core.data.training_rows import Cursor, largest_update, rows_at
from safetrain.core.formatting import counted
from safetrain.core.records.run_state import discard_run
from safetrain.core.records.settings import Recommendation, updates_per_epoch
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record
from tests.support.chaos.project import Project

BATCHES, ROWS_PER_UPDATE = (16, 8, 4, 2, 1), 16
EPOCHS, UPDATES = 200, 8  # of the training that is planned, and of what is run of it
SEEDS = 1000  # of which one is taken
TURNS = 2  # in which the recommended and the best are trained again
SLOWER_WITHOUT = 0.97  # a training that is so much slower without a limit is not faster with one
TIMEOUT_SECONDS = 900
GIB = 2**30
WORDS = ("the", "capital", "of", "a", "country", "is", "city", "and", "an", "element", "has", "number")
MODELS: dict[str, tuple[dict[str, Any], int, tuple[float, ...]]] = {  # config, words of the longest row, limits in GiB
    "llama, 12 x 256, vocabulary 8k": (
        {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 32, "vocab_size": 8192, "num_hidden_layers": 12}, 30, (0.55, 0.65, 0.8)),
    "qwen2, 8 x 256, vocabulary 50k": (
        {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 50_000, "num_hidden_layers": 8}, 30,
        (0.65, 0.8, 1.2)),
    "phi3, 8 x 384, vocabulary 6k": (
        {"model_type": "phi3", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
         "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 6144, "num_hidden_layers": 8,
         "tie_word_embeddings": False}, 30, (0.6, 0.7, 0.9)),
    "olmo2, 10 x 320, vocabulary 5k": (
        {"model_type": "olmo2", "hidden_size": 320, "intermediate_size": 832, "num_attention_heads": 5,
         "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 5120, "num_hidden_layers": 10}, 30,
        (0.6, 0.7, 0.9)),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way to run micro-batches."""

    rows: int
    recomputed: bool
    dequantized: bool

    def __str__(self) -> str:
        how = ["recomputed"] if self.recomputed else []
        return ", ".join([counted(self.rows, "row"), *how, "dequantized" if self.dequantized else "quantized"])


ALL_WAYS = tuple(Way(*way) for way in itertools.product(BATCHES, (False, True), (True, False)))


@dataclass(frozen=True)
class Case:
    """What was recommended under a limit, how the training ended, and how it compares."""

    model: str
    limit_gib: float
    chosen: Way
    predicted_peak_bytes: int
    ended: str
    chosen_rate: float  # input tokens per second of the training
    best: Way
    best_rate: float

    @property
    def share(self) -> float:
        """Of the best one's throughput."""
        return self.chosen_rate / self.best_rate


def main() -> None:
    """Run every case and write the table; exit 1 when a training did not get through."""
    names = list(MODELS)[:1] if "--quick" in sys.argv else list(MODELS)
    cases = [case for name in names for case in run_model(name)]
    rows: list[list[object]] = [
        [c.model, f"{c.limit_gib:.2f}", c.chosen, f"{c.predicted_peak_bytes / GIB:.2f}", c.ended,
         f"{c.chosen_rate:,.0f}", f"{c.best_rate:,.0f} ({c.best})", f"{100 * c.share:.0f} %"]
        for c in cases
    ]  # fmt: skip
    header = ["model", "limit, GiB", "recommended", "predicted peak of mlx, GiB", "training", "tokens/s",
              "best of all that survive", "of the best"]  # fmt: skip
    shares, ran = [case.share for case in cases], sum(case.ended == "ran" for case in cases)
    notes = [f"{ran} of {len(cases)} ran to the end in the recommended shape, in one process. Of the best one's "
             f"throughput they have {100 * sum(shares) / len(shares):.0f} % in the mean, {100 * min(shares):.0f} % at "
             f"the least; {sum(share >= 0.95 for share in shares)} have 95 % or more."]  # fmt: skip
    write_result("bench_choice", "The recommended configuration against all others", header, rows, notes)
    sys.exit(0 if ran == len(cases) else 1)


def run_model(name: str) -> Iterator[Case]:
    """The cases of one model, in one scratch project."""
    config, words, limits = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch) / "p", rows=rows_of(words), model=config)
        open_keys = ("batch_size", "gradient_accumulation", "save_steps", "eval_steps", "learning_rate")
        open_pins = dict.fromkeys(open_keys) | {"num_epochs": EPOCHS, "max_steps": None}
        project.pin(train=open_pins, lora={"rank": None, "dropout": None})
        stage(project, "validate_data")
        project.pin(train={"seed": seed_for(project)})
        stage(project, "preflight", "preflight.level=quick", "preflight.downgrade=[MEM-FIT]")
        free: dict[Way, float] = {}
        for limit in limits:
            stage(project, "recommend_config", f"train.memory_limit_gb={limit}")
            chosen = read_record(project.output / "recommended_config.json", Recommendation)
            free = free or {way: train(project, way)[1] for way in ALL_WAYS}
            yield compare(name, project, limit, chosen, free)


def seed_for(project: Project) -> int:
    """The seed whose first updates have the most tokens and labels, as shares of the largest of many orders."""
    rows = open_store(store_path(project.folder / paths.VALIDATED, "train")).rows
    sizes = [rows.inputs(), rows.label_counts]
    largest = largest_update(rows, rows, ROWS_PER_UPDATE, EPOCHS, None)

    def share(seed: int) -> float:
        cursors = [Cursor(*divmod(number, updates_per_epoch(len(rows), ROWS_PER_UPDATE))) for number in range(UPDATES)]
        windows = [rows_at(rows, cursor, seed, ROWS_PER_UPDATE).rows for cursor in cursors]
        tokens, labels = (max(int(each[window].sum()) for window in windows) for each in sizes)
        return min(tokens / largest.tokens, labels / largest.labels)

    return max(range(SEEDS), key=share)


def rows_of(words: int) -> list[dict[str, Any]]:
    """Rows of many lengths, the longest with so many words."""
    texts = [" ".join(itertools.islice(itertools.cycle(WORDS[i % 7 :]), 3 + i * (words - 3) // 63)) for i in range(64)]
    return [{"prompt": f"number {index}: {text}", "completion": f"{index} {text}"} for index, text in enumerate(texts)]


def stage(project: Project, name: str, *overrides: str, must: bool = True) -> int:
    """Run one stage; raises RuntimeError with its words when it must succeed and does not."""
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{name}", *overrides], cwd=project.folder, env=project.environment,
        capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    if must and done.returncode:
        raise RuntimeError(f"{name} {overrides}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode


def train(project: Project, way: Way, limit: float | None = None, *, planned: bool = False) -> tuple[str, float]:
    """Train in this way: ``ran``, or what happened (a rung of the ladder, or the exit code), and tokens per second."""
    discard_run(project.output)
    pins: dict[str, object] = {"max_steps": UPDATES}
    pins |= {} if limit is None else {"memory_limit_gb": limit}
    if not planned:
        pins |= {
            "batch_size": way.rows, "gradient_accumulation": ROWS_PER_UPDATE // way.rows,
            "gradient_checkpointing": str(way.recomputed).lower(), "dequantize_base": str(way.dequantized).lower(),
        }  # fmt: skip
    code = stage(project, "train", *(f"train.{key}={value}" for key, value in pins.items()), must=False)
    if code:
        return f"exit {code}", 0.0
    summary = json.loads((project.output / "training_summary.json").read_text())
    rungs = summary["memory_rungs"]
    return (f"ran, on rung {len(rungs)}" if rungs else "ran"), summary["tokens_per_second"]


def compare(name: str, project: Project, limit: float, plan: Recommendation, free: dict[Way, float]) -> Case:
    """The chosen configuration beside the fastest that trains to the end under the limit."""
    settings = plan.settings
    mine = Way(settings.batch_size, settings.gradient_checkpointing, settings.dequantize_base)
    ended, rate = train(project, mine, limit, planned=True)
    best, best_rate = mine, rate
    for way in sorted(free, key=lambda way: -free[way]):
        if free[way] < SLOWER_WITHOUT * best_rate:
            break
        found, reached = train(project, way, limit) if way != mine else (ended, rate)
        if found == "ran" and reached > best_rate:
            best, best_rate = way, reached
    for _ in range(TURNS if best != mine else 0):
        rate = max(rate, train(project, mine, limit, planned=True)[1])
        best_rate = max(best_rate, train(project, best, limit)[1])
    best_rate = max(rate, best_rate)
    print(f"{name}, {limit} GiB: {mine}, {ended}, {rate:,.0f}; best {best}, {best_rate:,.0f}: {rate / best_rate:.2f}",
          flush=True)  # fmt: skip
    return Case(name, limit, mine, plan.predicted_peak_bytes, ended, rate, best, best_rate)


if __name__ == "__main__":
    main()
