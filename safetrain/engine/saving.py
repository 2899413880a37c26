"""What a run writes: records, the best adapter, checkpoints, samples of a model trained from scratch.

It also checks each update between gradient and optimizer and reports a bad one, so the weights are always those of
the last good update.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.errors import BadUpdateError, TrainingError
from safetrain.core.memory.system import footprint_bytes
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import updates_per_epoch
from safetrain.core.run_folder import WrittenSample
from safetrain.core.storage.files import sha256_of, write_json, write_text
from safetrain.core.storage.paths import BAD_UPDATES, SAMPLES
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.batches import MicroBatch, Update, make_batch
from safetrain.engine.evaluation import answer, measure_loss, nothing_to_measure, row_losses
from safetrain.engine.loss import ShardLoss
from safetrain.engine.ranks import require_same_weights
from safetrain.engine.run import TrainingRun, save_best
from safetrain.engine.state import OTHER_TEXT_BYTES, best_file, checkpoint_bytes, save_checkpoint
from safetrain.engine.update import Gradient, UpdateResult, work_of
from safetrain.engine.weight_files import ADAPTER_FILE

SAMPLES_TAKEN, PROMPT_TOKENS, SAMPLE_TOKENS = 3, 8, 32  # of a model that is trained from scratch
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
        run.disk.write(OTHER_TEXT_BYTES, state.step, lambda: run.watcher.record(state.records))
    if validate and state.step:
        _take_samples(run)


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
            run.disk.write(size, state.step, lambda: save_best(job, model))
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
    rows = data.take(np.asarray(data.by_length)[run.share.of(data.inputs(data.by_length))])
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
        run.disk.write(checkpoint_bytes(run.model, run.optimizer, len(state.records)), state.step, write)


def _take_samples(run: TrainingRun) -> None:
    """Generate samples in pretraining: unprompted, and from the first tokens of validation documents.

    One sample is printed, all go to a file for people to read. A model without a tokenizer.json gets no samples.
    """
    job, step, recorder, file = run.job, run.state.step, run.watcher.recorder, run.job.base_folder / "tokenizer.json"
    ends = job.rows.prompt_format.stop_ids if job.rows.prompt_format else ()
    if job.settings.method != PRETRAIN or not run.ranks.writes or not ends or not file.is_file():
        return
    from tokenizers import Tokenizer  # only here: an engine that writes no samples starts without it

    def beat(_done: float) -> None:
        recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(step))

    tokenizer, prompts, path = Tokenizer.from_file(str(file)), _prompts(job.valid, ends), job.output / SAMPLES
    with recorder.phase(Phase.EVALUATE, Work(step)):
        tails = answer(run.model, prompts, frozenset(ends), SAMPLE_TOKENS, run.layout.most_tokens, beat)
    pairs = [(tokenizer.decode(prompt[1:]), tokenizer.decode(ids)) for prompt, ids in zip(prompts, tails, strict=True)]
    samples = [*_samples_before(path, step), *(WrittenSample(step, prompt, text) for prompt, text in pairs)]
    text = "".join(f"{json.dumps(vars(each), ensure_ascii=False)}\n" for each in samples)
    run.disk.write(len(text.encode()), step, lambda: write_text(path, text))
    prompt, written = pairs[-1]
    run.watcher.say(f"step {step} writes: {prompt}[{written.strip()}]".replace("\n", " "))


def _prompts(valid: TokenRows, ends: tuple[int, ...]) -> list[list[int]]:
    """Prompts of the samples: the token that starts documents, then a few documents' first tokens."""
    some = np.linspace(0, len(valid) - 1, min(len(valid), 16 * SAMPLES_TAKEN)).round().astype(int).tolist()
    documents = [valid[row].ids for row in dict.fromkeys(some) if int(valid[row].ids[0]) in ends]
    beginnings = [ids[: 1 + PROMPT_TOKENS].tolist() for ids in documents if len(ids) > PROMPT_TOKENS]
    return [[statistics.mode([int(ids[0]) for ids in documents] or ends[:1])], *beginnings[:SAMPLES_TAKEN]]


