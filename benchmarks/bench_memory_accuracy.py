"""Peak memory and time that a dry run measures, and the closed form's peak, beside the training that follows.

    python -m benchmarks.bench_memory_accuracy [--quick | NAME …]

Eight architectures with random weights, each planned and trained for one epoch in four configurations: blocks kept or
recomputed, the base quantized, dequantized or never quantized, batch sizes 1 to 8, ranks 4 to 64, all or part of the
blocks trained. What is compared is the peak of mlx's allocator over the updates. With names, as mistral, these alone
are run, and the table is only printed.
"""

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import show_result, write_result
from safetrain.core.memory.estimate import mlx_limit_bytes
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage.files import read_record
from tests.support.chaos.project import Project

BATCHES, RANKS = (1, 2, 3, 4, 6, 8), (4, 8, 16, 32, 64)
ROWS, LONGEST_WORDS = 96, 240
WORDS = ("the", "capital", "of", "a", "country", "is", "city", "and", "an", "element", "has", "number")
LONG = {"max_position_embeddings": 4096}
GEMMA = {"sliding_window": 64, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4,
         "rope_global_base_freq": 1e4, "query_pre_attn_scalar": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama, 12 x 256, vocabulary 8k": {
        "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "vocab_size": 8192, "num_hidden_layers": 12},
    "qwen2, 16 x 192, vocabulary 50k": {
        "model_type": "qwen2", "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50_000, "num_hidden_layers": 16},
    "phi3, 10 x 384, vocabulary 4k": {
        "model_type": "phi3", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 10,
        "tie_word_embeddings": False},
    "qwen3, 14 x 128, vocabulary 150k": {
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 150_000, "num_hidden_layers": 14},
    "olmo2, 9 x 320, vocabulary 2k": {
        "model_type": "olmo2", "hidden_size": 320, "intermediate_size": 832, "num_attention_heads": 5,
        "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 2048, "num_hidden_layers": 9},
    "gemma3, 12 x 256, vocabulary 16k": {
        "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16_000, "num_hidden_layers": 12, **GEMMA},
    "gemma2, 10 x 256, vocabulary 12k": {
        "model_type": "gemma2", "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 12_000, "num_hidden_layers": 10,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64},
    "mistral, 10 x 512, vocabulary 32k, not quantized": {
        "model_type": "mistral", "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32_000, "num_hidden_layers": 10,
        "bits": None},
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One configuration: what was predicted and what its training took, in bytes of mlx's allocator."""

    model: str
    how: str
    dry_run: int
    expected: int
    closed_form: int
    measured: int
    mlx_limit: int
    process: int
    budget: int
    planned_seconds: float  # of all updates
    seconds: float

    @property
    def dry_run_error(self) -> float:
        """Signed, as a share of what was measured."""
        return self.dry_run / self.measured - 1

    @property
    def expected_error(self) -> float:
        """The same of what the training says before it starts: the dry run, for the largest update of its own order."""
        return self.expected / self.measured - 1


def main() -> None:
    """Plan, train, compare, and write the table; exit 1 where a training exceeds its budget."""
    asked = sys.argv[1:]
    names = [name for name in MODELS if name.split(",")[0] in asked] if asked else list(MODELS)
    names = list(MODELS)[:1] if asked == ["--quick"] else names
    found = list[Compared]()
    for name in names:
        for each in compare(name):
            found.append(each)
            print(f"{each.model}: {describe(each)}", flush=True)
    rows = [row_of(name, [each for each in found if each.model == name]) for name in names]
    header = ["model", "configurations", "dry run: mean error", "worst", "said at the start: mean error", "worst",
              "closed form: mean error",
              "least", "most", "over the budget", "time: mean error", "worst"]  # fmt: skip
    rows.append(row_of("**all**", found))
    write = show_result if asked else write_result
    write("bench_memory_accuracy", "Planned and measured peak memory", header, rows)
    sys.exit(1 if any(each.process > each.budget for each in found) else 0)


def compare(name: str) -> Iterator[Compared]:
    """Plan and train one architecture in its configurations, in one scratch project."""
    config = {**LONG, **MODELS[name]}
    with tempfile.TemporaryDirectory() as scratch:
        project = Project(Path(scratch) / "p", rows=made_up_rows(), model=config)
        open_keys = ("save_steps", "eval_steps", "learning_rate")
        project.pin(train={**dict.fromkeys(open_keys), "num_epochs": 1, "max_steps": None}, lora={"dropout": 0.0})
        stage(project, "validate_data")
        stage(project, "preflight", "preflight.level=quick", "preflight.downgrade=[MEM-FIT]")
        for pins in configurations(name, config):
            stage(project, "recommend_config", *pins)
            stage(project, "train", *pins)
            plan = read_record(project.output / "recommended_config.json", Recommendation)
            yield compared(name, plan, json.loads((project.output / "training_summary.json").read_text()))


def compared(name: str, plan: Recommendation, summary: dict[str, Any]) -> Compared:
    """What was planned beside what was measured."""
    settings, lora, measured = plan.settings, plan.settings.lora, plan.measured
    how = [f"{settings.batch_size} x {settings.max_seq_length} tokens, rank {lora.rank} on {lora.num_layers} blocks"]
    how += ["recomputed" if settings.gradient_checkpointing else "kept"]
    how += ["dequantized" if settings.dequantize_base else "as is"]
    peak, seconds = (measured.peak_bytes, measured.update_seconds) if measured is not None else (0, 0.0)
    limit = mlx_limit_bytes(peak or plan.predicted_peak_bytes, plan.memory_budget)
    return Compared(
        name, ", ".join(how), peak, summary["predicted_peak_bytes"],
        plan.predicted_peak_bytes, summary["peak_memory_bytes"], limit,
        summary["peak_footprint_bytes"], plan.memory_budget.total_bytes, seconds * summary["steps"],
        summary["elapsed_seconds"],
    )  # fmt: skip


def configurations(name: str, config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Pins, drawn from a seed."""
    source, blocks = random.Random(name), config["num_hidden_layers"]
    quantized = config.get("bits", 4) is not None
    for recomputed, dequantized in itertools.product((False, True), (True, False) if quantized else (False,)):
        batch_size = source.choice(BATCHES)
        yield (
            f"train.batch_size={batch_size}",
            f"train.gradient_accumulation={source.choice((1, 2))}",
            f"train.gradient_checkpointing={recomputed}",
            f"train.dequantize_base={dequantized}",
            f"lora.rank={source.choice(RANKS)}",
            f"lora.num_layers={source.choice((blocks, blocks, blocks // 2, 2))}",
        )


def made_up_rows() -> list[dict[str, Any]]:
    """Rows of many lengths."""
    source = random.Random(1)
    sizes = [3 + int((LONGEST_WORDS - 3) * source.random() ** 2) for _ in range(ROWS)]
    texts = [" ".join(itertools.islice(itertools.cycle(WORDS[i % 7 :]), size)) for i, size in enumerate(sizes)]
    return [{"prompt": f"number {index}: {text}", "completion": f"{index} {text}"} for index, text in enumerate(texts)]


def stage(project: Project, name: str, *overrides: str) -> None:
    """Run one stage; raises RuntimeError with its words when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{name}", *overrides], cwd=project.folder, env=project.environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} {overrides}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def row_of(name: str, found: list[Compared]) -> list[object]:
    """A line of the table."""
    sizes = [
        100 * np.abs([each.dry_run_error for each in found]),
        100 * np.abs([each.expected_error for each in found]),
    ]
    closed = 100 * np.array([each.closed_form / each.measured - 1 for each in found])
    dry = [f"{value:.1f} %" for each in sizes for value in (each.mean(), each.max())]
    over = sum(each.process > each.budget for each in found)
    of_closed_form = [f"{np.abs(closed).mean():.1f} %", f"{closed.min():+.0f} %", f"{closed.max():+.0f} %"]
    times = 100 * np.array([each.planned_seconds / each.seconds - 1 for each in found])
    of_time = [f"{np.abs(times).mean():.0f} %", f"{times[np.abs(times).argmax()]:+.0f} %"]
    return [name, len(found), *dry, *of_closed_form, over, *of_time]


def describe(compared: Compared) -> str:
    """One configuration on one line."""
    sizes = [compared.dry_run, compared.expected, compared.closed_form, compared.measured, compared.mlx_limit]
    dry, start, closed, measured, limit = (f"{size / 2**20:.1f}" for size in sizes)
    said = f"dry run {dry} MiB ({100 * compared.dry_run_error:+.1f} %), "
    said += f"said at the start {start} ({100 * compared.expected_error:+.1f} %), closed form {closed}, "
    said += f"limit of mlx {limit}, training {measured}; updates {compared.planned_seconds:.1f} s, "
    said += f"training {compared.seconds:.1f} s"
    return f"{compared.how}: {said}"


if __name__ == "__main__":
    main()
