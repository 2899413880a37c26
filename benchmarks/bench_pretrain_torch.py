"""Training from scratch beside a plain PyTorch loop, update by update: the same losses? And how fast is each?

    python -m benchmarks.bench_pretrain_torch [--updates 200] [--windows 16] [--window 128] [--optimizer adamw muon]

The same untrained model (model.create), windows and optimizer. Both processes live at once and make their updates
in turn, so that whatever else runs on the machine slows both alike. BENCH_TORCH_PYTHON names an interpreter that has
torch, numpy and safetensors; without it, it is this one.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_pretrain import PRESETS, articles, make_model, write_documents
from benchmarks.machine import show_result, write_result
from benchmarks.throughput_cases import ROOT
from safetrain.core.data.token_rows import TokenRow, TokenRows, TokenWindows, token_row
from safetrain.core.data.training_rows import Cursor, row_order
from safetrain.core.memory.terms import MOST_SHARDS, usable_cores
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.cpu.blas import load_fast_blas
from tests.support.settings import SETTINGS

TORCH = os.environ.get("BENCH_TORCH_PYTHON", sys.executable)
RATE, WARMUP, DECAY, SEED = 2e-3, 20, 0.1, 7
GEMM_SIZE, GEMM_EVERY = 1024, 10
UNTRAINED = -100
HEADER = ["preset", "optimizer", "update", "loss: mean difference", "largest", "first, last loss", "tokens/s",
          "PyTorch", "ours is", "of the GEMM limit", "PyTorch"]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One update on both sides."""

    ours: float  # mean loss in nats per label
    theirs: float
    our_seconds: float
    their_seconds: float

    @property
    def difference(self) -> float:
        """Of the losses, as a share."""
        return abs(self.ours / self.theirs - 1)


def main() -> None:
    """Each optimizer in turn; exit 1 where a loss is off by more than a hundredth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16, help="of an update")
    parser.add_argument("--window", type=int, default=128, help="tokens")
    parser.add_argument("--preset", default="10m", choices=list(PRESETS))
    parser.add_argument("--optimizer", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon"])
    parser.add_argument("--minutes", type=float, default=60, help="for each optimizer, after which it ends early")
    asked = parser.parse_args()
    load_fast_blas()  # before anything imports mlx
    rows, worst = list[list[object]](), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl", 1000)
        model = folder / "model"
        make_model(asked.preset, model, folder / "documents.jsonl", folder)
        data = windows_of(model, asked.window, asked.updates * asked.windows)
        for optimizer in asked.optimizer:
            steps, peaks = compare(model, folder, data, settings_of(asked, optimizer), asked.minutes)
            rows.append(row_of(asked, optimizer, steps, peaks, read_model_files(model).parameters))
            worst = max(worst, *(step.difference for step in steps))
            print(rows[-1], flush=True)
    notes = (
        "Difference: of the mean loss per label of each update, as a share. Ours is: the median over pairs of updates "
        f"of their seconds by ours. GEMM limit: 6 x parameters x tokens, by float32 products of {GEMM_SIZE} x "
        f"{GEMM_SIZE} in mlx, timed between the updates. PyTorch computes whole windows under a mask. Other processes "
        "shared the machine.",
    )
    write = write_result if asked.updates >= parser.get_default("updates") else show_result
    write("bench_pretrain_torch", "Training from scratch beside a plain PyTorch loop", HEADER, rows, notes)
    sys.exit(worst > 0.01)


def settings_of(asked: argparse.Namespace, optimizer: str) -> TrainSettings:
    """What both sides train with."""
    return dataclasses.replace(
        SETTINGS, method="pretrain", optimizer=optimizer, weight_decay=DECAY, learning_rate=RATE, warmup_steps=WARMUP,
        batch_size=asked.windows, gradient_accumulation=1, max_seq_length=asked.window, max_steps=asked.updates,
        seed=SEED,
    )  # fmt: skip


def windows_of(model: Path, window: int, count: int) -> TokenWindows:
    """At least so many windows of different articles."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    (end,) = tokenizer.encode("<|end|>").ids
    rows, tokens = list[TokenRow](), 0
    for text in articles(50_000):
        ids = [*tokenizer.encode(text).ids, end]
        rows.append(token_row(ids, [True] * len(ids)))
        tokens += len(ids)
        if tokens > (count + 1) * window:
            break
    return TokenWindows(TokenRows.of(rows), window, frozenset({end}))


def compare(
    model: Path, folder: Path, data: TokenWindows, settings: TrainSettings, minutes: float
) -> tuple[list[Step], list[float]]:
    """Every update on both sides, in turn; and products per second that were measured meanwhile, in FLOP/s."""
    threads = min(MOST_SHARDS, usable_cores())
    write_windows(folder / "windows.npz", data, settings)
    job = {"model": str(model), "windows": str(folder / "windows.npz"), "threads": threads,
           "optimizer": settings.optimizer, "weight_decay": settings.weight_decay, "rate": settings.learning_rate,
           "warmup": settings.warmup_steps, "updates": settings.max_steps}  # fmt: skip
    peer = start_peer(job)
    steps, peaks, began = list[Step](), list[float](), time.monotonic()
    with peer:
        for number, (loss, seconds) in enumerate(our_updates(model, data, settings)):
            theirs = answer_of(peer)
            steps.append(Step(loss, theirs["loss"], seconds, theirs["seconds"]))
            if number % GEMM_EVERY == 0 or number + 1 == settings.max_steps:
                peaks.append(gemm_limit())
                off = max(step.difference for step in steps)
                print(f"{settings.optimizer} {number}: {steps[-1]}, at most {100 * off:.4f} % off", flush=True)
            if time.monotonic() - began > 60 * minutes:
                break
    return steps, peaks


