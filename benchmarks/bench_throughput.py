"""Tokens per second and peak memory of this engine, of mlx_lm.lora, and of PyTorch with PEFT, on the same rows.

``python -m benchmarks.bench_throughput [a|b|c ...] [--quick]``; a result is kept when all cases ran in full.
Each training has a process of its own, one after the other, and this one stays small: a started process counts the
resident memory of the one that started it. BENCH_TORCH_PYTHON names the interpreter that has torch, transformers and
peft; without it, it is this one.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_blas import gflops
from benchmarks.machine import show_result, write_result
from benchmarks.throughput_cases import CASES, LINEARS, ROOT, UNTRAINED, Case, model_folder, quick

RANK, SCALE, LEARNING_RATE, SEED = 8, 2.0, 1e-4, 42
NEVER = 1_000_000
PREPARE_SECONDS, TRAIN_SECONDS = 600, 3600
POLL_SECONDS = 0.1
PEAK_SIZE, PEAK_ROUNDS = 2048, 3
OURS = "safetrain"
TORCH = os.environ.get("BENCH_TORCH_PYTHON", sys.executable)
INSTALL = "install with: `uv pip install --editable '.[bench]'`, or name an interpreter in BENCH_TORCH_PYTHON"
HEADER = [
    "case", "trained by", "tokens/s", "ours is", "peak of mlx, MiB", "ours needs", "peak of the process, MiB",
    "ours needs", "padding", "of the GEMM peak", "counted",
]  # fmt: skip


class Failed(Exception):
    """A side did not run; the text says why."""


@dataclass(frozen=True)
class ModelMeasures:
    """One side of one case. ``tokens`` are those of the rows without their last, which nothing is predicted from."""

    name: str
    tokens: int
    labels: int
    seconds: float
    updates: int
    rows: int
    padding: float | None  # share of all computed positions
    mlx_bytes: int | None
    process_bytes: int

    @property
    def rate(self) -> float:
        """Tokens per second of updates."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Prepared:
    """A case that is written down, and what is counted in it."""

    case: Case
    scratch: Path
    tokens: list[int]  # of each training row
    labels: list[int]

    @property
    def model(self) -> Path:
        """The quantized model."""
        return model_folder(self.case, self.scratch)

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.model / "config.json").read_text())


def main() -> None:
    """Every case that is asked for, one table."""
    named = [argument for argument in sys.argv[1:] if argument != "--quick"]
    short = "--quick" in sys.argv[1:]
    unknown = set(named) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in CASES)}")
    peak = max(gflops("fast", 512 if short else PEAK_SIZE) for _ in range(PEAK_ROUNDS))
    rows: list[list[object]] = []
    for case in CASES:
        if not named or case.name in named:
            rows += measure_case(quick(case) if short else case, peak)
    notes = describe(peak)
    if short or named:
        show_result("bench_throughput", "Fine-tuning, beside other engines", HEADER, rows, notes)
        print("Not kept: a result has every case, in full.")
    else:
        write_result("bench_throughput", "Fine-tuning, beside other engines", HEADER, rows, notes)


def measure_case(case: Case, peak: float) -> list[list[object]]:
    """The lines of one case; a side that fails has its reason in its line."""
    sides: list[tuple[str, Callable[[Prepared], ModelMeasures]]] = [
        (OURS, train_ours),
        ("mlx_lm.lora", train_mlx_lm),
        ("PyTorch and PEFT, float32", lambda prepared: train_torch(prepared, "float32")),
        ("PyTorch and PEFT, bfloat16", lambda prepared: train_torch(prepared, "bfloat16")),
    ]
    lines: list[list[object]] = []
    ours: ModelMeasures | None = None
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(case, Path(folder))
        for name, train in sides:
            try:
                measured = train(prepared)
            except Failed as reason:
                lines.append([case.title, name, str(reason), *[""] * (len(HEADER) - 3)])
            else:
                ours = measured if name == OURS else ours
                share = attained(prepared, measured) / peak
                lines.append([case.title, name, *cells(measured, ours, "" if "bfloat16" in name else f"{share:.0%}")])
            print(*lines[-1], sep=" | ", flush=True)
    return lines