def _samples_before(path: Path, step: int) -> list[WrittenSample]:
    """Samples of earlier steps in the file; other lines are dropped."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    samples = list[WrittenSample]()
    for line in text.split("\n"):  # a text may hold other characters that splitlines() divides at
        try:
            samples.append(WrittenSample(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return [each for each in samples if each.step < step]


@dataclass(frozen=True)
class RefusedUpdate:
    """An update that is not applied."""

    step: int  # its number, from 1
    fault: str
    result: UpdateResult
    rate: float
    update: Update
    gradient: Gradient


def fault_in(result: UpdateResult, labels: int, recent: Sequence[float], max_jump: float | None) -> str:
    """Describe what is wrong with an update; empty if nothing. ``recent``: nats per label of the updates before it.

    A jump is above them all: updates of one row may have losses of two kinds, as short and long answers do.
    """
    if not math.isfinite(result.summed_loss):
        return "the loss is not a number"
    if not math.isfinite(result.grad_norm):
        return "the gradient is not a number"
    loss = result.summed_loss / labels
    if max_jump is not None and len(recent) >= ENOUGH and loss > max(*recent, statistics.median(recent) + max_jump):
        return f"the loss jumped to {loss:.2f} from a median of {statistics.median(recent):.2f}"
    return ""


def path_of(output: Path, step: int) -> Path:
    """The report file of one bad update."""
    return output / BAD_UPDATES / f"step_{step}.json"


def stop_at(run: TrainingRun, refused: RefusedUpdate) -> BadUpdateError:
    """Report an update that is not applied and save the state before it; returns the error to raise.

    The same command stops there again.
    """
    path = path_of(run.job.output, refused.step)
    if run.ranks.writes:
        _write_down(run, refused, path)
    if run.state.step:
        save(run)
    rows = ", ".join(str(row + 1) for row in sorted(set(refused.update.rows))[:32])
    numbers = refused.result.summed_loss, refused.result.grad_norm
    larger = "To allow this jump: a larger train.max_loss_jump, or null. " if all(map(math.isfinite, numbers)) else ""
    return BadUpdateError(
        f"Update {refused.step} was not applied: {refused.fault}.",
        where=f"rows {rows} of data/validated/train.jsonl; loss of each row: {path}",
        do=f"{larger}Repair these rows in your data, or lower train.learning_rate. Then start over: safetrain discard",
    )


def _write_down(run: TrainingRun, refused: RefusedUpdate, path: Path) -> None:
    """Measure each row of the update separately, without dropout; write the update's numbers and the rows' losses.

    Losses are in nats per label, null if not a number. Rows are line numbers of data/validated/train.jsonl, the worst
    first.
    """
    run.model.module.eval()
    loss_of, update, data = ShardLoss(run.model, training=False), refused.update, refused.update.data
    single, losses = dataclasses.replace(run.layout, shards=1), list[tuple[int, float]]()
    for row in (row for group in update.groups for row in group if data.label_counts[row]):
        (shard,) = make_batch(data, [row], single).shards
        losses.append((data.numbers([row])[0] + 1, float(np.array(loss_of(shard))) / int(data.label_counts[row])))
    losses.sort(key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    bad = [name for name, array in tree_flatten(refused.gradient) if not mx.all(mx.isfinite(array)).item()]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "step": refused.step,
        "fault": refused.fault,
        "loss": _number(update.per_label(refused.result.summed_loss)),
        "grad_norm": _number(refused.result.grad_norm),
        "learning_rate": refused.rate,
        "not_finite": bad,  # parameters whose gradient is not a number
        "rows": [{"row": row, "loss": _number(loss)} for row, loss in losses],
    }
    write_json(path, content)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
