"""The training loop. Draws nothing and waits for nobody: it reports records and leaves files."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import psutil

from safetrain.core.chat import Rendered
from safetrain.core.errors import InterruptedRun, TrainingError
from safetrain.core.memory import padded
from safetrain.core.metrics import StepRecord
from safetrain.core.reports import TrainingMetrics
from safetrain.core.run_files import discard_run
from safetrain.core.settings import TrainSettings, total_updates, updates_per_epoch
from safetrain.engine.bad_updates import MOST_SKIPPED, Refused, fault_in, path_of, remember, stopped, write_down
from safetrain.engine.batches import Cursor, Layout, Update, advance, inputs_in, update_at
from safetrain.engine.checkpointing import checkpoint
from safetrain.engine.evaluation import measure_loss
from safetrain.engine.model import (
    BaseModel,
    adapter_weights,
    add_embedding_noise,
    layout_for,
    make_trainable,
    on_cpu,
    open_base,
    save_adapter,
    set_adapter_weights,
)
from safetrain.engine.optimizer import build_optimizer
from safetrain.engine.schedule import learning_rate
from safetrain.engine.shapes import needs_of_run, plan_sizes
from safetrain.engine.state import (
    RunIdentity,
    TrainState,
    load_checkpoint,
    mark_finished,
    save_checkpoint,
)
from safetrain.engine.update import Gradients, UpdateResult, apply_gradient, measure

FINAL_SHARE = 0.1  # of the updates: the final training loss is their mean, whatever is logged
CACHE_LIMIT_BYTES = 2**30  # freed buffers that a GPU backend may keep; without a limit they grow to all memory


@dataclass(frozen=True)
class Job:
    """What to train and where to leave it."""

    base: Path
    train: Sequence[Rendered]
    valid: Sequence[Rendered]
    settings: TrainSettings
    identity: RunIdentity
    output: Path  # checkpoints and training_state.json
    adapters: Path  # the best adapter so far
    restart: bool


@dataclass(frozen=True)
class Watcher:
    """How the loop is observed: ``begin`` once with earlier records and the step resumed from, ``record`` at each new
    one, ``stop`` asked after each update for the signal that wants the run to end, 0 for none, ``say`` told of anything
    out of the ordinary."""

    begin: Callable[[list[StepRecord], int], None]
    record: Callable[[StepRecord], None]
    stop: Callable[[], int]
    say: Callable[[str], None] = lambda _text: None


@dataclass(frozen=True)
class Result:
    """How a finished run went."""

    metrics: TrainingMetrics
    resumed_from_step: int  # 0 in a run that was never interrupted
    trained_tokens: int  # labels
    tokens_per_second: float  # input tokens without padding, over all updates
    elapsed_seconds: float  # of the updates; loading, evaluation and saving excluded
    trainable_parameters: int
    peak_memory_bytes: int  # of mlx's allocator, over the updates
    peak_footprint_bytes: int  # of the process, when a record was made
    padding_share: float  # of all tokens that were computed
    skipped_updates: int  # not applied: train.on_bad_update=skip
    stopped_early: bool  # train.early_stopping_patience


def train(job: Job, watcher: Watcher) -> Result:
    """Train to the end, continuing an unfinished run of the same identity.

    Raises TrainingError when the loss is not a number, InterruptedRun after a signal, its state saved.
    """
    settings = job.settings
    if not on_cpu():
        mx.set_cache_limit(CACHE_LIMIT_BYTES)
    model, gradients = prepare(job.base, settings)
    optimizer = build_optimizer(settings.optimizer, settings.weight_decay)
    optimizer.init(model.module.trainable_parameters())
    state = _begin(job, model, optimizer)
    watcher.begin(state.records, state.resumed_from_step)
    total = total_updates(len(job.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    layout = _layout(job, model, state)
    if state.step == 0:
        _record(job, state, model, watcher, None, rate=0.0, validate=True)
    upcoming: Update | None = None
    while state.step < total and not _out_of_patience(job, state):
        update = upcoming or _update_at(job, state.cursor, layout)
        rate = learning_rate(state.step, settings.learning_rate, settings.warmup_steps, total, settings.schedule)
        model.module.train()
        mx.reset_peak_memory()
        began = time.perf_counter()
        try:
            loss, gradient = gradients.of(update, state.step)
            following = advance(state.cursor, len(job.train), settings.rows_per_update)
            upcoming = _update_at(job, following, layout) if state.step + 1 < total else None  # while a GPU computes
            result = measure(loss, gradient)
            fault = fault_in(result, update.trained_tokens, state.recent_losses, settings.max_loss_jump)
            if not fault:
                path_of(job.output, state.step + 1).unlink(missing_ok=True)  # of a run that stopped here before
                apply_gradient(model, optimizer, gradient, result.grad_norm, rate, settings.max_grad_norm)
            seconds = time.perf_counter() - began
            if fault:
                refused = Refused(state.step + 1, fault, result, rate, update, gradient)
                watcher.say(_on_bad_update(job, state, model, optimizer, layout, refused))
        except RuntimeError as error:
            raise _failed(error, state, update) from error
        _advance(state, update, result if not fault else None, seconds, job, total)
        last = state.step == total
        validate = last or state.step % settings.eval_steps == 0
        if validate or state.step % settings.log_steps == 0:
            _record(job, state, model, watcher, None if fault else result, rate, validate=validate)
        last = last or _out_of_patience(job, state)
        stop = watcher.stop()
        if last or stop or state.step % settings.save_steps == 0:
            save_checkpoint(job.output, state, job.identity, model, optimizer)
        if stop and not last:
            raise InterruptedRun(
                stop, f"Stopped at step {state.step} of {total}; the state is saved.", do="the same command continues"
            )
    return _result(job, state, model, total)


def prepare(base: Path, settings: TrainSettings) -> tuple[BaseModel, Gradients]:
    """Open the base as the settings want it, its trainable part in place, and what computes its gradients."""
    model = open_base(base, dequantize=settings.dequantize_base)
    make_trainable(model, settings.method, settings.lora, settings.seed)
    noise = add_embedding_noise(model, settings.neftune_alpha) if settings.neftune_alpha else None
    if settings.gradient_checkpointing:
        for block in model.module.layers[-settings.lora.num_layers :]:
            checkpoint(block)
    return model, Gradients(model, settings.seed, noise=noise)


def finish(job: Job, result: Result) -> None:
    """Call when the result is written down: from then on the same command trains again instead of continuing."""
    mark_finished(job.output, result.metrics.steps, job.identity)


def _layout(job: Job, model: BaseModel, state: TrainState) -> Layout:
    """The micro-batch's bound in tokens is that of batch_size rows as long as the longest.

    A continued run keeps its number of parts, also on a machine with another number of cores.
    """
    settings = job.settings
    longest = padded(max(inputs_in(job.train, row) for row in range(len(job.train))))
    layout = layout_for(model, settings.batch_size * longest, training=True)
    state.parts = state.parts or layout.parts
    layout = dataclasses.replace(layout, parts=state.parts)
    if not layout.masked:
        return layout
    needs = needs_of_run(
        job.train, settings.seed, settings.rows_per_update, settings.num_epochs, settings.max_steps, layout
    )
    return dataclasses.replace(layout, sizes=tuple(plan_sizes(needs)))


def _update_at(job: Job, cursor: Cursor, layout: Layout) -> Update:
    return update_at(job.train, cursor, job.settings.seed, job.settings.rows_per_update, layout)


def _out_of_patience(job: Job, state: TrainState) -> bool:
    patience = job.settings.early_stopping_patience
    return patience is not None and state.validations_since_best >= patience


def _result(job: Job, state: TrainState, model: BaseModel, total: int) -> Result:
    """What a run that reached its last update has to say."""
    valid_loss = state.records[-1].valid_loss
    if not state.final_tokens:  # stopped early, or the end was skipped: the last updates stand in
        state.final_loss, state.final_tokens = _mean_of_recent(state)
    if not state.final_tokens or valid_loss is None or state.best_valid_loss is None:
        raise TrainingError("The run ended without a measured loss.", got=f"{state.step} updates")
    final = state.final_loss / state.final_tokens
    metrics = TrainingMetrics(final, valid_loss, state.best_valid_loss, state.best_step, state.step)
    trainable = sum(weight.size for weight in adapter_weights(model).values())
    return Result(
        metrics=metrics,
        resumed_from_step=state.resumed_from_step,
        trained_tokens=state.trained_tokens,
        tokens_per_second=state.input_tokens / state.elapsed_seconds,
        elapsed_seconds=state.elapsed_seconds,
        trainable_parameters=trainable,
        peak_memory_bytes=state.peak_memory_bytes,
        peak_footprint_bytes=max(record.footprint_bytes for record in state.records),
        padding_share=1 - state.input_tokens / state.computed_tokens,
        skipped_updates=len(state.skipped_steps),
        stopped_early=state.step < total and _out_of_patience(job, state),
    )


def _begin(job: Job, model: BaseModel, optimizer: optim.Optimizer) -> TrainState:
    """The state to start from: the unfinished run's, or a fresh one with the remains of older runs removed."""
    job.output.mkdir(parents=True, exist_ok=True)
    state = None if job.restart else load_checkpoint(job.output, job.identity, model, optimizer)
    if state is None:
        discard_run(job.output)
        return TrainState()
    if state.best_weights:  # DVC removes a stage's outputs before it runs it again
        _save_best(job, model, state)
    return state


