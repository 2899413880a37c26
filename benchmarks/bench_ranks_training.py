"""Trainings over 1, 2 and 4 ranks of this machine: traffic and time of an update, beside the model.

    python -m benchmarks.bench_ranks_training

The stages as they are. Two trainings of different length for each number of ranks: their difference is of updates
alone, without what is sent once. Traffic is counted by loopback, so nothing else may use it meanwhile.
"""

import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_planning import made_up_rows
from benchmarks.machine import write_result
from tests.support.chaos.project import Project

RANKS, SHORT, LONG = (1, 2, 4), 1, 4
ROWS, TIMEOUT_SECONDS = 60, 1800
LOOPBACK, LOOPBACK_GBPS = ("lo", "lo0"), 5.0  # its speed for sums over two ranks, measured on one machine
MODEL: dict[str, Any] = {  # the shape of model.create=10m
    "bits": None, "hidden_size": 256, "num_hidden_layers": 11, "intermediate_size": 704, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "batch_size": 2, "gradient_accumulation": 2, "max_seq_length": 64, "save_steps": 1000, "eval_steps": 1000,
    "num_epochs": 50, "max_grad_norm": 1.0,
}  # fmt: skip
NOTES = (
    f"Updates of 4 rows or windows of at most 64 tokens; differences of runs of {SHORT} and {LONG} updates. Sent: by "
    "all ranks, with what they tell each other beside the gradient. Predicted: 2 (N - 1) / N of the float32 "
    "gradient, from each of N.",
    "Time: the ranks share the cores of one machine, all of which a training uses already. Predicted: the time of one "
    f"rank, and the exchange at {LOOPBACK_GBPS:g} Gbit/s. They are faster than that: a process "
    "with a core or two waits less for itself than one with four. (With as many threads in each as there are cores, "
    "four ranks took 7 s an update: they waited for one another.)",
)


def main() -> None:
    """A row for each method and number of ranks."""
    rows = [row for method in ("lora", "pretrain") for row in rows_of(method)]
    header = ["training", "gradient, MB", "ranks", "sent, MB an update", "predicted", "ratio", "s an update",
              "predicted", "ratio"]  # fmt: skip
    write_result("bench_ranks_training", "Trainings over ranks on loopback, beside the model", header, rows, NOTES)


def rows_of(method: str) -> list[list[object]]:
    """Of one method."""
    found, alone = list[list[object]](), 0.0
    with tempfile.TemporaryDirectory() as scratch:
        lora = {"rank": None, "dropout": None} if method == "pretrain" else {"rank": 16, "dropout": 0.0}
        project = Project(
            Path(scratch) / "p", rows=made_up_rows()[:ROWS], model=MODEL, train={**TRAIN, "method": method}
        )
        project.pin(lora=lora)
        project.plan()
        for ranks in RANKS:
            (few_bytes, few_seconds, gradient), (bytes_, seconds, _) = (
                run(project, ranks, updates) for updates in (SHORT, LONG)
            )
            sent, took = (bytes_ - few_bytes) / (LONG - SHORT), (seconds - few_seconds) / (LONG - SHORT)
            alone = alone or took
            expected = 2 * (ranks - 1) * gradient  # a ring (Patarasuk and Yuan 2009), over all ranks
            predicted = alone + 8 * expected / ranks / (LOOPBACK_GBPS * 1e9)
            found.append([
                f"{method}{' rank 16' if method == 'lora' else ''}, 10m", f"{gradient / 1e6:.1f}", ranks,
                f"{sent / 1e6:.2f}", f"{expected / 1e6:.2f}", "" if ranks == 1 else f"{sent / expected:.3f}",
                f"{took:.2f}", "" if ranks == 1 else f"{predicted:.2f}",
                "" if ranks == 1 else f"{took / predicted:.2f}",
            ])  # fmt: skip
    return found


def run(project: Project, ranks: int, updates: int) -> tuple[int, float, int]:
    """Bytes sent by loopback in a training of so many updates, the seconds of these, and the gradient's bytes."""
    before = sent_bytes()
    process = project.start_training(f"train.ranks={ranks}", f"train.max_steps={updates}")
    if process.wait(TIMEOUT_SECONDS):
        raise RuntimeError(project.printed())
    summary = project.json("training_summary.json")
    return sent_bytes() - before, summary["elapsed_seconds"], 4 * summary["trainable_parameters"]


def sent_bytes() -> int:
    """Bytes sent over loopback since the system started."""
    counters = psutil.net_io_counters(pernic=True)
    return next(counters[name].bytes_sent for name in LOOPBACK if name in counters)


if __name__ == "__main__":
    main()
