"""Makes a dry run of a training in a process that may die, and remembers it in the user's cache folder.

What it writes goes beside the checkpoints, where there is room, into a folder that is locked by its plan.
"""

import dataclasses
import fcntl
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

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.lock import open_lock_file
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.job import TrainJob, memory_shape
from safetrain.core.records.settings import DryRun
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json, write_record
from safetrain.plan.answers import answers_about, digest_of, keep_answer, read_answer
from safetrain.plan.child import KILLED, PASSED_CAP, Cap, ran_out_of_memory, run_lines

MOST_SECONDS = 3600.0
CAP_SLACK = 1.15
PREFIX = "dry-run-"
HELD = "held"  # in such a folder: locked for as long as its plan lives
FOLDERS_LOCK = ".dry-runs.lock"  # held for a moment, while one is made or remains are removed


@dataclass(frozen=True)
class DryRunner:
    """What to make dry runs with."""

    module: str  # of the engine
    machine: str  # what answers are remembered for
    say: Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """What a dry run took, or why there is no answer."""

    measured: DryRun | None
    ended: str  # how the process ended without an answer
    ran_out_of_memory: bool  # as far as that can be told
    predicted_bytes: int  # peak of mlx's allocator, by the closed form
    seconds: float  # that it took, with Python's own start


def try_out(
    runner: DryRunner, model: ModelFiles, job: TrainJob, rows: str, predicted_bytes: int, seconds: float | None
) -> Answer:
    """Make the largest updates of the job under its limits; the answer is remembered for these ``rows`` (a digest).

    ``seconds``: how long it is expected to take, which is said beforehand; None: not known.
    """
    path = answers_of(runner.machine, model) / f"{_key_of(job, rows)}.json"
    known = read_answer(path, Answer)
    if known is not None:
        return known
    about = "" if seconds is None else f", about {duration_text(seconds)}"
    runner.say(f"dry run of the largest updates with the model itself{about}: {memory_shape(job.settings)}")
    with scratch_folder(paths.OUTPUT) as scratch:
        file = scratch / "job.json"
        write_record(file, job)
        cap = cap_of(job.memory_budget.total_bytes, job.survival.memory_limit_bytes)
        began = time.monotonic()
        lines, ended = run_lines(runner.module, [str(file), str(scratch)], MOST_SECONDS, cap)
    answer = _answer_of(lines, ended, predicted_bytes, time.monotonic() - began)
    found, limited = answer.measured, job.survival.memory_limit_bytes is not None
    if found is not None:
        runner.say(f"dry run: {found.update_seconds:.2f} s an update, peak {size_text(found.peak_bytes)}")
    # A process that the kernel killed, or that has no limit of its own, may have died of other programs' memory.
    own_fault = answer.ran_out_of_memory and limited and not ended.startswith(f"{KILLED} {signal.SIGKILL:d}")
    own_fault = own_fault or ended.startswith(PASSED_CAP)
    if found is not None or own_fault:
        keep_answer(path, answer)
    return answer


def measured_share(machine: str, model: ModelFiles) -> float | None:
    """The largest peak that dry runs of this model have had here, as a share of the closed form's; None: none yet."""
    known = [read_answer(path, Answer) for path in answers_of(machine, model).glob("*.json")]
    shares = [each.measured.peak_bytes / each.predicted_bytes for each in known if each and each.measured]
    return max(shares, default=None)


def answers_of(machine: str, model: ModelFiles) -> Path:
    """The folder of all answers about a model on this machine."""
    return answers_about("dry_runs", model.fingerprint, machine)


def cap_of(budget_bytes: int, own_limit_bytes: int | None = None, platform: str = sys.platform) -> Cap | None:
    """The most that a dry run may take on macOS, where no limit of a process covers Metal's memory.

    Elsewhere the process limits itself (engine/backend.py: ``keep_to_room``). Without train.memory_limit_gb it is the
    budget and a little more: mlx holds buffers that it does not use, up to its limit.
    """
    most = own_limit_bytes or int(CAP_SLACK * budget_bytes)
    return Cap(most) if platform == "darwin" and most else None


def _key_of(job: TrainJob, rows: str) -> str:
    """A hash of all that decides what is measured; learning rate and intervals do not."""
    settings = dataclasses.replace(
        job.settings, learning_rate=0.0, warmup_steps=0, schedule="", save_steps=1, eval_steps=1, log_steps=1,
        max_loss_jump=None, max_grad_norm=1.0, weight_decay=0.0, early_stopping_patience=None,
    )  # fmt: skip
    return digest_of(f"{rows} {dataclasses.asdict(dataclasses.replace(job, settings=settings))}")


def _answer_of(lines: list[str], ended: str, predicted_bytes: int, seconds: float) -> Answer:
    try:
        return Answer(from_json(DryRun, json.loads(lines[-1])), "", False, predicted_bytes, seconds)
    except (IndexError, ValueError, TypeError):
        return Answer(None, ended or "it gave no answer", ran_out_of_memory(ended), predicted_bytes, seconds)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder in ``parent`` for the length of the block; in the system's own place where there is no ``parent``."""
    if not parent.is_dir():
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            yield Path(folder)
        return
    with _locked(parent / FOLDERS_LOCK):  # nobody removes it before it is held
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        holder = open_lock_file(made / HELD)
        fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(holder)


def remove_remains(parent: Path) -> None:
    """Remove the folders of killed plans in ``parent``; those of living plans are locked."""
    if not any(parent.glob(f"{PREFIX}*")):
        return
    with _locked(parent / FOLDERS_LOCK):
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_unheld(folder)


def _remove_unheld(folder: Path) -> None:
    try:
        holder = open_lock_file(folder / HELD)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # its plan has just ended, or it is not ours
        return
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(holder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel releases the lock however we end, and the file stays."""
    descriptor = open_lock_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
