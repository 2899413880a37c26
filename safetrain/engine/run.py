"""A training run in memory: its parts, how it starts, and how it waits for free space on a full disk."""

import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from safetrain.core.data.training_rows import Cursor
from safetrain.core.errors import FREE_AND_CONTINUE, DiskFullError, InterruptedRun
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.terms import MOST_SHARDS, most_shards_of_whole
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.run_state import (
    KEPT_BESIDE,
    RunState,
    checkpoints_in,
    discard_run,
    mirror,
    remove_half_written,
    remove_old,
)
from safetrain.core.records.schema import DPO, PRETRAIN
from safetrain.core.storage.files import DISK_FULL, SPARE_BYTES, require_room, write_record
from safetrain.core.storage.paths import POINTER, REFERENCES, UNFINISHED
from safetrain.engine.adapters import adapter_weights, set_adapter_weights
from safetrain.engine.backend import device, set_limits
from safetrain.engine.batches import BatchLayout, MicroBatch, Update, training_layout
from safetrain.engine.cpu.blas import cores, use_threads
from safetrain.engine.evaluation import row_losses
from safetrain.engine.job import Job
from safetrain.engine.model import BaseModel
from safetrain.engine.optimizer import BlockOptimizer, optimizer_of
from safetrain.engine.ranks import ALONE, Ranks, hand_out
from safetrain.engine.state import TrainState, best_file, load_checkpoint, size_of
from safetrain.engine.update import Gradients, Tracer, prepare, work_of
from safetrain.engine.weight_files import adapter_arrays, load_arrays, save_adapter, save_arrays

WAIT_MINUTES = 30.0  # for space on a full disk
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Watcher:
    """Functions through which the training loop reports, and learns of a stop.

    ``begin`` is called once with earlier records and the step resumed from; ``record`` with all records after each new
    one; ``say`` with messages for people. ``stop`` is called between micro-batches and returns the signal that requests
    a stop, or 0. ``recorder`` gets each phase.
    """

    begin: Callable[[list[StepRecord], int], None]
    record: Callable[[list[StepRecord]], None]
    stop: Callable[[], int]
    recorder: Recorder
    say: Callable[[str], None] = lambda _text: None


@dataclass
class TrainingRun:
    job: Job
    watcher: Watcher
    model: BaseModel
    gradients: Gradients
    optimizer: BlockOptimizer
    state: TrainState
    layout: BatchLayout
    tracer: Tracer | None
    ranks: Ranks
    saved: tuple[int, int]  # step and last recorded step of the newest checkpoint
    ahead: dict[tuple[Cursor, BatchLayout], Update] = field(default_factory=dict)  # the next update, already built

    def stop(self) -> int:
        """The signal that requests a stop, or 0. With several ranks: the one that all ranks agreed on."""
        return self.ranks.stop if self.ranks.together else self.watcher.stop()

    def check_stop(self) -> None:
        """Raise InterruptedRun if a signal requests a stop. Several ranks agree on it only after an update."""
        if not self.ranks.together and self.watcher.stop():
            raise self.interrupted()

    def interrupted(self, number: int = 0) -> InterruptedRun:
        """The error that ends a stopped run. Between micro-batches too, the state is that of the last update."""
        kept = "the state is saved" if self.state.step else "no update was made"
        what = f"Stopped at step {self.state.step} of {self.job.updates}; {kept}."
        return InterruptedRun(number or self.stop(), what, do="the same command continues")

    def write(self, needed_bytes: int, action: Callable[[], None]) -> None:
        """Write files of this step; see ``write_or_wait``."""
        write_or_wait(self.job.output, self.watcher, needed_bytes, self.state.step, action)


def open_run(job: Job, watcher: Watcher, ranks: Ranks = ALONE) -> TrainingRun:
    """Load the model; resume an unfinished run of the same identity, or start anew. All ranks get rank 0's state."""
    recorder, settings = watcher.recorder, job.settings
    recorder.read_allocator = lambda: (mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())
    recorder.device(device().label)
    if job.mlx_limit_bytes:
        set_limits(job.mlx_limit_bytes)
    use_threads(min(settings.threads or cores(), cores()))
    with recorder.phase(Phase.LOAD_MODEL):
        tracer = Tracer(recorder, watcher.say) if job.trace else None
        model, gradients = prepare(job.files.folder, settings, recorder, tracer)
        if model.blocks is not None:
            model.blocks.pulse = recorder.repeat
        if settings.from_adapter is not None:
            set_adapter_weights(model, adapter_arrays(Path(settings.from_adapter)))
        optimizer = optimizer_of(settings)
        optimizer.init(model.module.trainable_parameters())
        mx.eval(model.module.trainable_parameters(), optimizer.state)
    if settings.method == DPO:  # the adapter is still the first one
        _set_references(job, model, watcher, writes=ranks.writes)
    with recorder.phase(Phase.RESUME):
        state = _begin(job, model, optimizer, watcher) if ranks.writes else TrainState()
    if ranks.together:
        ranks.recorder = recorder
        state = hand_out(ranks, state, model, optimizer)
        ranks.total(watcher.stop(), state.step)  # a rank may have received a signal before the first step
    layout, saved = _layout(job, model, state), (state.step, state.recorded_step)
    return TrainingRun(job, watcher, model, gradients, optimizer, state, layout, tracer, ranks, saved)


