"""Is the recommended configuration one that runs, and the fastest that does? Against an exhaustive search.

    python -m benchmarks.bench_choice [--quick]

For each model and memory limit: the stages plan a training under train.memory_limit_gb, then run it under that limit,
which the kernel enforces (RLIMIT_DATA: an allocation beyond it fails, on CPU with a segfault). Beside it, every
micro-batch size in every way of computing is measured with the model itself; the fastest that trains to the end under
the same limit is the best there is.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.project import Project
from benchmarks.machine import write_result
from safetrain.core.memory import PROCESS_BYTES
from safetrain.core.memory_terms import padded
from safetrain.core.probes import Measured, ProbePoint, ProbeRequest, measured_from, write_request
from safetrain.core.settings import Recommendation, TrainSettings, read_recommendation
from safetrain.core.words import counted
from safetrain.plan.choose import rate_of
from safetrain.plan.measure import template

PROBE = "safetrain.engine.calibrate"
BATCHES, ROWS_PER_UPDATE = (16, 8, 4, 2, 1), 16
UPDATES = 6
LEAST_SHARE = 0.6  # of the peak of an unlimited run, which no limit brings it below (measured: two thirds)
TIMEOUT_SECONDS = 900
GIB = 2**30
WORDS = ("the", "capital", "of", "a", "country", "is", "city", "and", "an", "element", "has", "number")
MODELS: dict[str, tuple[dict[str, Any], int, tuple[float, ...]]] = {  # config, words of the longest row, limits in GiB
    "llama, 12 x 256, vocabulary 8k": (
        {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 32, "vocab_size": 8192, "num_hidden_layers": 12}, 30, (0.45, 0.55, 0.8)),
    "qwen2, 8 x 256, vocabulary 50k": (
        {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 50_000, "num_hidden_layers": 8}, 30,
        (0.6, 0.75, 1.2)),
    "phi3, 8 x 384, vocabulary 6k": (
        {"model_type": "phi3", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
         "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 6144, "num_hidden_layers": 8,
         "tie_word_embeddings": False}, 30, (0.5, 0.6, 0.9)),
    "olmo2, 10 x 320, vocabulary 5k": (
        {"model_type": "olmo2", "hidden_size": 320, "intermediate_size": 832, "num_attention_heads": 5,
         "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 5120, "num_hidden_layers": 10}, 30,
        (0.5, 0.6, 0.9)),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What was recommended under a limit, how the training ended, and how it compares."""

    model: str
    limit_gib: float
    chosen: Recommendation
    ended: str
    chosen_rate: float  # tokens per second at the longest rows
    best_rate: float
    best: str


def main() -> None:
    """Run every case and write the table; exit 1 when a training did not get through."""
    names = list(MODELS)[:1] if "--quick" in sys.argv else list(MODELS)
    cases = [case for name in names for case in run_model(name)]
    rows: list[list[object]] = [
        [c.model, f"{c.limit_gib:.2f}", shape_of(c.chosen), f"{c.chosen.predicted_peak_bytes / GIB:.2f}", c.ended,
         f"{c.chosen_rate:,.0f}", f"{c.best_rate:,.0f} ({c.best})", f"{100 * c.chosen_rate / c.best_rate:.0f} %"]
        for c in cases
    ]  # fmt: skip
    header = ["model", "limit, GiB", "recommended", "predicted peak, GiB", "training", "tokens/s",
              "best that survives", "of the best"]  # fmt: skip
    least = min(case.chosen_rate / case.best_rate for case in cases)
    ran = sum(case.ended == "ran" for case in cases)
    notes = [f"{ran} of {len(cases)} ran to the end in the recommended shape; the slowest choice has "
             f"{100 * least:.0f} % of the best one's throughput."]  # fmt: skip
    write_result("bench_choice", "The recommended configuration against all others", header, rows, notes)
    sys.exit(0 if ran == len(cases) else 1)


