"""What a run is doing, or how it ended, from its records: its state, and how old its current phase is."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from safetrain.core.events import Finished, JournalEntry, Started
from safetrain.core.recorder import FlightRecord, Phase, allowed_seconds
from safetrain.core.run_folder import Run

SLOW_TIMES, SLOW_SECONDS = 3.0, 5.0  # a phase is slow that exceeds both: times its longest so far, seconds
FIRST_SECONDS = 300.0  # the same for a phase's first time


class State(enum.Enum):
    """What the run is doing, or how it ended."""

    NOTHING = "no training"
    STAGE = "no training now"  # another stage of the pipeline runs
    STARTING = "starting"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    WAITING = "waiting for the disk"
    VERIFYING = "checking the adapter"
    PAUSED = "paused"
    HUNG = "hung"
    ENDING = "ending"  # the process is gone, its supervisor finds out why
    FINISHED = "finished"
    STOPPED = "stopped"  # on request, and saved
    DIED = "died"
    GONE = "gone"  # together with its supervisor
    LEFT = "not running"  # unfinished, for an unknown reason

    @property
    def is_running(self) -> bool:
        """Whether a training, or the pipeline before or after it, is at work."""
        return self not in ENDED


ENDED = (State.NOTHING, State.FINISHED, State.STOPPED, State.DIED, State.GONE, State.LEFT)
RUNNING_STATES = {
    Phase.EVALUATE: State.EVALUATING,
    Phase.SAVE: State.SAVING,
    Phase.WAIT: State.WAITING,
    Phase.VERIFY: State.VERIFYING,
    Phase.FINISH: State.SAVING,
    **dict.fromkeys((Phase.START, Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME), State.LOADING),
}


@dataclass(frozen=True)
class PhaseAge:
    """The phase that was recorded last, over all its micro-batches."""

    label: str
    step: int  # 0: before the first
    micro_batch: int
    rows: int
    tokens: int
    age_seconds: float  # since it began; of a training that has ended, until its end
    longest_seconds: float | None  # that this phase has taken so far; None: its first time
    is_slow: bool  # far longer than before
    is_silent: bool  # without a record for so long that the supervisor ends it


def state_of(run: Run, stage: str = "") -> State:
    """A training at work comes first, then another stage at work, then how the last training ended."""
    if run.marker is not None and run.is_running:
        is_new = run.header is not None and run.header.started_seconds >= run.marker.started_seconds
        return _running_state(run) if is_new and run.flight else State.STARTING
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


def _running_state(run: Run) -> State:
    if not run.processes.worker_lives:
        return State.ENDING
    if run.processes.worker_is_stopped:
        return State.PAUSED
    if phase_age(run).is_silent:
        return State.HUNG
    phase = run.flight[-1].phase
    if phase is Phase.LOAD_MODEL and any(record.phase is Phase.VERIFY for record in run.flight):
        return State.VERIFYING  # which loads the base again
    return RUNNING_STATES.get(phase, State.TRAINING)


def since_start(journal: tuple[JournalEntry, ...]) -> tuple[JournalEntry, ...]:
    """The entries of the newest process."""
    starts = [number for number, entry in enumerate(journal) if isinstance(entry.event, Started)]
    return journal[starts[-1] :] if starts else journal


def phase_age(run: Run) -> PhaseAge:
    """How long the phase of the newest flight record lasts, and whether that is too long."""
    last, floor = run.flight[-1], run.marker.hang_seconds if run.marker is not None else 0.0
    starts = [next(records) for _, records in groupby(run.flight, lambda record: (record.phase, record.work.step))]
    longest = _longest_seconds(starts, lambda record: record.phase)
    silence = _silence_seconds(run)
    age = last.monotonic_seconds - starts[-1].monotonic_seconds + silence
    allowed = None  # a process that is stopped or gone does not hang
    if run.is_running and run.processes.worker_lives and not run.processes.worker_is_stopped:
        longest_record = _longest_seconds(run.flight, lambda record: (record.phase, record.edge))
        allowed = allowed_seconds(last, floor, longest_record)
    return PhaseAge(
        label=last.phase_label,
        step=last.work.step,
        micro_batch=last.work.micro_batch,
        rows=last.work.rows,
        tokens=last.work.tokens,
        age_seconds=age,
        longest_seconds=longest,
        is_slow=allowed is not None
        and age > (FIRST_SECONDS if longest is None else max(SLOW_SECONDS, SLOW_TIMES * longest)),
        is_silent=allowed is not None and floor > 0 and silence > max(floor, allowed),
    )


def _silence_seconds(run: Run) -> float:
    """Time since the newest flight record; of a training that has ended, until its end."""
    last, verdict = run.flight[-1], run.postmortem
    if run.is_running and run.processes.worker_lives:
        return max(0.0, run.read_at_monotonic_seconds - last.monotonic_seconds)
    if verdict is not None and verdict.ended_seconds >= last.wall_seconds:
        return verdict.ended_seconds - last.wall_seconds
    return max(0.0, run.read_at_seconds - last.wall_seconds)


def _longest_seconds(records: Sequence[FlightRecord], kind: Callable[[FlightRecord], object]) -> float | None:
    """The longest time from a record of the last one's kind to the next record."""
    same = ((before, after) for before, after in pairwise(records) if kind(before) == kind(records[-1]))
    return max((after.monotonic_seconds - before.monotonic_seconds for before, after in same), default=None)