def prepare(case: Case, scratch: Path) -> Prepared:
    """Write the case in a process of its own."""
    asked = json.dumps(dataclasses.asdict(case))
    run([sys.executable, "-m", "benchmarks.throughput_cases", str(scratch), asked], ROOT, PREPARE_SECONDS)
    return prepared_case(case, scratch)


def prepared_case(case: Case, scratch: Path) -> Prepared:
    """A case that is written down already."""
    rows = json.loads((scratch / "rows.json").read_text())
    labels = [sum(label != UNTRAINED for label in row["labels"][1:]) for row in rows]
    return Prepared(case, scratch, [len(row["ids"]) - 1 for row in rows], labels)


def train_ours(prepared: Prepared) -> ModelMeasures:
    """The stages up to the training, in a folder with the configuration of the working tree; one whole epoch."""
    case, folder = prepared.case, prepared.scratch / "ours"
    shutil.copytree(ROOT / "conf", folder / "conf")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, folder / name)
    overrides = [
        f"model.path={prepared.model}", f"data.path={prepared.scratch / 'data'}", f"train.batch_size={case.batch_size}",
        f"train.max_seq_length={case.max_tokens}", f"train.learning_rate={LEARNING_RATE}", f"train.seed={SEED}",
        "train.gradient_accumulation=1", "train.num_epochs=1", "train.warmup_steps=0", f"train.eval_steps={NEVER}",
        f"train.save_steps={NEVER}", f"lora.rank={RANK}", f"lora.scale={SCALE}", "lora.dropout=0",
        f"lora.num_layers={prepared.config['num_hidden_layers']}", f"lora.targets=[{','.join(LINEARS)}]",
    ]  # fmt: skip
    process_bytes = 0
    for stage in ("validate_data", "preflight", "recommend_config", "train"):
        process_bytes = run([sys.executable, "-m", f"stages.{stage}", *overrides], folder, TRAIN_SECONDS)
    summary = json.loads((folder / "checkpoints_qlora" / "training_summary.json").read_text())
    tokens, seconds = sum(prepared.tokens), summary["elapsed_seconds"]
    said = summary["tokens_per_second"] * seconds
    if summary["train_rows"] != len(prepared.tokens) or abs(said / tokens - 1) > 0.02:
        raise Failed(
            f"trained {summary['train_rows']} rows of {said:.0f} tokens, not {len(prepared.tokens)} of {tokens}"
        )
    return ModelMeasures(
        OURS, tokens, sum(prepared.labels), seconds, summary["steps"], len(prepared.tokens),
        summary.get("padding_share"), summary["peak_memory_bytes"], process_bytes,
    )  # fmt: skip


def train_mlx_lm(prepared: Prepared) -> ModelMeasures:
    """mlx_lm.lora in this interpreter."""
    return train_peer(prepared, "mlx_lm.lora", sys.executable, "benchmarks.throughput_peer_mlx_lm", "quantized")


def train_torch(prepared: Prepared, dtype: str) -> ModelMeasures:
    """PyTorch and PEFT, in the interpreter that has them."""
    if torch_versions() is None:
        raise Failed(f"not measured: no torch, transformers and peft here; {INSTALL}")
    return train_peer(prepared, "PyTorch and PEFT", TORCH, "benchmarks.throughput_peer_torch", dtype)


def train_peer(prepared: Prepared, name: str, python: str, module: str, dtype: str) -> ModelMeasures:
    """Another engine in a process of its own; its first update is not counted."""
    case, scratch = prepared.case, prepared.scratch
    result = scratch / f"{module}-{dtype}.json"
    job = {
        "model": str(prepared.model), "float32": str(scratch / "float32"), "data": str(scratch / "data"),
        "tokens": str(scratch / "rows.json"), "adapter": str(scratch / f"{module}-{dtype}"), "result": str(result),
        "rows": len(prepared.tokens), "batch_size": case.batch_size, "max_tokens": case.max_tokens,
        "least_updates": case.least_updates, "seconds": case.seconds, "layers": prepared.config["num_hidden_layers"],
        "targets": LINEARS, "rank": RANK, "scale": SCALE, "learning_rate": LEARNING_RATE, "seed": SEED,
        "threads": threads(), "dtype": dtype,
    }  # fmt: skip
    process_bytes = run([python, "-m", module, json.dumps(job)], ROOT, TRAIN_SECONDS)
    found = json.loads(result.read_text())
    counted = found["updates"][1:]
    trained = [row for update in counted for row in update["rows"]]
    tokens = sum(prepared.tokens[row] for row in trained)
    return ModelMeasures(
        name, tokens, sum(prepared.labels[row] for row in trained), sum(update["seconds"] for update in counted),
        len(counted), len(trained), 1 - tokens / sum(update["positions"] for update in counted),
        found.get("peak_memory_bytes"), process_bytes,
    )  # fmt: skip