def run_model(name: str) -> Iterator[Case]:
    """The cases of one model, in one scratch project."""
    config, words, limits = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch) / "p", rows=rows_of(words), model=config)
        open_keys = ("batch_size", "gradient_accumulation", "num_epochs", "save_steps", "eval_steps", "learning_rate")
        project.pin(train=dict.fromkeys(open_keys) | {"max_steps": UPDATES}, lora={"rank": None, "dropout": None})
        stage(project, "validate_data")
        everything: list[Measured] = []
        for limit in limits:
            pin = f"train.memory_limit_gb={limit}"
            stage(project, "preflight", "preflight.level=quick", "preflight.downgrade=[MEM-FIT]")
            stage(project, "recommend_config", pin)
            chosen = read_recommendation(project.output / "recommended_config.json")
            code = stage(project, "train", pin, "train.restart=true", must=False)
            everything = everything or measure(project, candidates(chosen))
            yield compare(name, project, limit, chosen, how_it_ended(project, code), everything)


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


def how_it_ended(project: Project, code: int) -> str:
    """``ran``, or what happened: a rung of the ladder, or the exit code."""
    if code:
        return f"exit {code}"
    rungs = json.loads((project.output / "training_summary.json").read_text())["memory_rungs"]
    return f"ran, on rung {len(rungs)}" if rungs else "ran"


def candidates(chosen: Recommendation) -> tuple[ProbePoint, ...]:
    """Every size in every way of computing, at the longest rows."""
    tokens = padded(chosen.max_seq_length - 1)
    found = []
    for size, recompute, unpack in itertools.product(BATCHES, (False, True), (True, False)):
        settings = dataclasses.replace(
            template("lora", chosen.lora), batch_size=size, gradient_accumulation=ROWS_PER_UPDATE // size,
            gradient_checkpointing=recompute, dequantize_base=unpack,
        )  # fmt: skip
        found.append(ProbePoint(chosen.lora.num_layers, tokens, settings))
    return tuple(found)


def measure(project: Project, points: tuple[ProbePoint, ...]) -> list[Measured]:
    """With the model itself, without a limit."""
    request = project.parent / "request.json"
    write_request(request, ProbeRequest(str(project.folder / "models" / "tiny"), False, False, points))
    done = subprocess.run(
        [sys.executable, "-m", PROBE, str(request)], cwd=project.folder, env=project.environment,
        capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return [measured_from(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(
    name: str, project: Project, limit: float, chosen: Recommendation, ended: str, everything: list[Measured]
) -> Case:
    """The chosen configuration beside the fastest that trains to the end under the limit."""
    mine = next(each for each in everything if same(each.point.settings, chosen))
    for each in sorted(everything, key=rate_of, reverse=True):
        rival, least = each.point.settings, LEAST_SHARE * each.peak_bytes + PROCESS_BYTES
        if each is mine or (least < limit * GIB and trains(project, limit, rival)):
            words = f"{shape_of(chosen)}, {ended}; best {shape_of(rival)}, {rate_of(mine) / rate_of(each):.2f}"
            print(f"{name}, {limit} GiB: {words}", flush=True)
            return Case(name, limit, chosen, ended, rate_of(mine), rate_of(each), shape_of(rival))
    raise RuntimeError(f"{name}: nothing survives {limit} GiB")


def trains(project: Project, limit: float, rival: TrainSettings) -> bool:
    """Whether a training of this shape gets to its end under the limit, in one process."""
    pins = {
        "memory_limit_gb": limit, "batch_size": rival.batch_size, "restart": "true", "oversize": "true",
        "gradient_accumulation": rival.gradient_accumulation, "dequantize_base": str(rival.dequantize_base).lower(),
        "gradient_checkpointing": str(rival.gradient_checkpointing).lower(),
    }  # fmt: skip
    code = stage(project, "train", *(f"train.{key}={value}" for key, value in pins.items()), must=False)
    return how_it_ended(project, code) == "ran"


def same(settings: TrainSettings, chosen: Recommendation) -> bool:
    """Whether they compute alike."""
    keys = ("batch_size", "gradient_checkpointing", "dequantize_base")
    return all(getattr(settings, key) == getattr(chosen, key) for key in keys)


def shape_of(settings: TrainSettings | Recommendation) -> str:
    """In a few words."""
    how = ["recomputed"] if settings.gradient_checkpointing else []
    how += ["unpacked"] if settings.dequantize_base else ["packed"]
    return ", ".join([counted(settings.batch_size, "row"), *how])


if __name__ == "__main__":
    main()
