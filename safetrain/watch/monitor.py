"""Finds out what a run is doing or how it ended: state, phase, time left, losses, memory."""

import enum
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from safetrain.core.events import Begun, Finished, JournalEntry, Started
from safetrain.core.postmortem import PostMortem
from safetrain.core.recorder import Phase
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.settings import TrainJob
from safetrain.watch.charts import points_of, rungs_of_job
from safetrain.watch.progress import MEASURE, time_left
from safetrain.watch.run_folder import Run, RunReader

BEFORE_TRAINING = ("validate_data", "preflight", "recommend_config")
IN_UPDATE = (Phase.GRADIENT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EXCHANGE)
SPEEDS = {  # of the newest record
    "step_seconds": "{step_seconds:.3g} s/step",
    "labels_per_second": "{labels_per_second:,.0f} labels/s",
    "learning_rate": "learning rate {learning_rate:.1e}",
    "grad_norm": "gradient norm {grad_norm:.2f}",
}
STAGE_MODULE = re.compile(r"(safetrain\.)?stages\.\w+")


class State(enum.Enum):
    """What the run is doing, or how it ended."""

    NOTHING = "no training"
    STAGE = "no training now"  # another stage of the pipeline runs
    TRAINING = "training"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"  # on request, and saved
    DIED = "died"
    GONE = "gone"  # together with its supervisor
    LEFT = "not running"  # unfinished, for an unknown reason

    @property
    def is_running(self) -> bool:
        """Whether training, or the pipeline before or after it, is running."""
        return self in (State.STAGE, State.TRAINING, State.PAUSED)


@dataclass(frozen=True)
class MonitorView:
    """A run, and what follows from its records."""

    run: Run
    state: State
    stage: str  # stage of the pipeline that runs instead of training
    left_seconds: float | None
    available_bytes: int  # on the machine

    @property
    def step(self) -> int:
        """Number of updates made, also from the flight recorder: metrics are written less often."""
        recorded = [record.work.step - (record.phase in IN_UPDATE) for record in self.run.flight[-1:]]
        return max([0, *recorded, *(record.step for record in self.run.steps[-1:])])

    @property
    def verdict(self) -> PostMortem | None:
        """Why this run ended."""
        return self.run.postmortem if self.state in (State.DIED, State.STOPPED) else None

    @property
    def stopped_early(self) -> bool:
        """Whether a finished training run ended because validation no longer improved."""
        summary = self.run.summary
        return self.state is State.FINISHED and summary is not None and summary.stopped_early

    @property
    def next_command(self) -> str:
        """Command to continue or to learn more; empty if there is nothing to do."""
        if self.verdict is not None:
            return self.verdict.next_command
        finished = "safetrain result" if self.run.evaluation is not None else MEASURE
        return {State.GONE: "safetrain diagnose", State.FINISHED: finished}.get(self.state, "")


def look_at(reader: RunReader) -> MonitorView:
    """Read the run as it is now; if it is not in progress, find the stage of the pipeline that is."""
    run = reader.read()
    stage = "" if run.is_running else running_stage(reader.output.resolve().parent)
    return view_of(run, stage, psutil.virtual_memory().available)


def view_of(run: Run, stage: str = "", available_bytes: int = 0) -> MonitorView:
    """Return what the monitor shows of a run. ``stage``: from running_stage; ``available_bytes``: free memory."""
    state = state_of(run, stage)
    is_before = state is State.STAGE and stage in BEFORE_TRAINING
    if is_before or is_starting(run):
        run = replace(run, flight=(), header=None)
    marks = [entry.event for entry in run.journal if isinstance(entry.event, Started | Begun)]
    if is_before or (marks and isinstance(marks[-1], Started)):  # so do the metrics
        run = replace(run, steps=(), journal=() if is_before else since_start(run.journal))
    left = time_left(run.journal, run.read_at_monotonic_seconds) if state is State.TRAINING else None
    return MonitorView(run, state, stage, left, available_bytes)


def is_starting(run: Run) -> bool:
    """Whether the recorder still has an earlier process than the one that is running."""
    if run.marker is None or not run.is_running:
        return False
    return run.header is None or not run.flight or run.header.started_seconds < run.marker.started_seconds


def running_stage(project: Path) -> str:
    """Find the stage of the pipeline that is running in this project; empty if none is."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            module = next((word for word in process.cmdline() if STAGE_MODULE.fullmatch(word)), "")
            if module and Path(process.cwd()) == project:
                return module.rpartition(".")[2]
    return ""


def losses_of(steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Losses in nats per label or pair, with the steps of the last and the best validation."""
    train, valid = points_of(steps, "train_loss"), points_of(steps, "valid_loss")
    best = min((point for point in valid if point[0]), key=lambda point: point[1], default=(None, None))
    last = valid[-1] if valid else (None, None)
    return {"train": train[-1][1] if train else None, "valid": last[1], "valid_step": last[0], "best": best[1],
            "best_step": best[0], "base": valid[0][1] if valid and not valid[0][0] else None}  # fmt: skip


def speed_of(steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Speed, epoch, learning rate and gradient norm from the newest metrics record; None if unknown."""
    if not steps:
        return dict.fromkeys(("epoch", *SPEEDS))
    before, last = steps[-2:][0], steps[-1]
    count = last.step - before.step
    numbers = {name: getattr(last, name, None) for name in ("epoch", *SPEEDS)}
    numbers["step_seconds"] = (last.elapsed_seconds - before.elapsed_seconds) / count if count > 0 else None
    return {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}


def batch_parts(job: TrainJob) -> tuple[str, ...]:
    """Describe the batch, ``batch size 2 x accumulation 8 (planned 4 x 4)``, and the settings that did not fit."""
    shape, planned = job.settings, f"planned {job.rungs[0].failed.batch_text}" if job.rungs else "as planned"
    now = f"batch size {shape.batch_size} x accumulation {shape.gradient_accumulation} ({planned})"
    return (now, *rungs_of_job(job)[-1:], *job.gpu_rungs[-1:])


def state_of(run: Run, stage: str = "") -> State:
    """The state to show: a run in progress, else another stage in progress, else how the last training run ended."""
    if run.marker is not None and run.is_running:
        return State.PAUSED if run.worker_lives and run.worker_is_stopped and not is_starting(run) else State.TRAINING
    if stage:
        return State.STAGE
    has_ended = any(isinstance(entry.event, Finished) for entry in since_start(run.journal))
    if run.marker is not None and not (run.is_finished and has_ended):
        return State.GONE
    verdict, started = run.postmortem, run.header.started_seconds if run.header is not None else 0.0
    if verdict is not None and verdict.ended_seconds >= started and not verdict.went_on:
        return State.STOPPED if verdict.cause == "stopped" else State.DIED
    if run.is_finished or (run.state is None and run.summary is not None):
        return State.FINISHED
    return State.LEFT if run.flight or run.steps or run.state is not None else State.NOTHING


def since_start(journal: tuple[JournalEntry, ...]) -> tuple[JournalEntry, ...]:
    """Return the entries of the newest training process."""
    starts = [number for number, entry in enumerate(journal) if isinstance(entry.event, Started)]
    return journal[starts[-1] :] if starts else journal
