"""From the records of a run to what a monitor shows of it: one pure function. How it is drawn is decided elsewhere."""

import dataclasses
import enum
from dataclasses import dataclass

from safetrain.core.formatting import counted
from safetrain.core.protocol.flight import Edge, FlightRecord, Phase
from safetrain.core.protocol.journal import BEGUN, DIED, FAILED, FINISHED, MARK, SAID, STARTED, Entry
from safetrain.core.records.job import memory_shape
from safetrain.core.records.postmortem import PostMortem
from safetrain.watch.monitor_records import Curves, RunRecords
from safetrain.watch.monitor_state import PhaseAge, State, phase_age_of, state_of
from safetrain.watch.time_left import Mark, TimeLeft, time_left

MOST_EVENTS = 30
BEFORE_TRAINING = ("validate_data", "preflight", "recommend_config")
STANDING_STILL = (State.STAGE, State.PAUSED, State.HUNG, State.ENDING)  # nobody knows when they end
BEFORE = {STARTED: "a training process is started", FINISHED: "finished", DIED: "verdict: ", FAILED: "it says: "}


@dataclass(frozen=True)
class Progress:
    """How far it is; None for what is not known."""

    step: int
    total_steps: int | None
    epoch: float | None
    left: TimeLeft | None
    step_seconds: float | None  # of the recent updates
    labels_per_second: float | None
    learning_rate: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Losses:
    """In nats per label."""

    train: float | None
    valid: float | None
    valid_step: int | None
    best: float | None
    best_step: int | None
    base: float | None  # before the first update


@dataclass(frozen=True)
class Memory:
    """In bytes, 0 for what is not known."""

    mlx_active_bytes: int
    mlx_peak_bytes: int
    mlx_cache_bytes: int
    predicted_peak_bytes: int  # of mlx
    mlx_budget_bytes: int  # the most that it may take; at mlx's own limit, the predicted peak, it only frees its cache
    process_bytes: int
    process_limit_bytes: int
    process_limit_name: str
    available_bytes: int  # on the machine


@dataclass(frozen=True)
class Checkpoints:
    """What is saved."""

    last_step: int | None
    last_age_seconds: float | None
    last_folder: str


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    wall_seconds: float
    text: str


@dataclass(frozen=True)
class MonitorView:
    """What is shown. Everything in it is a number or a text; ``curves`` are drawn, and are not in the lines."""

    wall_seconds: float
    state: State
    model: str
    device: str
    pid: int
    phase: PhaseAge | None
    progress: Progress
    losses: Losses
    memory: Memory
    checkpoints: Checkpoints
    rung: int
    rung_parts: tuple[str, ...]  # what it goes on with, and what did not fit
    stopped_early: bool
    verdict: PostMortem | None
    next_command: str  # to continue, or to learn more; empty where there is nothing to do
    events: tuple[Event, ...]  # oldest first
    curves: Curves
    curves_are_old: bool  # of the training before: this one has not begun yet


def view_of(records: RunRecords) -> MonitorView:
    """What is shown of these records."""
    state, header, stage = state_of(records), records.header, records.machine.stage
    if state is State.STAGE and stage is not None and stage.name in BEFORE_TRAINING:  # what is there is of another run
        records = dataclasses.replace(records, flight=(), journal=(), job=None, curves=Curves())
    entries = [entry.kind for entry in records.journal if entry.kind in (STARTED, BEGUN)]
    old = bool(entries) and entries[-1] != BEGUN  # it is being loaded, or ended before it began
    verdict = records.verdict if state in (State.DIED, State.STOPPED) else None
    return MonitorView(
        wall_seconds=records.machine.wall_seconds,
        state=state,
        model=records.job.base if records.job is not None else "",
        device=header.device if header is not None else "",
        pid=header.pid if header is not None and records.machine.worker_lives else 0,
        phase=phase_age_of(records) if state is not State.NOTHING else None,
        progress=_progress(records, old=old, goes_on=state.is_running and state not in STANDING_STILL),
        losses=_losses(records.curves),
        memory=_memory(records),
        checkpoints=_checkpoints(records),
        rung=len(records.job.rungs) + len(records.job.gpu_rungs) if records.job is not None else 0,
        rung_parts=_rung_parts(records),
        stopped_early=state is State.FINISHED and records.summary is not None and records.summary.stopped_early,
        verdict=verdict,
        next_command=_next_command(records, state),
        events=tuple(_event(entry) for entry in records.journal if entry.kind != MARK)[-MOST_EVENTS:],
        curves=records.curves,
        curves_are_old=old,
    )


def _progress(records: RunRecords, *, old: bool, goes_on: bool) -> Progress:
    last, machine, job = records.curves.last, records.machine, records.job
    begun = next((entry for entry in reversed(records.journal) if entry.kind == BEGUN), None)
    total = begun.total_steps if begun is not None and not old else None
    step = max(last.step if last is not None and not old else 0, _steps_made(records.flight))
    marks = [] if old else _marks(records.journal, begun)
    left = None
    if goes_on and total and job is not None:
        left = time_left(marks, total, job.settings.eval_steps, machine.monotonic_seconds)
    shown = None if old else last
    return Progress(
        step=step,
        total_steps=total,
        epoch=shown.epoch if shown is not None else None,
        left=left,
        step_seconds=_step_seconds(records.flight),
        labels_per_second=records.curves.labels_per_second[-1].value
        if records.curves.labels_per_second and not old
        else None,
        learning_rate=shown.learning_rate if shown is not None and shown.step else None,
        grad_norm=shown.grad_norm if shown is not None else None,
    )


