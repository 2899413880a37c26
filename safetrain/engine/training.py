"""The training loop. It prints nothing and never waits for a reader: it reports records and writes files.

Each update is checked between gradient and optimizer, so the weights are always those of the last good update.
"""

import dataclasses
import math
import os
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from safetrain.core.data.training_rows import Cursor, advance, rows_at
from safetrain.core.errors import BadUpdateError, DataError, EngineError, InterruptedRun, ModelError, TrainingError
from safetrain.core.formatting import counted
from safetrain.core.memory.system import footprint_bytes
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import StepRecord, TrainingMetrics
from safetrain.core.records.schema import LOWER_RATE
from safetrain.core.records.search import save_row_losses
from safetrain.core.records.settings import updates_per_epoch
from safetrain.core.signals import AT_RUNG
from safetrain.core.storage.files import sha256_of, write_json
from safetrain.core.storage.paths import BAD_UPDATES
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.batches import MicroBatch, Update, update_at
from safetrain.engine.evaluation import row_losses
from safetrain.engine.job import Job
from safetrain.engine.optimizer import apply_gradient, learning_rate
from safetrain.engine.ranks import ALONE, Ranks, require_same_weights
from safetrain.engine.run import TrainingRun, Watcher, open_run, save_best
from safetrain.engine.state import RECORD_BYTES, TrainState, save_checkpoint, size_of
from safetrain.engine.tuned import TunedModel, remember_best
from safetrain.engine.update import measure, work_of
from safetrain.engine.weight_files import ADAPTER_FILE, bytes_of

REMEMBERED = 32  # updates whose losses a new loss is compared with
FINAL_SHARE = 0.1  # of the updates, but at most REMEMBERED: the final training loss is the mean of the last
OF_PAIRS = ("valid_accuracy", "valid_margin", "chosen_logp", "rejected_logp")
ENOUGH = 8  # earlier updates that are needed to call a higher loss a jump


@dataclass(frozen=True)
class Result:
    metrics: TrainingMetrics
    state: TrainState
    trainable_parameters: int
    tuned: TunedModel  # to compare with the adapter that was saved


def train(job: Job, watcher: Watcher, ranks: Ranks = ALONE) -> Result | None:
    """Train to the end, resuming an unfinished run of the same identity. A signal saves the state and stops the run.

    With several ranks only rank 0, which owns the run's files, returns a result. Raises TrainingError when the loss is
    not a number, and InterruptedRun after a signal.
    """
    run = open_run(job, watcher, ranks)
    state = run.state
    if ranks.writes:
        watcher.begin(state.records, state.resumed_from_step)
    try:
        _train_steps(run)
    except (InterruptedRun, ModelError):  # between micro-batches; the base's files have changed, or cannot be read
        if state.step and not ranks.together:
            save(run)
        raise
    return _result(run) if ranks.writes else None


def _train_steps(run: TrainingRun) -> None:
    """Record, save and update until the last step. The state alone decides what is due, so a stop in between loses
    nothing: a resumed run starts with the record that is still missing."""
    state, settings, rung = run.state, run.job.settings, run.job.stop_at_step
    patience = math.inf if settings.early_stopping_patience is None else settings.early_stopping_patience
    while True:
        validate = state.step in (0, run.job.updates) or state.step % settings.eval_steps == 0
        if state.recorded_step != state.step and (validate or state.step % settings.log_steps == 0):
            record(run, validate=validate)
        last, stop = state.step == run.job.updates or state.validations_since_best >= patience, run.stop()
        if state.step and (last or stop or state.step == rung or state.step % settings.save_steps == 0):
            save(run)
        if last and rung is None:
            return
        if stop or last or state.step == rung:
            raise run.interrupted(stop or AT_RUNG)
        try:
            began = time.perf_counter()
            make_update(run, update_of(run, state.cursor), _rate_after(run, state.step), began)
        except RuntimeError as error:  # such as a GPU without memory
            do = "if memory ran out, lower train.batch_size or train.max_seq_length; saved checkpoints are kept"
            raise EngineError(f"mlx failed at step {state.step + 1}: {error}", do=do) from error


