"""The monitor: what a run is doing or how it ended, as a screen that rich lays out, or as a plain line."""

import enum
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from safetrain.core.events import Begun, Finished, JournalEntry, Started
from safetrain.core.formatting import counted, duration_text, printable, size_text
from safetrain.core.lock import is_held
from safetrain.core.params_file import RUN_LOCK
from safetrain.core.postmortem import PostMortem, describe_rows
from safetrain.core.recorder import Phase
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.search import TRAINING, Search
from safetrain.core.storage import paths
from safetrain.watch.charts import points_of, rungs_of
from safetrain.watch.progress import MEASURE, clock_text, describe_pairs, time_left, time_left_text
from safetrain.watch.run_folder import Run, RunReader
from safetrain.watch.standings import table_of

IN_UPDATE = (Phase.GRADIENT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EXCHANGE)
PHASES = {Phase.WAIT: "waiting for room on the disk", Phase.VERIFY: "checking the adapter"}  # where the name is no word
STAGE_MODULE = re.compile(r"(safetrain\.)?stages\.\w+")
LOOK = "look: "  # in front of what needs attention


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
    search: Search | None = None  # whose candidate this run is

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
    def next_command(self) -> str:
        """Command to continue or to learn more; empty if there is nothing to do."""
        if self.verdict is not None:
            return self.verdict.next_command
        finished = "safetrain result" if self.run.evaluation is not None else MEASURE
        return {State.GONE: "safetrain diagnose", State.FINISHED: finished}.get(self.state, "")


def look_at(reader: RunReader) -> MonitorView:
    """Read the run as it is now; if it is not in progress, find the stage of the pipeline that is."""
    search, available = reader.search(), psutil.virtual_memory().available
    training = [each.name for each in search.candidates if each.state == TRAINING] if search is not None else []
    if training and (candidate := RunReader(reader.output / paths.SEARCH.name / training[0]).read()).is_running:
        return replace(view_of(candidate, available_bytes=available), search=search)
    project = reader.output.resolve().parent
    if search is not None and not search.is_finished and is_held(project / RUN_LOCK):  # between two candidates
        return replace(view_of(Run(read_at_seconds=time.time()), "search", available), search=search)
    run = reader.read()
    stage = "" if run.is_running else running_stage(project)
    return view_of(run, stage, available)


def view_of(run: Run, stage: str = "", available_bytes: int = 0) -> MonitorView:
    """Return what the monitor shows of a run. ``stage``: from running_stage; ``available_bytes``: free memory."""
    state = state_of(run, stage)
    is_before = state is State.STAGE and stage in ("validate_data", "preflight", "recommend_config")
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


def rows_of(view: MonitorView) -> list[tuple[str, str]]:
    """Names and texts of the screen's rows, the most important first."""
    if view.state is State.NOTHING:
        return [("next", "nothing has been trained here yet: safetrain run")]
    run, saved, rows = view.run, view.run.checkpoint, list[tuple[str, str]]()
    verdict = describe_rows(view.verdict) if view.verdict is not None else []
    rows += [*verdict[:1], ("next", view.next_command), *verdict[1:]]
    doing = "planning or comparing candidates" if view.search else f"stage {view.stage} of the pipeline"
    rows.append(("doing", doing if view.state is State.STAGE else ""))
    if run.flight and not verdict and view.state not in (State.FINISHED, State.STAGE):
        rows.append(("doing" if view.state.is_running else "last", _phase_text(run)))
    rows.append(("loss", _loss_text(run.steps)))
    pairs = next((record for record in reversed(run.steps) if record.valid_accuracy is not None), None)
    rows.append(("pairs", ", ".join(describe_pairs(pairs))))
    if not verdict:
        rows.append(("speed", _speed_text(run.steps) if view.state.is_running else ""))
        rows += _memory_rows(view)
        if (job := run.job) is not None:
            shape, planned = job.settings, f"planned {job.rungs[0].failed.batch_text}" if job.rungs else "as planned"
            batch = f"batch size {shape.batch_size} x accumulation {shape.gradient_accumulation} ({planned})"
            lowered = [*rungs_of(run)[-1:], *job.gpu_rungs[-1:]]
            rows.append(("batch", "; ".join([LOOK * bool(lowered) + batch, *lowered])))
    age = duration_text(max(0.0, run.read_at_seconds - saved.saved_seconds)) if saved else ""
    rows.append(("saved", f"step {saved.step}, {age} ago" if saved else "no checkpoint yet"))
    rows += [("unread", f"{LOOK}{file}: {reason}") for file, reason in run.unreadable]
    return [(name, printable(text)) for name, text in rows if text]


def _phase_text(run: Run) -> str:
    last = run.flight[-1]
    text = PHASES.get(last.phase, last.phase_label) + (f" of step {last.work.step}" if last.work.step else "")
    if run.is_running and run.worker_lives:
        text += f" for {duration_text(max(0.0, run.read_at_monotonic_seconds - last.monotonic_seconds))}"
    rows, tokens = last.work.rows, last.work.tokens
    return text + (f", {counted(rows, 'row')}, {counted(tokens, 'token')}" if rows else "")