def _steps_made(flight: tuple[FlightRecord, ...]) -> int:
    """Updates that are applied, by the recorder, which knows before the metrics do."""
    for record in reversed(flight):
        if record.phase is Phase.OPTIMIZER and record.edge is Edge.AFTER:
            return record.work.step
        if record.phase in (Phase.SAVE, Phase.EVALUATE):
            return record.work.step
    return 0


def _marks(journal: tuple[Entry, ...], begun: Entry | None) -> list[Mark]:
    """Of the process at hand; a run that is continued has no time of its beginning."""
    if begun is None:
        return []
    found = [Mark(begun.monotonic_seconds, 0, 0.0, 0)] if begun.step == 0 else []
    later = (e for e in journal if e.kind == MARK and e.monotonic_seconds >= begun.monotonic_seconds)
    return [*found, *(Mark(e.monotonic_seconds, e.step, e.elapsed_seconds, e.validations) for e in later)]


def _step_seconds(flight: tuple[FlightRecord, ...]) -> float | None:
    """From the end of one update to the end of another, validations and saving in between left out."""
    ends = [r for r in flight if r.phase is Phase.OPTIMIZER and r.edge is Edge.AFTER][-9:]
    begins = {r.work.step: r for r in reversed(flight) if r.phase is Phase.GRADIENT and r.edge is Edge.BEFORE}
    took = [end.monotonic_seconds - begins[end.work.step].monotonic_seconds for end in ends if end.work.step in begins]
    return sum(took) / len(took) if took else None


def _losses(curves: Curves) -> Losses:
    train, valid, best, base = curves.last_train, curves.last_valid, curves.best, curves.base
    return Losses(
        train=train.value if train else None,
        valid=valid.value if valid else None,
        valid_step=valid.step if valid else None,
        best=best.value if best else None,
        best_step=best.step if best else None,
        base=base.value if base else None,
    )


def _memory(records: RunRecords) -> Memory:
    last, marker, machine, job = records.flight[-1:], records.marker, records.machine, records.job
    allocator = last[0].allocator if last else None
    predicted = max((record.predicted_peak_bytes for record in records.flight), default=0)
    peaks = [record.allocator.peak_bytes for record in records.flight]
    peaks += [records.curves.last.peak_memory_bytes] if records.curves.last is not None else []
    footprint = machine.footprint_bytes or (last[0].footprint_bytes if last else 0)
    verdict = records.verdict
    process_limit, name = (marker.limit_bytes, marker.limit_name) if marker is not None else (0, "")
    if not process_limit and verdict is not None:
        process_limit, name = verdict.limit_bytes, verdict.limit_name
    return Memory(
        mlx_active_bytes=allocator.active_bytes if allocator else 0,
        mlx_peak_bytes=max(peaks, default=0),
        mlx_cache_bytes=allocator.cache_bytes if allocator else 0,
        predicted_peak_bytes=predicted,
        mlx_budget_bytes=job.memory_budget.mlx_bytes if job is not None else 0,
        process_bytes=footprint,
        process_limit_bytes=process_limit or machine.total_bytes,
        process_limit_name=name or "the machine's memory",
        available_bytes=machine.available_bytes,
    )


def _checkpoints(records: RunRecords) -> Checkpoints:
    saved = records.saved
    if saved is None:
        return Checkpoints(None, None, "")
    return Checkpoints(saved.step, max(0.0, records.machine.wall_seconds - saved.wall_seconds), saved.folder)


def _rung_parts(records: RunRecords) -> tuple[str, ...]:
    job = records.job
    if job is None:
        return ()
    told = [f"{memory_shape(job.settings).window} rows per update"]
    if job.rungs:
        before = job.rungs[-1]
        told.append(f"{before.failed.window} did not fit at step {before.at_step}: {before.evidence}")
    return (*told, *job.gpu_rungs[-1:])


def _next_command(records: RunRecords, state: State) -> str:
    if state in (State.DIED, State.STOPPED) and records.verdict is not None:
        return records.verdict.next_command
    if state is State.GONE:
        return "safetrain diagnose"
    return "safetrain result" if state is State.FINISHED else ""


def _event(entry: Entry) -> Event:
    text = entry.text
    if entry.kind == BEGUN:
        start = f"goes on from step {entry.step}" if entry.step else "begins"
        text = f"{start}, {counted(entry.total_steps, 'update')}: {text}"
    elif entry.kind != SAID:
        text = BEFORE.get(entry.kind, "") + text
    return Event(entry.wall_seconds, text)


class Level(enum.IntEnum):
    """How much something needs a person's attention."""

    FINE = 0
    LOOK = 1
    WRONG = 2


def memory_level(used_bytes: int, limit_bytes: int) -> Level:
    """Of memory beside a limit."""
    if not used_bytes or not limit_bytes:
        return Level.FINE
    share = used_bytes / limit_bytes
    return Level.WRONG if share > 1.0 else Level.LOOK if share > 0.9 else Level.FINE