def _rate_after(run: TrainingRun, step: int) -> float:
    settings = run.job.settings
    return learning_rate(step, settings.learning_rate, settings.warmup_steps, run.job.updates, settings.schedule)


def update_of(run: TrainingRun, cursor: Cursor) -> Update:
    """The update at a place in the data, or this rank's part of it, unless it is built already."""
    settings, layout, ranks = run.job.settings, run.layout, run.ranks
    if (update := run.ahead.pop((cursor, layout), None)) is not None:
        return update
    return update_at(
        run.job.rows.train, cursor, settings.seed, settings.rows_per_update, layout, ranks.rank, ranks.size
    )


def make_update(run: TrainingRun, update: Update, rate: float, began: float) -> None:
    """Compute one update, apply it and count it with the seconds since ``began``; meanwhile build the next one.

    Raises BadUpdateError if ``fault_in`` finds a fault.
    """
    state, settings, recorder = run.state, run.job.settings, run.watcher.recorder
    step, cursor = state.step + 1, advance(state.cursor, len(run.job.rows.train), settings.rows_per_update)

    def build_next() -> None:
        run.ahead = {(cursor, run.layout): update_of(run, cursor)} if step < run.job.updates else {}

    if not run.model.module.training:  # walking through a large model takes long
        run.model.module.train()
    mx.reset_peak_memory()
    loss, gradient = run.gradients.of(update, state.step, run.check_stop)
    summed_loss, norm = measure(loss, {} if run.ranks.together else gradient, build_next)
    mx.eval(gradient)
    labels = max(1, update.labels)  # 0 in fully masked windows
    recorder.loss = summed_loss / labels
    batches = update.micro_batches
    done = work_of(batches[-1], state.step, len(batches) - 1) if batches else Work(step)
    recorder.write(Phase.GRADIENT, Edge.AFTER, done)
    if run.ranks.together:
        gradient = run.ranks.sum_gradient(gradient, step)
        own = summed_loss, update.computed_tokens
        summed_loss, tokens = run.ranks.total(run.watcher.stop(), step, *own)
        state.computed_tokens += round(tokens) - update.computed_tokens
        norm, recorder.loss = measure(loss, gradient)[1], summed_loss / labels
    if update.labels:  # else nothing to learn: the windows are fully masked
        fault = fault_in(summed_loss, norm, update.labels, state.recent_losses, settings.max_loss_jump)
        if fault:
            raise stop_at(run, fault, recorder.loss, norm, rate)
        tracer = run.tracer
        with recorder.phase(Phase.OPTIMIZER, Work(step)) if tracer is None else tracer.optimizer(step):
            apply_gradient(run.model, run.optimizer, gradient, norm, rate, settings.max_grad_norm)
    state.cursor = cursor
    _count(run, update, summed_loss, norm, time.perf_counter() - began)


def _count(run: TrainingRun, update: Update, summed_loss: float, norm: float, seconds: float) -> None:
    """Add one update to the state's totals."""
    state = run.state
    state.step += 1
    state.peak_memory_bytes = max(state.peak_memory_bytes, mx.get_peak_memory())
    state.input_tokens += update.input_tokens
    state.computed_tokens += update.computed_tokens
    state.since_record_seconds += seconds
    state.elapsed_seconds += seconds
    state.grad_norm = norm
    if not update.labels:
        return
    state.labels += update.labels
    terms = update.pairs or update.labels
    state.recent_losses = [*state.recent_losses, summed_loss / update.labels][-REMEMBERED:]
    state.since_record_loss += summed_loss * (terms / update.labels)  # summed over pairs, or labels
    state.since_record_terms += terms
    state.since_record_labels += update.labels


