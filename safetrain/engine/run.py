"""A training run in memory: its parts, how it starts, and how it waits for free space on a full disk."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from safetrain.core.errors import FREE_AND_CONTINUE, DiskFullError, InterruptedRun
from safetrain.core.memory.terms import most_shards_of_whole
from safetrain.core.recorder import Phase, Recorder, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.run_state import KEPT_BESIDE, checkpoints_in, discard_run, remove_half_written
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.storage.files import DISK_FULL
from safetrain.core.storage.paths import SAMPLES
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.backend import allocator, device, set_limits
from safetrain.engine.batches import BatchLayout, Share, training_layout
from safetrain.engine.job import Job
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer, optimizer_of
from safetrain.engine.ranks import ALONE, Ranks, hand_out
from safetrain.engine.state import TrainState, best_file, checkpoint_bytes, load_checkpoint
from safetrain.engine.update import Gradients, Tracer, prepare
from safetrain.engine.weight_files import ADAPTER_FILE, save_adapter

WAIT_MINUTES = 30.0  # for space on a full disk
LOOK_SECONDS = 1.0
SPARE_BYTES = MIB = 2**20


@dataclass(frozen=True)
class Watcher:
    """How the loop is observed.

    ``begin`` is called once with earlier records, the step resumed from and a description of the adaptation; ``record``
    with all records after each new one; ``say`` with messages for people. ``stop`` is called between micro-batches and
    returns the signal that requests a stop, or 0. ``recorder`` gets each phase.
    """

    begin: Callable[[list[StepRecord], int, str], None]
    record: Callable[[list[StepRecord]], None]
    stop: Callable[[], int]
    recorder: Recorder
    say: Callable[[str], None] = lambda _text: None

    def quiet(self) -> "Watcher":
        """A copy that reports nothing, for ranks other than 0."""
        return dataclasses.replace(self, begin=lambda *_: None, record=lambda _: None, say=lambda _: None)


@dataclass(frozen=True)
class Disk:
    """The disk that a run writes to. If it is full, the run waits for free space instead of failing."""

    folder: Path
    watcher: Watcher

    def require(self, needed_bytes: int, what: str) -> None:
        """Raise DiskFullError before training starts if the first write would not fit."""
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes + SPARE_BYTES:
            raise DiskFullError(
                f"There is too little disk space for {what}.",
                where=str(self.folder.resolve()),
                expected=f"{needed_bytes / MIB:,.0f} MiB",
                got=f"{free / MIB:,.0f} MiB free",
                do="free some space, or lower train.keep_checkpoints",
            )

    def write(self, needed_bytes: int, step: int, action: Callable[[], None]) -> None:
        """Run ``action``, which writes ``needed_bytes``. While the disk is full, wait, then start it again.

        Raises DiskFullError if the disk stays full too long, InterruptedRun after a signal. Files of earlier writes
        stay complete.
        """
        began, say, is_waiting = time.monotonic(), self.watcher.say, False
        while True:
            if self._has_room(needed_bytes):
                try:
                    action()
                    return say("there is free space again") if is_waiting else None
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
            if not is_waiting:
                say(
                    f"the disk of {self.folder.resolve()} is full: step {step} needs {needed_bytes / MIB:,.1f} MiB. "
                    f"Training waits for free space, at most {WAIT_MINUTES:g} minutes (process {os.getpid()}); nothing "
                    "is lost"
                )
            is_waiting = True
            with self.watcher.recorder.phase(Phase.WAIT, Work(step=step)):
                self._look(step, began)
                while not self._has_room(needed_bytes):
                    self._look(step, began)

    def _has_room(self, needed_bytes: int) -> bool:
        return shutil.disk_usage(self.folder).free >= needed_bytes + SPARE_BYTES

    def _look(self, step: int, began: float) -> None:
        """Sleep until the next check. Raises InterruptedRun after a signal, DiskFullError when the time is up."""
        if stop := self.watcher.stop():
            raise InterruptedRun(stop, f"Stopped at step {step} while the disk was full.", do=FREE_AND_CONTINUE)
        if time.monotonic() - began > WAIT_MINUTES * 60:
            what, where = f"The disk stayed full for {WAIT_MINUTES:g} minutes.", str(self.folder.resolve())
            raise DiskFullError(what, where=where, do=FREE_AND_CONTINUE)
        time.sleep(LOOK_SECONDS)


class StopRequested(Exception):
    """A signal requests a stop. Raised between micro-batches, so the state is that of the last update."""


@dataclass
class TrainingRun:
    """The parts of a training run in progress."""

    job: Job
    watcher: Watcher
    model: BaseModel
    gradients: Gradients
    optimizer: BlockOptimizer
    disk: Disk
    state: TrainState
    layout: BatchLayout
    tracer: Tracer | None
    ranks: Ranks
    share: Share  # of each update's rows that this rank computes
    saved: tuple[int, int]  # step and last recorded step of the newest checkpoint

    def stop(self) -> int:
        """The signal that requests a stop, or 0. With several ranks: the one that all ranks agreed on."""
        return self.ranks.stop if self.ranks.together else self.watcher.stop()

    def check_stop(self) -> None:
        """Raise StopRequested if a signal requests a stop. Several ranks agree on it only after an update."""
        if not self.ranks.together and self.watcher.stop():
            raise StopRequested


def open_run(job: Job, watcher: Watcher, ranks: Ranks = ALONE) -> TrainingRun:
    """Load the model and the state: rank 0's, from an unfinished run of the same identity, or a fresh one."""
    recorder, settings = watcher.recorder, job.settings
    recorder.read_allocator = allocator
    recorder.device(device().label)
    if job.mlx_limit_bytes:
        set_limits(job.mlx_limit_bytes)
    with recorder.phase(Phase.LOAD_MODEL):
        tracer = Tracer(recorder, watcher.say) if job.trace else None
        model, gradients = prepare(job.base_folder, settings, recorder, tracer)
        optimizer = optimizer_of(settings)
        optimizer.init(model.module.trainable_parameters())
        mx.eval(model.module.trainable_parameters(), optimizer.state)
    disk = Disk(job.output, watcher)
    with recorder.phase(Phase.RESUME):
        state = _begin(job, model, optimizer, disk) if ranks.writes else TrainState()
    if ranks.together:
        ranks.recorder = recorder
        state = hand_out(ranks, state, model, optimizer)
        ranks.total(0.0, watcher.stop(), state.step)  # a rank may have received a signal before the first step
    layout, share = _layout(job, model, state), Share(ranks.rank, ranks.size)
    saved = state.step, state.recorded_step
    return TrainingRun(job, watcher, model, gradients, optimizer, disk, state, layout, tracer, ranks, share, saved)