def run(command: list[str], folder: Path, seconds: float) -> int:
    """Run a process to its end and return its peak of resident memory in bytes; raises Failed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        ends = time.monotonic() + seconds
        try:
            while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > ends:
                    raise Failed(f"not measured: stopped after {seconds:.0f} s")
                time.sleep(POLL_SECONDS)
            child.returncode = os.waitstatus_to_exitcode(ended[1])
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode != 0:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip()
            print(said[-3000:], file=sys.stderr)
            raise Failed(f"failed with exit code {child.returncode}: {' '.join(said[-200:].replace('|', '/').split())}")
    return ended[2].ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def attained(prepared: Prepared, measured: ModelMeasures) -> float:
    """GFLOP/s of products that a frozen base needs: forward, and backward to the inputs; the head where labels are."""
    config = prepared.config
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    block = 2 * hidden * size * (heads + groups) + 3 * hidden * wide
    linear = block * config["num_hidden_layers"] * measured.tokens
    head = hidden * config["vocab_size"] * measured.labels
    return 4 * (linear + head) / measured.seconds / 1e9


def cells(measured: ModelMeasures, ours: ModelMeasures | None, share: str) -> list[object]:
    """A line of the table after its case and name."""
    mlx, process = measured.mlx_bytes, measured.process_bytes
    beside = ours if measured is not ours else None
    return [
        f"{measured.rate:,.0f}" if measured.rate >= 100 else f"{measured.rate:.1f}",
        f"{beside.rate / measured.rate:.2f} x" if beside else "",
        f"{mlx / 2**20:,.0f}" if mlx else "",
        f"{beside.mlx_bytes / mlx:.2f} x" if beside and beside.mlx_bytes and mlx else "",
        f"{process / 2**20:,.0f}",
        f"{beside.process_bytes / process:.2f} x" if beside else "",
        f"{measured.padding:.0%}" if measured.padding is not None else "",
        share,
        f"{measured.updates} updates, {measured.rows} rows, {measured.seconds:.1f} s",
    ]


def describe(peak: float) -> list[str]:
    """What has to be known to read the table."""
    versions = torch_versions() or "none"
    return [
        f"GEMM peak of mlx here: {peak:.0f} GFLOP/s in float32. PyTorch and PEFT: {versions}; threads: {threads()}.",
        "A token is counted where a row predicts the next one; padding is not. All train the same rows in batches of "
        f"the same size, answers only, LoRA of rank {RANK} on every linear layer of every block, Adam. PyTorch's "
        "weights are the same, dequantized. Each orders, batches and pads rows in its own way: mlx_lm.lora to a "
        "multiple of 32 and one more, PyTorch to the longest row of the batch.",
        f"safetrain: all updates of one epoch, the first included. The others: updates for {Case.seconds:.0f} s, at "
        "least a few, at most one epoch, without their first. Where these are few, their rows are a small sample.",
        "`ours is`: our tokens per second divided by theirs. `ours needs`: our peak divided by theirs. The peak of mlx "
        "is that of its allocator; the peak of the process is its resident memory from its start, loading included. "
        "Of the GEMM peak: 4 operations for each weight of a frozen linear layer and counted token; the output layer "
        "counts where labels are.",
    ]


@functools.cache
def torch_versions() -> str | None:
    """What the interpreter for PyTorch has, None when something is missing; asked in a process of its own."""
    names = ("torch", "transformers", "peft")
    script = (
        f"import importlib.metadata as m, {', '.join(names)}; print(', '.join(n + ' ' + m.version(n) for n in {names}))"
    )
    try:
        done = subprocess.run([TORCH, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def threads() -> int:
    """Threads that PyTorch gets; OpenBLAS takes as many."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


if __name__ == "__main__":
    main()