def record(run: TrainingRun, *, validate: bool) -> None:
    """Record and report the updates since the last record; if ``validate``, measure the validation loss first."""
    state, measured = run.state, list[float]()
    if validate:
        with run.watcher.recorder.phase(Phase.EVALUATE, Work(state.step)):
            measured = _validate(run)
            state.valid_loss = measured[0]
            state.base_valid_loss = measured[0] if state.step == 0 else state.base_valid_loss
    per_epoch = updates_per_epoch(len(run.job.rows.train), run.job.settings.rows_per_update)
    state.records.append(
        StepRecord(
            step=state.step,
            epoch=round(state.cursor.epoch + state.cursor.step_in_epoch / per_epoch, 6),
            train_loss=state.since_record_loss / state.since_record_terms if state.since_record_terms else None,
            valid_loss=measured[0] if measured else None,
            learning_rate=_rate_after(run, state.step - 1) if state.step else None,
            grad_norm=state.grad_norm,
            labels=state.labels,
            labels_per_second=round(state.since_record_labels / state.since_record_seconds, 1)
            if state.since_record_seconds
            else None,
            peak_memory_bytes=state.peak_memory_bytes,
            footprint_bytes=footprint_bytes(os.getpid()),
            elapsed_seconds=round(state.elapsed_seconds, 3),
            **dict(zip(OF_PAIRS, measured[1:], strict=False)),
        )
    )
    state.recorded_step = state.step
    state.since_record_loss = state.since_record_seconds = 0.0
    state.since_record_terms = state.since_record_labels = 0
    if run.ranks.writes:
        run.write(RECORD_BYTES, lambda: run.watcher.record(state.records))