def _mean_of_recent(state: TrainState) -> tuple[float, int]:
    return sum(state.recent_losses), len(state.recent_losses)


def _advance(
    state: TrainState, update: Update, result: UpdateResult | None, seconds: float, job: Job, total_steps: int
) -> None:
    """Count one update; ``result`` is None when it was not applied."""
    state.step += 1
    state.cursor = advance(state.cursor, len(job.train), job.settings.rows_per_update)
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
    if state.step > total_steps - max(1, round(FINAL_SHARE * total_steps)):
        state.final_loss += result.summed_loss
        state.final_tokens += update.trained_tokens
    state.window_loss += result.summed_loss
    state.window_tokens += update.trained_tokens


def _record(
    job: Job,
    state: TrainState,
    model: BaseModel,
    watcher: Watcher,
    result: UpdateResult | None,
    rate: float,
    *,
    validate: bool,
) -> None:
    """Make a record of the updates since the last one, validating first where that is due, and report it."""
    valid_loss = _validate(job, state, model) if validate else None
    per_epoch = updates_per_epoch(len(job.train), job.settings.rows_per_update)
    record = StepRecord(
        step=state.step,
        epoch=round(state.cursor.epoch + state.cursor.window / per_epoch, 6),
        train_loss=state.window_loss / state.window_tokens if state.window_tokens else None,
        valid_loss=valid_loss,
        learning_rate=rate,
        grad_norm=result.grad_norm if result else None,
        trained_tokens=state.trained_tokens,
        tokens_per_second=round(state.window_tokens / state.window_seconds, 1) if state.window_seconds else None,
        peak_memory_bytes=state.peak_memory_bytes,
        footprint_bytes=psutil.Process().memory_info().rss,
        elapsed_seconds=round(state.elapsed_seconds, 3),
    )
    state.window_loss, state.window_tokens, state.window_seconds = 0.0, 0, 0.0
    state.records.append(record)
    watcher.record(record)