def _loss_text(steps: Sequence[StepRecord]) -> str:
    """The last training and validation loss, the best validation, and the base model's loss."""
    train, valid = points_of(steps, "train_loss"), points_of(steps, "valid_loss")
    parts = [f"train {loss:.4f}" for _, loss in train[-1:]] + [f"valid {loss:.4f}" for _, loss in valid[-1:]]
    best = sorted((loss, step) for step, loss in valid if step)[:1]
    parts += [f"best {loss:.4f} (step {step:.0f})" for loss, step in best]
    return ", ".join(parts + [f"base {loss:.4f}" for step, loss in valid[:1] if not step])


def _speed_text(steps: Sequence[StepRecord]) -> str:
    if not steps:
        return ""
    before, last = steps[-2:][0], steps[-1]
    count = last.step - before.step
    numbers = {
        "{:.3g} s/step": (last.elapsed_seconds - before.elapsed_seconds) / count if count > 0 else None,
        "{:,.0f} labels/s": last.labels_per_second,
        "learning rate {:.1e}": last.learning_rate,
        "gradient norm {:.2f}": last.grad_norm,
    }
    known = ((form, number) for form, number in numbers.items() if number is not None and math.isfinite(number))
    return ", ".join(form.format(number) for form, number in known)


def _memory_rows(view: MonitorView) -> list[tuple[str, str]]:
    run, job, marker = view.run, view.run.job, view.run.marker
    used = run.worker_footprint_bytes or max((record.footprint_bytes for record in run.flight[-1:]), default=0)
    limit = marker.limit_bytes if marker is not None else 0
    process = LOOK if used > 0.9 * limit > 0 else ""
    process += f"rank 0 of {job.ranks}: " if job is not None and job.ranks > 1 else ""
    process += size_text(used)
    process += f" of {size_text(limit)} ({marker.limit_name})" if marker is not None and limit else ""
    process += f"; machine: {size_text(view.available_bytes)} free" if view.available_bytes else ""
    peaks = [record.peak_bytes for record in run.flight]
    peak = max([*peaks, *(record.peak_memory_bytes for record in run.steps[-1:])], default=0)
    predicted = max((record.predicted_peak_bytes for record in run.flight), default=0)
    budget = job.memory_budget.mlx_bytes if job is not None else 0
    sign = LOOK if peak > 1.05 * predicted > 0 or peak > 0.9 * budget > 0 else ""
    mlx = f"{sign}peak {size_text(peak)}, predicted {size_text(predicted)}, budget {size_text(budget)}"
    return [("process", process if used else ""), ("mlx", mlx if peak else "")]


def place_lines(view: MonitorView) -> list[str]:
    """Return ``step 120 of 312, 38 %, epoch 1.15`` and ``about 3 min left, until 14:32``, as far as known."""
    total = view.run.begun.total_steps if view.run.begun is not None else 0
    parts = [f"step {view.step}"] if view.step else []
    parts = [f"step {view.step} of {total}", f"{100 * view.step / total:.0f} %"] if total else parts
    parts += [f"epoch {record.epoch:.2f}" for record in view.run.steps[-1:]]
    left = time_left_text(view.left_seconds, view.run.read_at_seconds) if view.left_seconds is not None else ""
    return [text for text in (", ".join(parts), left) if text]


def plain_line(view: MonitorView) -> str:
    """Return the view as one line, with the most important values first."""
    start = f"{clock_text(view.run.read_at_seconds, view.run.read_at_seconds)}  {view.state.value}"
    if view.search is not None:
        start += f" a search's candidate, {duration_text(view.search.spent_seconds)} of {view.search.minutes:g} min"
    parts = [start, *place_lines(view), *(f"{name}: {text}" for name, text in rows_of(view))]
    return "  ".join(" ".join(part.split()) for part in parts)


def screen_of(view: MonitorView) -> Group:
    """Lay the view out for a terminal, the most important rows first."""
    run, job = view.run, view.run.job
    names = [job.base if job is not None else "", run.header.device if run.header is not None else ""]
    names += [f"{job.ranks} ranks"] if job is not None and job.ranks > 1 else []
    is_bad = view.state in (State.DIED, State.GONE)
    state = Text(f" {view.state.value.upper()} ", style="bold reverse" if is_bad else "reverse")
    words = f"  {clock_text(run.read_at_seconds, run.read_at_seconds)}  {printable('  '.join(filter(None, names)))}"
    head = Text.assemble(state, words, no_wrap=True, overflow="ellipsis")
    lines: list[RenderableType] = [head, *map(Text, place_lines(view))]
    if run.begun is not None:
        bar = ProgressBar(run.begun.total_steps, view.step, style="dim", complete_style="bold")
        lines.append(Padding(bar, 0))  # ends the line
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows_of(view):
        table.add_row(name, Text(text, style="bold" if text.startswith(LOOK) else ""))
    return Group(*lines, table, *([table_of(view.search)] if view.search is not None else []))