def start_peer(job: dict[str, Any]) -> "subprocess.Popen[str]":
    """The other side, which waits to be asked for an update."""
    return subprocess.Popen(
        [TORCH, str(ROOT / "benchmarks" / "pretrain_peer_torch.py"), json.dumps(job)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip


def answer_of(peer: "subprocess.Popen[str]") -> dict[str, Any]:
    """Have the other side make its next update."""
    if peer.stdin is None or peer.stdout is None:
        raise RuntimeError("the peer has no pipes")
    peer.stdin.write("go\n")
    peer.stdin.flush()
    if not (line := peer.stdout.readline()):
        raise RuntimeError("PyTorch's loop has ended; what it says stands above")
    found: dict[str, Any] = json.loads(line)
    return found


def our_updates(model_folder: Path, data: TokenWindows, settings: TrainSettings) -> Iterator[tuple[float, float]]:
    """Mean loss and seconds of each update of the engine."""
    import mlx.core as mx

    from safetrain.engine.batches import training_layout, update_at
    from safetrain.engine.optimizer import apply_gradient, learning_rate, optimizer_of
    from safetrain.engine.update import measure, prepare

    model, gradients = prepare(model_folder, settings)
    optimizer = optimizer_of(settings)
    optimizer.init(model.module.trainable_parameters())
    mx.eval(model.module.trainable_parameters(), optimizer.state)
    layout, total = training_layout(model, settings.batch_size, data), settings.max_steps or 0
    model.module.train()
    for step in range(total):
        began = time.perf_counter()
        update = update_at(data, Cursor(0, step), settings.seed, settings.rows_per_update, layout)
        loss, gradient = gradients.of(update, step)
        summed, norm = measure(loss, gradient)
        rate = learning_rate(step, settings.learning_rate, settings.warmup_steps, total, settings.schedule)
        apply_gradient(model, optimizer, gradient, norm, rate, settings.max_grad_norm)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
        yield summed / update.labels, time.perf_counter() - began


def gemm_limit() -> float:
    """Floating-point operations a second of one float32 product."""
    import mlx.core as mx

    matrix = mx.random.normal((GEMM_SIZE, GEMM_SIZE))
    mx.eval(matrix)
    began = time.perf_counter()
    mx.eval(matrix @ matrix)
    return 2 * GEMM_SIZE**3 / (time.perf_counter() - began)


def write_windows(path: Path, data: TokenWindows, settings: TrainSettings) -> None:
    """The windows of each update as (updates, windows, tokens): what a plain loop would be given."""
    order, size = row_order(settings.seed, 0, len(data), data.longest), settings.rows_per_update
    chosen = order[: (settings.max_steps or 0) * size]
    shape = (len(chosen), data.tokens)
    found = {name: np.zeros(shape, np.int32) for name in ("inputs", "positions", "documents")}
    found["targets"] = np.full(shape, UNTRAINED, np.int32)
    found["documents"] -= 1
    for place, window in enumerate(chosen.tolist()):
        start = 0
        for number, piece in enumerate(data.pieces([window])):
            here = slice(start, start + len(piece) - 1)
            found["inputs"][place, here], found["targets"][place, here] = piece.ids[:-1], piece.ids[1:]
            found["positions"][place, here], found["documents"][place, here] = np.arange(len(piece) - 1), number
            start += len(piece) - 1
    by_update: dict[str, Any] = {name: value.reshape(-1, size, data.tokens) for name, value in found.items()}
    np.savez(path, **by_update)


def row_of(
    asked: argparse.Namespace, optimizer: str, steps: list[Step], peaks: list[float], parameters: int
) -> list[object]:
    """A line of the table."""
    tokens, different = asked.windows * asked.window, [step.difference for step in steps]
    ours, theirs = (
        statistics.median(getattr(step, name) for step in steps) for name in ("our_seconds", "their_seconds")
    )
    ratio = statistics.median(step.their_seconds / step.our_seconds for step in steps)
    limit = 6 * parameters * tokens / statistics.median(peaks)
    return [
        asked.preset, optimizer, f"{asked.windows} x {asked.window} tokens, {len(steps)} of {asked.updates}",
        f"{100 * statistics.mean(different):.4f} %", f"{100 * max(different):.4f} %",
        f"{steps[0].ours:.3f}, {steps[-1].ours:.3f}", f"{tokens / ours:,.0f}", f"{tokens / theirs:,.0f}",
        f"{ratio:.2f} x", f"{100 * limit / ours:.0f} %", f"{100 * limit / theirs:.0f} %",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
