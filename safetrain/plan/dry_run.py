"""Makes a dry run of a training in a process that may die, and remembers it in the user's cache folder."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.settings import DryRun, TrainJob, memory_shape
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json, write_record
from safetrain.plan.child import (
    KILLED,
    PASSED_CAP,
    answers_about,
    digest_of,
    keep_answer,
    ran_out_of_memory,
    read_answer,
    run_lines,
)

MOST_SECONDS = 3600.0
CAP_SLACK = 1.15
PREFIX = "dry-run-"


@dataclass(frozen=True)
class DryRunner:
    """What to make dry runs with."""

    module: str  # of the engine; empty: none is made, what is remembered counts
    machine: str  # what answers are remembered for
    say: Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A dry run's measurements, or why they are missing."""

    measured: DryRun | None
    ended: str  # how the process ended without an answer
    ran_out_of_memory: bool  # as far as that is known
    seconds: float  # that it took, with Python's own start


def try_out(runner: DryRunner, model: ModelFiles, job: TrainJob, rows: str, seconds: float = 0.0) -> Answer | None:
    """Make the largest updates of the job under its limits; the answer is remembered for these ``rows`` (a digest).

    ``seconds``: how long it is expected to take, which is printed beforehand. None where the runner makes no dry runs.
    """
    path = answers_about("dry_runs", model.fingerprint, runner.machine) / f"{_key_of(job, rows)}.json"
    cached = read_answer(path, Answer)
    if cached is not None or not runner.module:
        return cached
    about = f", about {duration_text(seconds)}" if seconds else ""
    runner.say(f"dry run of the largest updates with the model itself{about}: {memory_shape(job.settings)}")
    with scratch_folder(paths.OUTPUT) as scratch:
        file = scratch / "job.json"
        write_record(file, job)
        most = most_bytes(job.memory_budget.total_bytes, job.memory_limit_bytes)
        began = time.monotonic()
        lines, ended = run_lines(runner.module, [str(file), str(scratch)], MOST_SECONDS, most)
    answer = _answer_of(lines, ended, time.monotonic() - began)
    if answer.measured is not None:
        peak = size_text(answer.measured.peak_bytes)
        runner.say(f"dry run: {answer.measured.update_seconds:.2f} s an update, peak {peak}")
    # A process that the kernel killed, or that has no own limit, may have died of other programs' memory.
    limited, by_kernel = job.memory_limit_bytes is not None, ended.startswith(f"{KILLED} {signal.SIGKILL:d}")
    own_fault = ended.startswith(PASSED_CAP) or (answer.ran_out_of_memory and limited and not by_kernel)
    if answer.measured is not None or own_fault:
        keep_answer(path, answer)
    return answer


def most_bytes(budget_bytes: int, own_limit_bytes: int | None = None, platform: str = sys.platform) -> int | None:
    """The most that a dry run may take on macOS, as in child.py; elsewhere None.

    Without train.memory_limit_gb it is the budget and a little more: mlx holds buffers that it does not use, up to its
    limit.
    """
    return own_limit_bytes or int(CAP_SLACK * budget_bytes) or None if platform == "darwin" else None


def _key_of(job: TrainJob, rows: str) -> str:
    """A hash of all that decides what is measured; learning rate and intervals do not."""
    settings = dataclasses.replace(
        job.settings, learning_rate=0.0, warmup_steps=0, schedule="", save_steps=1, eval_steps=1, log_steps=1,
        max_loss_jump=None, max_grad_norm=1.0, weight_decay=0.0, early_stopping_patience=None,
    )  # fmt: skip
    return digest_of(f"{rows} {dataclasses.asdict(dataclasses.replace(job, settings=settings))}")


def _answer_of(lines: list[str], ended: str, seconds: float) -> Answer:
    try:
        return Answer(from_json(DryRun, json.loads(lines[-1])), "", False, seconds)
    except (IndexError, ValueError, TypeError):
        return Answer(None, ended or "it gave no answer", ran_out_of_memory(ended), seconds)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder for the length of the block: in ``parent``, where there is room for checkpoints, if that is there."""
    prefix = f"{PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent if parent.is_dir() else None) as folder:
        yield Path(folder)


def remove_remains(parent: Path) -> None:
    """Remove the folders of plans that were killed: no process has the number in their names."""
    for folder in parent.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not (process.isdecimal() and psutil.pid_exists(int(process))):
            shutil.rmtree(folder, ignore_errors=True)
