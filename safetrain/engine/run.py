"""A training in progress as one value: what belongs to it, how it begins, records, validates and saves."""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from safetrain.core.data.row_order import Cursor, advance
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import TrainingError
from safetrain.core.memory.process import footprint_bytes
from safetrain.core.protocol.flight import Allocator, Edge, Phase, Recorder, Work
from safetrain.core.records.adapter_files import Taught
from safetrain.core.records.loaded_job import LoadedJob
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.settings import TrainSettings, total_updates, updates_per_epoch
from safetrain.core.storage.checkpoint_files import KEPT_BESIDE, checkpoints_in, sha256_of
from safetrain.core.storage.run_files import discard_run, remove_half_written
from safetrain.engine.backend import device
from safetrain.engine.bad_updates import MOST_SKIPPED, Refused, remember, stopped, write_down
from safetrain.engine.batches import BatchLayout, MicroBatch, Update, update_at
from safetrain.engine.checkpointing import checkpoint
from safetrain.engine.disk_wait import DiskWait
from safetrain.engine.evaluation import measure_loss
from safetrain.engine.limits import set_limits
from safetrain.engine.model import (
    ADAPTER_FILE,
    BaseModel,
    adapter_weights,
    add_embedding_noise,
    make_trainable,
    open_base,
    save_adapter,
    training_layout,
)
from safetrain.engine.optimizer import BlockOptimizer, build_optimizer
from safetrain.engine.state import (
    RunIdentity,
    TrainState,
    best_file,
    checkpoint_bytes,
    load_checkpoint,
    save_checkpoint,
    text_bytes,
)
from safetrain.engine.tracing import Tracer
from safetrain.engine.update import Gradients, UpdateResult, work_of

FINAL_SHARE = 0.1  # of the updates: the final training loss is their mean, whatever is logged


@dataclass(frozen=True)
class Job:
    """What to train and where to leave it."""

    base: Path
    train: TokenRows
    valid: TokenRows
    settings: TrainSettings
    identity: RunIdentity
    output: Path  # checkpoints and training_state.json
    adapters: Path  # the best adapter so far
    restart: bool
    keep_checkpoints: int = 2
    disk_wait_minutes: float = 30.0
    trace: bool = False
    mlx_limit_bytes: int = 0  # 0: mlx's own limits stay
    shortened: bool = False  # rows are shorter than those of the run that is continued
    taught: Taught | None = None  # of where answers begin and end, to go with the adapter


def job_of(loaded: LoadedJob, identity: RunIdentity, output: Path, adapters: Path, mlx_limit_bytes: int) -> Job:
    """What the supervisor asked for, with its rows."""
    asked, rows = loaded.job, loaded.rows
    return Job(
        base=Path(asked.base),
        train=rows.train,
        valid=rows.valid,
        settings=loaded.settings,
        identity=identity,
        output=output,
        adapters=adapters,
        restart=asked.survival.restart,
        keep_checkpoints=asked.survival.keep_checkpoints,
        disk_wait_minutes=asked.survival.disk_wait_minutes,
        trace=asked.survival.trace,
        mlx_limit_bytes=mlx_limit_bytes,
        shortened=any(rung.failed.max_seq_length > loaded.settings.max_seq_length for rung in asked.rungs),
        taught=rows.taught,
    )


@dataclass(frozen=True)
class Watcher:
    """How the loop is observed: ``begin`` once with earlier records, the step resumed from and how the model was
    adapted, ``record`` at each new record with all of them, ``stop`` asked after each update for the signal that wants
    the run to end, 0 for none, ``say`` told of anything out of the ordinary, ``recorder`` before and after each
    phase."""

    begin: Callable[[list[StepRecord], int, str], None]
    record: Callable[[list[StepRecord]], None]
    stop: Callable[[], int]
    recorder: Recorder
    say: Callable[[str], None] = lambda _text: None


@dataclass
class Run:
    """What belongs to one running training."""

    job: Job
    watcher: Watcher
    model: BaseModel
    gradients: Gradients
    optimizer: BlockOptimizer
    disk: DiskWait
    state: TrainState
    layout: BatchLayout
    total_steps: int
    tracer: Tracer | None