def _begin(job: Job, model: BaseModel, optimizer: BlockOptimizer, disk: Disk) -> TrainState:
    """Load the unfinished run's state, or remove what older runs left and start with a fresh one."""
    remove_half_written(job.output)
    state = load_checkpoint(job.output, job.identity, model, optimizer, disk.watcher.say)
    if state is None:
        discard_run(job.output)
        (job.output / SAMPLES).unlink(missing_ok=True)
        state = TrainState()
    more = job.keep_checkpoints + KEPT_BESIDE - len(checkpoints_in(job.output))
    size = checkpoint_bytes(model, optimizer, records_of_run(job))
    disk.require(max(1, more) * size, "this run's checkpoints")
    best = best_file(state, job.adapters / ADAPTER_FILE, job.output)
    if best is not None:  # DVC removes a stage's outputs before it runs it again
        disk.write(best.stat().st_size, state.step, lambda: save_best(job, model, best))
    return state


def records_of_run(job: Job) -> int:
    """Most records a run can make: one before the first update, one for each step that logs or validates."""
    return 2 + job.updates // job.settings.log_steps + job.updates // job.settings.eval_steps


def _layout(job: Job, model: BaseModel, state: TrainState) -> BatchLayout:
    """Lay out micro-batches that hold ``batch_size`` of the longest rows.

    On CPU a resumed run keeps its number of shards, even with a different number of cores; a GPU uses none.
    """
    layout = training_layout(model, job.settings.batch_size, job.train.shapes())
    if not device().side_by_side:
        return layout
    if job.settings.method == PRETRAIN and not state.shards:
        most = most_shards_of_whole(sum(weight.size for weight in adapter_weights(model).values()))
        layout = dataclasses.replace(layout, shards=min(layout.shards, most))
    state.shards = state.shards or layout.shards
    return dataclasses.replace(layout, shards=state.shards)


def save_best(job: Job, model: BaseModel, weights: Path | None = None) -> None:
    """Write the best adapter to its folder: the model's current weights, or a copy of the file ``weights``."""
    settings, form = job.settings, job.rows.prompt_format
    base = job.identity.base_model
    save_adapter(model, settings.method, settings.lora, job.base_folder, job.adapters, form, weights, base)
