"""What there is to know of a run from outside: its records and a few readings of the machine, as values."""

from dataclasses import dataclass

from safetrain.core.protocol.flight import FlightHeader, FlightRecord
from safetrain.core.protocol.journal import Entry
from safetrain.core.protocol.marker import RunMarker
from safetrain.core.records.job import TrainJob
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.postmortem import PostMortem
from safetrain.watch.monitor_curves import Point


@dataclass(frozen=True)
class SummaryTold:
    """The part of training_summary.json that is shown."""

    steps: int
    best_step: int
    best_valid_loss: float
    base_valid_loss: float
    stopped_early: bool
    skipped_updates: int


@dataclass(frozen=True)
class Standing:
    """The part of training_state.json that is shown."""

    finished: bool
    step: int


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint."""

    step: int
    wall_seconds: float
    folder: str


@dataclass(frozen=True)
class Curves:
    """What training_metrics.csv has, in a bounded number of points."""

    train_loss: tuple[Point, ...] = ()
    valid_loss: tuple[Point, ...] = ()
    learning_rate: tuple[Point, ...] = ()
    labels_per_second: tuple[Point, ...] = ()
    footprint_bytes: tuple[Point, ...] = ()
    peak_memory_bytes: tuple[Point, ...] = ()
    last: StepRecord | None = None
    last_train: Point | None = None
    last_valid: Point | None = None
    best: Point | None = None  # of the validations after the first update
    base: Point | None = None  # before it
    damaged_lines: int = 0
    unread_bytes: int = 0


@dataclass(frozen=True)
class StageRuns:
    """A stage of the pipeline that runs; no name between two of them."""

    name: str
    age_seconds: float


@dataclass(frozen=True)
class MachineNow:
    """Readings of this moment."""

    wall_seconds: float
    monotonic_seconds: float
    boot_id: str
    supervisor_lives: bool
    worker_lives: bool
    worker_is_stopped: bool  # by Ctrl-Z
    footprint_bytes: int  # of the worker; 0 without one
    total_bytes: int
    available_bytes: int
    stage: StageRuns | None = None  # asked only where no training runs


@dataclass(frozen=True)
class RunRecords:
    """Everything that is read; what is absent, or cannot be read, is None or empty."""

    machine: MachineNow
    marker: RunMarker | None = None
    header: FlightHeader | None = None
    flight: tuple[FlightRecord, ...] = ()
    journal: tuple[Entry, ...] = ()
    job: TrainJob | None = None
    curves: Curves = Curves()
    saved: Saved | None = None
    standing: Standing | None = None
    summary: SummaryTold | None = None
    verdict: PostMortem | None = None