def open_run(job: Job, watcher: Watcher) -> Run:
    """Load the model, and the state of an unfinished run of the same identity, or a fresh one."""
    recorder, settings = watcher.recorder, job.settings
    recorder.read_allocator = allocator
    here = device()
    recorder.device(here.label, str(here.facts.get("uuid", "")))  # which CUDA devices have, and nvidia-smi asks for
    if job.mlx_limit_bytes:
        set_limits(job.mlx_limit_bytes)
    with recorder.phase(Phase.LOAD_MODEL):
        tracer = Tracer(recorder, watcher.say) if job.trace else None
        model, gradients = prepare(job.base, settings, recorder, tracer)
        optimizer = optimizer_of(settings)
        optimizer.init(model.module.trainable_parameters())
        mx.eval(model.module.trainable_parameters(), optimizer.state)
    disk = DiskWait(job.output, job.disk_wait_minutes, recorder, watcher.say, watcher.stop)
    with recorder.phase(Phase.RESUME):
        state = _begin(job, model, optimizer, disk)
    total = total_updates(len(job.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    return Run(job, watcher, model, gradients, optimizer, disk, state, _layout(job, model, state), total, tracer)


def prepare(
    base: Path, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> tuple[BaseModel, Gradients]:
    """Open the base as the settings want it, its trainable part in place, and what computes its gradients."""
    model = open_base(base, dequantize=settings.dequantize_base, compute_dtype=settings.compute_dtype)
    return model, equip(model, settings, recorder, tracer)


def optimizer_of(settings: TrainSettings) -> BlockOptimizer:
    """The optimizer that the settings name; compiled where launching kernels costs more than compiling saves."""
    return build_optimizer(
        settings.optimizer, settings.weight_decay, state_bits=settings.optimizer_state_bits, compiled=device().compiles
    )


def equip(
    model: BaseModel, settings: TrainSettings, recorder: Recorder | None = None, tracer: Tracer | None = None
) -> Gradients:
    """Put a model's trainable part in place; returns what computes its gradients."""
    make_trainable(model, settings.method, settings.lora, settings.seed)
    noise = add_embedding_noise(model, settings.neftune_alpha) if settings.neftune_alpha else None
    if settings.gradient_checkpointing:
        for block in model.module.layers[-settings.lora.num_layers :]:
            checkpoint(block)
    return Gradients(model, settings.seed, noise=noise, recorder=recorder, tracer=tracer)


def allocator() -> Allocator:
    """mlx's memory now."""
    return Allocator(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def _begin(job: Job, model: BaseModel, optimizer: BlockOptimizer, disk: DiskWait) -> TrainState:
    """The state to start from: the unfinished run's, or a fresh one with the remains of older runs removed."""
    state = None
    remove_half_written(job.output)
    if not job.restart:
        state = load_checkpoint(job.output, job.identity, model, optimizer, disk.say, shortened=job.shortened)
    if state is None:
        discard_run(job.output)
        state = TrainState()
    kept = job.keep_checkpoints + KEPT_BESIDE
    have = len(checkpoints_in(job.output))
    size = checkpoint_bytes(model, optimizer, records_of_run(job))
    disk.require(max(1, kept - have) * size, "the checkpoints of this training")
    best = best_file(state, job.adapters / ADAPTER_FILE, job.output)
    if best is not None:  # DVC removes a stage's outputs before it runs it again
        disk.write(best.stat().st_size, state.step, lambda: _save_adapter(job, model, best))
    return state


def records_of_run(job: Job) -> int:
    """The most that a run makes: one before the first update, then one for each that is logged or validated at."""
    settings = job.settings
    total = total_updates(len(job.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    return 2 + total // settings.log_steps + total // settings.eval_steps


def layout_of(data: TokenRows, settings: TrainSettings, model: BaseModel) -> BatchLayout:
    """The micro-batch's bound in tokens is that of batch_size rows as long as the longest."""
    return training_layout(model, settings.batch_size, data.inputs())


def _layout(job: Job, model: BaseModel, state: TrainState) -> BatchLayout:
    """On CPU a continued run keeps its number of shards, also with another number of cores; a GPU computes none."""
    layout = layout_of(job.train, job.settings, model)
    if not device().side_by_side:
        return layout
    state.shards = state.shards or layout.shards
    return dataclasses.replace(layout, shards=state.shards)


def update_of(run: Run, cursor: Cursor) -> Update:
    """The update at a place in the data."""
    settings = run.job.settings
    return update_at(run.job.train, cursor, settings.seed, settings.rows_per_update, run.layout)


def next_cursor(run: Run) -> Cursor:
    """The place in the data after the update at hand."""
    return advance(run.state.cursor, len(run.job.train), run.job.settings.rows_per_update)


def out_of_patience(run: Run) -> bool:
    """Whether validation has not improved for too long (train.early_stopping_patience)."""
    patience = run.job.settings.early_stopping_patience
    return patience is not None and run.state.validations_since_best >= patience


def count(run: Run, update: Update, result: UpdateResult | None, seconds: float) -> None:
    """Count one update; ``result`` is None when it was not applied."""
    state = run.state
    state.step += 1
    state.cursor = next_cursor(run)
    state.peak_memory_bytes = max(state.peak_memory_bytes, mx.get_peak_memory())
    state.input_tokens += update.input_tokens
    state.computed_tokens += update.computed_tokens
    state.window_seconds += seconds
    state.elapsed_seconds += seconds
    if result is None:
        state.skipped_steps.append(state.step)
        return
    state.trained_tokens += update.trained_tokens
    state.recent_losses = remember(state.recent_losses, result.summed_loss / update.trained_tokens)
    if state.step > run.total_steps - max(1, round(FINAL_SHARE * run.total_steps)):
        state.final_loss += result.summed_loss
        state.final_tokens += update.trained_tokens
    state.window_loss += result.summed_loss
    state.window_tokens += update.trained_tokens


def record(run: Run, result: UpdateResult | None, rate: float, *, validate: bool) -> None:
    """Make a record of the updates since the last one, validating first where that is due, and report it."""
    state, valid_loss = run.state, None
    if validate:
        with run.watcher.recorder.phase(Phase.EVALUATE, Work(state.step)):
            valid_loss = _validate(run)
    per_epoch = updates_per_epoch(len(run.job.train), run.job.settings.rows_per_update)
    state.records.append(
        StepRecord(
            step=state.step,
            epoch=round(state.cursor.epoch + state.cursor.window / per_epoch, 6),
            train_loss=state.window_loss / state.window_tokens if state.window_tokens else None,
            valid_loss=valid_loss,
            learning_rate=rate,
            grad_norm=result.grad_norm if result else None,
            trained_tokens=state.trained_tokens,
            labels_per_second=round(state.window_tokens / state.window_seconds, 1) if state.window_seconds else None,
            peak_memory_bytes=state.peak_memory_bytes,
            footprint_bytes=footprint_bytes(os.getpid()),
            elapsed_seconds=round(state.elapsed_seconds, 3),
        )
    )
    state.window_loss, state.window_tokens, state.window_seconds = 0.0, 0, 0.0
    run.disk.write(text_bytes(len(state.records)), state.step, lambda: run.watcher.record(state.records))


def save(run: Run) -> None:
    """A checkpoint; waits for room where the disk is full."""
    with run.watcher.recorder.phase(Phase.SAVE, Work(run.state.step)):
        size = checkpoint_bytes(run.model, run.optimizer, len(run.state.records))
        run.disk.write(size, run.state.step, lambda: _write_checkpoint(run))


def _write_checkpoint(run: Run) -> None:
    job = run.job
    best = best_file(run.state, job.adapters / ADAPTER_FILE, job.output)
    save_checkpoint(job.output, run.state, job.identity, run.model, run.optimizer, best, job.keep_checkpoints)


def on_bad_update(run: Run, refused: Refused) -> str:
    """Write down an update that is not applied; raise, with the state before it saved, unless it may be skipped.

    Returns what there is to say of a skipped one.
    """
    job, state = run.job, run.state
    path = write_down(job.output, refused, job.train, run.model, run.layout)
    before = sum(step > state.step - MOST_SKIPPED for step in state.skipped_steps)
    if job.settings.on_bad_update == "skip" and before < MOST_SKIPPED:
        return f"update {refused.step} is skipped: {refused.fault}; its rows: {path}"
    if state.step:
        save(run)
    raise stopped(refused, path, before)


def _validate(run: Run) -> float:
    """Loss on all validation rows; a new best goes to the adapters folder."""
    job, state, model = run.job, run.state, run.model

    def beat(batch: MicroBatch, number: int) -> None:
        work = work_of(batch, state.step - 1, number)
        run.watcher.recorder.write(Phase.EVALUATE, Edge.BEFORE, dataclasses.replace(work, row_ids=()))

    loss = measure_loss(model, job.valid, run.layout.most_tokens, beat)
    if not math.isfinite(loss):
        raise TrainingError(
            f"The validation loss is not a number at step {state.step}.",
            got=str(loss),
            do="check the base model with 'safetrain ask', or lower train.learning_rate",
        )
    if state.step > 0 and (state.best_valid_loss is None or loss < state.best_valid_loss):
        size = sum(array.nbytes for array in adapter_weights(model).values())
        run.disk.write(size, state.step, lambda: _save_adapter(job, model))
        state.best_valid_loss, state.best_step, state.validations_since_best = loss, state.step, 0
        state.best_sha256 = sha256_of(job.adapters / ADAPTER_FILE)
    elif state.step > 0:
        state.validations_since_best += 1
    return loss


def _save_adapter(job: Job, model: BaseModel, weights: Path | None = None) -> None:
    settings, fingerprint = job.settings, job.identity.base_model
    save_adapter(model, settings.method, settings.lora, job.base, job.adapters, job.taught, weights, fingerprint)