def _validate(run: TrainingRun) -> list[float]:
    """Measure the validation loss, and for pairs OF_PAIRS, each rank on its part; save a new best adapter."""
    job, state, ranks, data = run.job, run.state, run.ranks, run.job.rows.valid

    def beat(batch: MicroBatch) -> None:
        run.check_stop()
        work = work_of(batch, state.step - 1, 0)
        run.watcher.recorder.write(Phase.EVALUATE, Edge.BEFORE, dataclasses.replace(work, row_ids=()))

    labels = int(data.label_counts.sum(dtype=np.int64))
    if not labels:
        raise DataError("No token of the validation rows is a label.", do="add rows with answers to data/valid")
    pair_loss, terms = run.gradients.pair_loss, labels
    if ranks.together:
        order = data.by_length if pair_loss is None else np.arange(len(data) // 2)
        data = data.take(data.rows_of(order[ranks.rank :: ranks.size]))
    losses = row_losses(run.model, data, run.layout.most_tokens, beat)
    sums = [float(losses.sum())]
    counts = data.label_counts
    if pair_loss is not None:
        scores = pair_loss.scores(-losses, data)
        losses, sums, terms = scores.losses, scores.sums, len(job.rows.valid) // 2
        counts = np.ones(len(losses), dtype=np.int64)
    if ranks.together:  # the same bits on all
        sums = ranks.total(run.watcher.stop(), state.step, *sums)
    measured = [each / terms for each in sums]
    loss = measured[0]
    if not math.isfinite(loss):
        do = f"check the base: safetrain chat --base --model {shlex.quote(job.base)}; or train with {LOWER_RATE}"
        raise TrainingError(f"The validation loss is not a number at step {state.step}.", got=str(loss), do=do)
    if state.step > 0 and (state.best_valid_loss is None or loss < state.best_valid_loss):
        if ranks.writes:
            size = bytes_of(adapter_weights(run.model))
            run.write(size, lambda: save_best(job, run.model))
            state.best_sha256 = sha256_of(job.adapters / ADAPTER_FILE)
        state.best_valid_loss, state.best_step, state.validations_since_best = loss, state.step, 0
    elif state.step > 0:
        state.validations_since_best += 1
    if job.stop_at_step is not None and state.step > 0:
        own = (np.asarray(losses), counts) if state.best_step == state.step else None
        run.write(16 * len(counts), lambda: save_row_losses(job.output, state.step, state.best_step, own))
    return measured


def save(run: TrainingRun) -> None:
    """Write a checkpoint unless the newest one has this state; wait for free space if the disk is full.

    Several ranks compare their weights first.
    """
    job, state, here = run.job, run.state, (run.state.step, run.state.recorded_step)
    if run.saved == here:
        return
    run.saved = here
    if run.ranks.together:
        require_same_weights(run.ranks, run.model, state.step)
    if run.ranks.writes:
        with run.watcher.recorder.phase(Phase.SAVE, Work(state.step)):
            size = size_of(run.model, run.optimizer, len(state.records))
            run.write(size, lambda: save_checkpoint(job, state, run.model, run.optimizer))


def fault_in(summed_loss: float, norm: float, labels: int, recent: Sequence[float], max_jump: float | None) -> str:
    """Describe what is wrong with an update; empty if nothing. ``recent``: earlier losses, in nats per label.

    A jump is above all ``recent`` losses, and above their median by ``max_jump``: single rows' losses differ widely.
    """
    if not math.isfinite(summed_loss):
        return "the loss is not a number"
    if not math.isfinite(norm):
        return "the gradient is not a number"
    loss = summed_loss / labels
    if max_jump is not None and len(recent) >= ENOUGH and loss > max(*recent, statistics.median(recent) + max_jump):
        return f"the loss jumped to {loss:.2f} from a median of {statistics.median(recent):.2f}"
    return ""


def stop_at(run: TrainingRun, fault: str, loss: float, norm: float, rate: float) -> BadUpdateError:
    """Report an update that is not applied and save the state before it; returns the error to raise.

    The same command stops there again. The report has each row's loss without dropout, in nats per label, the worst
    first; null if not a number. Rows have the numbers of their lines in train.jsonl.
    """
    step, settings = run.state.step + 1, run.job.settings
    path = run.job.output / BAD_UPDATES / f"step_{step}.json"
    update = rows_at(run.job.rows.train, run.state.cursor, settings.seed, settings.rows_per_update)
    places = [row for row in update.rows if update.data.label_counts[row]]
    lines = [row + 1 for row in update.data.numbers(places)]
    if run.ranks.writes:
        data = update.data.take(places)
        losses = (row_losses(run.model, data, 1) / data.label_counts).tolist()  # one by one: NaN spoils other rows
        pairs = sorted(zip(losses, lines, strict=True), key=lambda pair: (math.isfinite(pair[0]), -pair[0]))
        content = {
            "step": step,
            "fault": fault,
            "loss": _number(loss),
            "grad_norm": _number(norm),
            "learning_rate": rate,
            "rows": [{"row": line, "loss": _number(own)} for own, line in pairs],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    if run.state.step:
        save(run)
    some = ", ".join(str(line) for line in sorted(set(lines))[:32])
    is_jump = math.isfinite(loss) and math.isfinite(norm)
    larger = "To allow this jump, set a larger train.max_loss_jump, or null. " if is_jump else ""
    what = f"Update {step} was not applied: {fault}."
    do = f"{larger}Repair these rows in your data, or set {LOWER_RATE}. Then start over: safetrain discard"
    return BadUpdateError(what, where=f"train.jsonl lines {some} in data/validated; loss of each row: {path}", do=do)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _result(run: TrainingRun) -> Result:
    state = run.state
    last = state.recent_losses[-max(1, round(FINAL_SHARE * run.job.updates)) :]
    if not last or state.valid_loss is None or state.best_valid_loss is None:
        raise TrainingError("The run ended without a measured loss.", got=counted(state.step, "update"))
    bits = state.best_valid_loss * run.job.bits_per_byte_of_nat or None
    metrics = TrainingMetrics(
        final_train_loss=statistics.mean(last), valid_loss=state.valid_loss, best_valid_loss=state.best_valid_loss,
        best_step=state.best_step, steps=state.step, best_valid_bits_per_byte=bits,
    )  # fmt: skip
    trainable = sum(weight.size for weight in adapter_weights(run.model).values())
    return Result(metrics, state, trainable, remember_best(run))
