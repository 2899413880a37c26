"""What a run is doing, and for how long, by its records: also when it hangs, or nobody is left to say."""

import enum
from dataclasses import dataclass
from itertools import pairwise

from safetrain.core.protocol.flight import Edge, FlightRecord, Phase
from safetrain.core.protocol.hang import allowed_seconds
from safetrain.watch.monitor_records import RunRecords

SLOW_TIMES, SLOW_SECONDS = 3.0, 5.0  # beyond both, a phase takes longer than it did
FIRST_SECONDS = 300.0  # of a phase that was not seen before


class State(enum.Enum):
    """In a word or two."""

    NOTHING = "no training"
    STAGE = "no training now"  # another stage of the pipeline runs
    STARTING = "starting"
    LOADING = "loading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    WAITING = "waiting for the disk"
    PROVING = "proving the adapter"
    PAUSED = "paused"
    HUNG = "hung"
    ENDING = "ending"  # the process is gone, its supervisor is finding out why
    FINISHED = "finished"
    STOPPED = "stopped"  # somebody asked for it; it is saved
    DIED = "died"
    GONE = "gone"  # its supervisor too
    LEFT = "not running"  # unfinished, and nothing says why

    @property
    def is_running(self) -> bool:
        """Whether a training is under way."""
        return self in RUNNING


RUNNING = frozenset(
    (
        State.STAGE, State.STARTING, State.LOADING, State.TRAINING, State.EVALUATING, State.SAVING, State.WAITING,
        State.PROVING, State.PAUSED, State.HUNG, State.ENDING,
    )
)  # fmt: skip
OF_PHASE = {
    Phase.START: State.LOADING,
    Phase.LOAD_DATA: State.LOADING,
    Phase.LOAD_MODEL: State.LOADING,
    Phase.RESUME: State.LOADING,
    Phase.EVALUATE: State.EVALUATING,
    Phase.SAVE: State.SAVING,
    Phase.WAIT: State.WAITING,
    Phase.FINISH: State.SAVING,
}


@dataclass(frozen=True)
class PhaseAge:
    """What is being done, and since when nothing else was recorded."""

    label: str
    step: int  # 0: before the first
    micro_batch: int
    rows: int
    tokens: int
    age_seconds: float  # at the end of a training that is no more, how long before that
    longest_seconds: float | None  # that this has taken in what the recorder still has; None: its first time
    is_slow: bool  # longer than ever, by far
    is_silent: bool  # so long that the supervisor ends it


def state_of(records: RunRecords) -> State:
    """By the marker while a training runs, then by another stage that runs, then by what the training has left."""
    machine = records.machine
    if records.marker is not None:
        if machine.worker_lives:
            return _running_state(records)
        if machine.supervisor_lives:
            return State.ENDING if records.flight else State.STARTING
    if machine.stage is not None:
        return State.STAGE
    ended = _finished(records) and records.flight and records.flight[-1].phase is Phase.FINISH
    if records.marker is not None and not ended:
        return State.GONE
    started = records.header.started_seconds if records.header is not None else 0.0
    verdict = records.verdict
    if verdict is not None and verdict.ended_seconds >= started and not verdict.went_on:
        return State.STOPPED if verdict.cause == "stopped" else State.DIED
    if _finished(records):
        return State.FINISHED
    if records.flight or records.curves.last is not None or records.standing is not None:
        return State.LEFT
    return State.NOTHING


def _running_state(records: RunRecords) -> State:
    if records.machine.worker_is_stopped:
        return State.PAUSED
    if not records.flight:
        return State.STARTING
    last = records.flight[-1]
    age = phase_age_of(records)
    if age is not None and age.is_silent:
        return State.HUNG
    if last.phase in (Phase.LOAD_MODEL, Phase.EVALUATE) and _is_proof(records.flight):
        return State.PROVING
    return OF_PHASE.get(last.phase, State.TRAINING) if last.edge is Edge.BEFORE else _after(last)


def _after(last: FlightRecord) -> State:
    """Between two phases: the next update is made ready."""
    loading = last.phase in (Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME)
    return State.LOADING if loading else State.TRAINING


def _is_proof(flight: tuple[FlightRecord, ...]) -> bool:
    """What is opened or computed after the last checkpoint is the proof: validation comes before saving."""
    last = flight[-1]
    if last.work.step == 0:
        return False
    if last.phase is Phase.LOAD_MODEL:
        return True
    saved = next((record for record in reversed(flight) if record.phase is Phase.SAVE), None)
    return saved is not None and saved.work.step == last.work.step


def _finished(records: RunRecords) -> bool:
    return records.standing is not None and records.standing.finished


def phase_age_of(records: RunRecords) -> PhaseAge | None:
    """Of the newest record; None before the first. Where another stage runs, that one."""
    stage = records.machine.stage
    if stage is not None:
        label = f"the stage {stage.name} runs" if stage.name else "between two stages"
        return PhaseAge(label, 0, 0, 0, 0, stage.age_seconds, None, is_slow=False, is_silent=False)
    if not records.flight:
        return None
    last, machine, marker = records.flight[-1], records.machine, records.marker
    end_seconds = machine.wall_seconds
    verdict = records.verdict
    alive = machine.worker_lives
    if not alive and verdict is not None and verdict.ended_seconds >= last.wall_seconds:
        end_seconds = verdict.ended_seconds
    same_clock = alive and (marker is None or marker.boot_id == machine.boot_id)
    age = machine.monotonic_seconds - last.monotonic_seconds if same_clock else end_seconds - last.wall_seconds
    age = max(0.0, age)
    longest = longest_seconds(records.flight)
    usual = max(SLOW_SECONDS, SLOW_TIMES * longest) if longest is not None else FIRST_SECONDS
    floor = marker.hang_seconds if marker is not None else 0.0
    allowed = allowed_seconds(last, floor, longest)
    stopped = machine.worker_is_stopped
    return PhaseAge(
        label=last.phase.label if last.edge is Edge.BEFORE else f"after {last.phase.label}",
        step=last.work.step,
        micro_batch=last.work.micro_batch,
        rows=last.work.rows,
        tokens=last.work.tokens,
        age_seconds=age,
        longest_seconds=longest,
        is_slow=alive and not stopped and allowed is not None and age > usual,
        is_silent=alive and not stopped and allowed is not None and 0 < floor < age and age > allowed,
    )


def longest_seconds(flight: tuple[FlightRecord, ...]) -> float | None:
    """That what is being done now has taken before."""
    last = flight[-1]
    took = [
        after.monotonic_seconds - before.monotonic_seconds
        for before, after in pairwise(flight)
        if before.phase is last.phase and before.edge is last.edge
    ]
    return max(took) if took else None
