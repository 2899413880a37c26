"""Recognises an update that must not be applied, and writes down what was in it.

The check comes between gradient and optimizer, so the weights are always those of the last good update.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from safetrain.core.errors import BadUpdateError
from safetrain.core.storage.files import write_json
from safetrain.core.storage.paths import BAD_UPDATES
from safetrain.engine.batches import Update, make_batch
from safetrain.engine.loss import ShardLoss
from safetrain.engine.run import TrainingRun
from safetrain.engine.saving import save
from safetrain.engine.update import Gradient, UpdateResult

ENOUGH = 8  # updates before a jump is called one


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
    """What is wrong with an update, empty if nothing. ``recent``: nats per label of the updates before it.

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
    """The file about one update."""
    return output / BAD_UPDATES / f"step_{step}.json"


def stop_at(run: TrainingRun, refused: RefusedUpdate) -> BadUpdateError:
    """Write down an update that is not applied and save the state before it; returns the error to end with.

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
        where=f"rows {rows} of data/validated/train.jsonl; each one's loss: {path}",
        do=f"{larger}Repair these rows in your data, or lower train.learning_rate. Then start over: safetrain discard",
    )


def _write_down(run: TrainingRun, refused: RefusedUpdate, path: Path) -> None:
    """Measure each row of the update alone, with dropout off, and write numbers of the update and losses of its rows.

    Losses in nats per label, null for what is not a number; rows by their line in data/validated/train.jsonl, the
    worst first.
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