def _set_references(job: Job, model: BaseModel, watcher: Watcher, *, writes: bool) -> None:
    """Give all rows their log-probabilities before training, from the file of an earlier start if it fits."""
    settings, own = job.settings, dataclasses.replace(job.identity, settings="", draws="")
    path, most = job.output / REFERENCES, training_layout(model, settings.batch_size, job.rows.train).most_tokens
    kept, needed = load_arrays(path) if path.is_file() else {}, dict[str, mx.array]()
    was_kept = set(kept)

    def beat(batch: MicroBatch) -> None:
        watcher.recorder.write(Phase.EVALUATE, Edge.BEFORE, work_of(batch, -1, 0))
        if stop := watcher.stop():
            raise InterruptedRun(stop, "Stopped before the first step.", do="the same command starts again")

    for part, rows in (("training", job.rows.train.documents), ("validation", job.rows.valid)):
        facts = f"{own} {settings.max_seq_length} {settings.compute_dtype} {len(rows)}"
        name = f"{part} {hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}"
        if rows.references is not None:
            continue
        if name not in kept:
            watcher.say(f"reading {counted(len(rows) // 2, f'{part} pair')} before training, once")
            with watcher.recorder.phase(Phase.EVALUATE):
                kept[name] = mx.array(-row_losses(model, rows, most, beat).astype(np.float32))
        needed[name] = kept[name]
        rows.references = np.array(kept[name])
    if writes and needed.keys() - was_kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_arrays(path, needed)


def _begin(job: Job, model: BaseModel, optimizer: BlockOptimizer, watcher: Watcher) -> TrainState:
    """Load the unfinished run's state, or remove what older runs left and start with a fresh one."""
    for folder in (job.output, job.output / UNFINISHED):
        remove_half_written(folder)
    if job.kept is not None:
        remove_old(job.kept.parent)
        if not checkpoints_in(job.output):
            mirror(job.kept, job.output)
    state = load_checkpoint(job, model, optimizer, watcher.say)
    if state is None:
        discard_run(job.output)
        if job.candidate is not None:
            mirror(job.candidate, job.output)
            if (state := load_checkpoint(job, model, optimizer, watcher.say)) is not None:
                newest = checkpoints_in(job.output)[0].folder.name
                write_record(job.output / POINTER, RunState(False, newest, state.step, job.identity))
    state = state or TrainState()
    more = job.keep_checkpoints + KEPT_BESIDE - len(checkpoints_in(job.output))
    what = "There is too little disk space for this run's checkpoints."
    size, do = max(1, more) * size_of(model, optimizer), "free some space, or lower train.keep_checkpoints"
    require_room(job.output, size, what, do)
    best = best_file(job, state)
    if best is not None and best.parent != job.adapters:  # only a checkpoint has it
        write_or_wait(job.output, watcher, best.stat().st_size, state.step, lambda: save_best(job, model, best))
    return state


def _layout(job: Job, model: BaseModel, state: TrainState) -> BatchLayout:
    """Lay out micro-batches that hold ``batch_size`` of the longest rows.

    On CPU a resumed run keeps its number of threads, even with a different number of cores.
    """
    layout = training_layout(model, job.settings.batch_size, job.rows.train)
    layout = dataclasses.replace(layout, padding_tokens=job.settings.padding_tokens)
    if not device().on_cpu:
        return layout
    state.threads = state.threads or cores()
    use_threads(state.threads)
    most = MOST_SHARDS
    if job.settings.method == PRETRAIN:
        most = most_shards_of_whole(sum(weight.size for weight in adapter_weights(model).values()))
    return dataclasses.replace(layout, shards=min(state.threads, most, MOST_SHARDS))


def save_best(job: Job, model: BaseModel, weights: Path | None = None) -> None:
    """Write the best adapter to its folder: the model's current weights, or a copy of the file ``weights``."""
    settings, form = job.settings, job.rows.prompt_format
    base = job.files.fingerprint
    save_adapter(model, settings.adapter, settings.lora, job.files.folder, job.adapters, form, weights, base)


def write_or_wait(folder: Path, watcher: Watcher, needed_bytes: int, step: int, action: Callable[[], None]) -> None:
    """Run ``action``, which writes ``needed_bytes``. While the disk is full, wait, then start it again.

    Raises DiskFullError if the disk stays full too long, InterruptedRun after a signal. Files of earlier writes stay
    complete.
    """
    began, is_waiting, where = time.monotonic(), False, str(folder.resolve())
    while True:
        if shutil.disk_usage(folder).free >= needed_bytes + SPARE_BYTES:
            try:
                action()
                return watcher.say("there is free space again") if is_waiting else None
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
        if not is_waiting:
            watcher.say(
                f"the disk that holds {where} is full: step {step} needs {size_text(needed_bytes)}. Training waits for "
                f"free space, at most {WAIT_MINUTES:g} minutes (process {os.getpid()}); nothing is lost"
            )
        is_waiting = True
        with watcher.recorder.phase(Phase.WAIT, Work(step=step)):
            if stop := watcher.stop():
                raise InterruptedRun(stop, f"Stopped at step {step} while the disk was full.", do=FREE_AND_CONTINUE)
            if time.monotonic() - began > WAIT_MINUTES * 60:
                what = f"The disk stayed full for {WAIT_MINUTES:g} minutes."
                raise DiskFullError(what, where=where, do=FREE_AND_CONTINUE)
            time.sleep(LOOK_SECONDS)