def _validate(job: Job, state: TrainState, model: BaseModel) -> float:
    """Loss on all validation rows; a new best is kept in memory and in the adapters folder."""
    loss = measure_loss(model, job.valid, job.settings.batch_size * job.settings.max_seq_length)
    if not math.isfinite(loss):
        raise TrainingError(
            f"The validation loss is not a number at step {state.step}.",
            got=str(loss),
            do="check the base model with 'safetrain ask', or lower train.learning_rate",
        )
    if state.step > 0 and (state.best_valid_loss is None or loss < state.best_valid_loss):
        state.best_valid_loss, state.best_step, state.validations_since_best = loss, state.step, 0
        state.best_weights = adapter_weights(model)
        save_adapter(model, job.settings.method, job.settings.lora, job.base, job.adapters)
    elif state.step > 0:
        state.validations_since_best += 1
    return loss


def _save_best(job: Job, model: BaseModel, state: TrainState) -> None:
    current = adapter_weights(model)
    set_adapter_weights(model, state.best_weights)
    save_adapter(model, job.settings.method, job.settings.lora, job.base, job.adapters)
    set_adapter_weights(model, current)


def _on_bad_update(
    job: Job, state: TrainState, model: BaseModel, optimizer: optim.Optimizer, layout: Layout, refused: Refused
) -> str:
    """Write down an update that is not applied; raise, with the state before it saved, unless it may be skipped.

    Returns what there is to say of a skipped one.
    """
    path = write_down(job.output, refused, job.train, model, layout)
    before = sum(step > state.step - MOST_SKIPPED for step in state.skipped_steps)
    if job.settings.on_bad_update == "skip" and before < MOST_SKIPPED:
        return f"update {refused.step} is skipped: {refused.fault}; its rows: {path}"
    if state.step:
        save_checkpoint(job.output, state, job.identity, model, optimizer)
    raise stopped(refused, path, before)


def _failed(error: RuntimeError, state: TrainState, update: Update) -> TrainingError:
    """What to say when mlx itself gives up, out of GPU memory for example."""
    first = update.micro_batches[0]
    tokens = sum(part.inputs.size for part in first.parts)
    return TrainingError(
        f"mlx failed at step {state.step + 1}: {error}",
        where=f"a micro-batch of {len(first.rows)} rows and {tokens} tokens",
        do="if it is memory: lower train.batch_size or train.max_seq_length; what was saved before is kept",
    )
