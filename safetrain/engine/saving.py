"""What a run writes: records, the best adapter, checkpoints, and a report of an update that is not applied.

Each update is checked between gradient and optimizer, so the weights are always those of the last good update.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.errors import BadUpdateError, TrainingError
from safetrain.core.memory.system import footprint_bytes
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.settings import updates_per_epoch
from safetrain.core.storage.files import sha256_of, write_json
from safetrain.core.storage.paths import BAD_UPDATES
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.batches import MicroBatch, Update, share_of
from safetrain.engine.evaluation import measure_loss, nothing_to_measure, row_losses
from safetrain.engine.ranks import require_same_weights
from safetrain.engine.run import TrainingRun, save_best
from safetrain.engine.state import TEXT_BYTES, best_file, checkpoint_bytes, save_checkpoint
from safetrain.engine.update import work_of
from safetrain.engine.weight_files import ADAPTER_FILE

ENOUGH = 8  # updates before a jump of the loss is called one


def record(run: TrainingRun, rate: float, *, validate: bool) -> None:
    """Record and report the updates since the last record, after validation if that is due.

    ``rate``: the last update's learning rate.
    """
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
            grad_norm=state.grad_norm,
            trained_tokens=state.trained_tokens,
            labels_per_second=round(state.window_tokens / state.window_seconds, 1) if state.window_seconds else None,
            peak_memory_bytes=state.peak_memory_bytes,
            footprint_bytes=footprint_bytes(os.getpid()),
            elapsed_seconds=round(state.elapsed_seconds, 3),
        )
    )
    state.recorded_step = state.step
    state.window_loss, state.window_tokens, state.window_seconds = 0.0, 0, 0.0
    if run.ranks.writes:
        run.write(TEXT_BYTES, lambda: run.watcher.record(state.records))


def _validate(run: TrainingRun) -> float:
    """Measure the validation loss; save a new best to the adapters folder."""
    job, state, model = run.job, run.state, run.model

    def beat(batch: MicroBatch, number: int) -> None:
        run.check_stop()
        work = work_of(batch, state.step - 1, number)
        run.watcher.recorder.write(Phase.EVALUATE, Edge.BEFORE, dataclasses.replace(work, row_ids=()))

    together = run.ranks.together
    loss = _of_all_ranks(run, beat) if together else measure_loss(model, job.valid, run.layout.most_tokens, beat)
    if not math.isfinite(loss):
        raise TrainingError(
            f"The validation loss is not a number at step {state.step}.",
            got=str(loss),
            do="check the base model with 'safetrain ask', or lower train.learning_rate",
        )
    if state.step > 0 and (state.best_valid_loss is None or loss < state.best_valid_loss):
        if run.ranks.writes:
            size = sum(array.nbytes for array in adapter_weights(model).values())
            run.write(size, lambda: save_best(job, model))
            state.best_sha256 = sha256_of(job.adapters / ADAPTER_FILE)
        state.best_valid_loss, state.best_step, state.validations_since_best = loss, state.step, 0
    elif state.step > 0:
        state.validations_since_best += 1
    return loss


def _of_all_ranks(run: TrainingRun, beat: Callable[[MicroBatch, int], None]) -> float:
    """Measure this rank's part of the validation rows; returns the loss of all, the same bits on every rank."""
    data = run.job.valid
    labels = int(data.label_counts.sum(dtype=np.int64))
    if not labels:  # the same on every rank
        raise nothing_to_measure()
    rows = data.take(np.asarray(data.by_length)[share_of(data.inputs(data.by_length), run.ranks.rank, run.ranks.size)])
    summed = float(row_losses(run.model, rows, run.layout.most_tokens, beat).sum()) if len(rows) else 0.0
    total = run.ranks.total(summed, run.watcher.stop(), run.state.step)
    return total / labels


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
    if not run.ranks.writes:
        return

    def write() -> None:
        best, keep = best_file(state, job.adapters / ADAPTER_FILE, job.output), job.keep_checkpoints
        save_checkpoint(job.output, state, job.identity, run.model, run.optimizer, best, keep)

    with run.watcher.recorder.phase(Phase.SAVE, Work(state.step)):
        run.write(checkpoint_bytes(run.model, run.optimizer), write)


def fault_in(summed_loss: float, norm: float, labels: int, recent: Sequence[float], max_jump: float | None) -> str:
    """Describe what is wrong with an update; empty if nothing. ``recent``: nats per label of the updates before it.

    A jump is above them all: updates of one row may have losses of two kinds, as short and long answers do.
    """
    if not math.isfinite(summed_loss):
        return "the loss is not a number"
    if not math.isfinite(norm):
        return "the gradient is not a number"
    loss = summed_loss / labels
    if max_jump is not None and len(recent) >= ENOUGH and loss > max(*recent, statistics.median(recent) + max_jump):
        return f"the loss jumped to {loss:.2f} from a median of {statistics.median(recent):.2f}"
    return ""


def bad_update_path(output: Path, step: int) -> Path:
    """The report file of one bad update."""
    return output / BAD_UPDATES / f"step_{step}.json"


def stop_at(
    run: TrainingRun, update: Update, fault: str, summed_loss: float, norm: float, rate: float
) -> BadUpdateError:
    """Report an update that is not applied and save the state before it; returns the error to raise.

    The same command stops there again. The report has each row's loss without dropout, in nats per label, the worst
    first; null if not a number. Rows are line numbers of data/validated/train.jsonl.
    """
    step = run.state.step + 1
    path = bad_update_path(run.job.output, step)
    if run.ranks.writes:
        places = [row for group in update.groups for row in group if update.data.label_counts[row]]
        losses = [measure_loss(run.model, update.data.take([place]), run.layout.most_tokens) for place in places]
        lines = list(zip(update.data.numbers(places), losses, strict=True))
        lines.sort(key=lambda line: -line[1] if math.isfinite(line[1]) else -math.inf)
        content = {
            "step": step,
            "fault": fault,
            "loss": _number(update.per_label(summed_loss)),
            "grad_norm": _number(norm),
            "learning_rate": rate,
            "rows": [{"row": row + 1, "loss": _number(loss)} for row, loss in lines],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    if run.state.step:
        save(run)
    some = ", ".join(str(row + 1) for row in sorted(set(update.rows))[:32])
    is_jump = math.isfinite(summed_loss) and math.isfinite(norm)
    larger = "To allow this jump: a larger train.max_loss_jump, or null. " if is_jump else ""
    return BadUpdateError(
        f"Update {step} was not applied: {fault}.",
        where=f"rows {some} of data/validated/train.jsonl; loss of each row: {path}",
        do=f"{larger}Repair these rows in your data, or lower train.learning_rate. Then start over: safetrain discard",
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
