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
from safetrain.engine.batches import BatchLayout, Update, make_batch
from safetrain.engine.loss import ShardLoss
from safetrain.engine.model import BaseModel
from safetrain.engine.update import Gradient, UpdateResult

REMEMBERED = 32  # updates whose losses a new one is compared with
ENOUGH = 8  # of them, before a jump is called one


@dataclass(frozen=True)
class RowLoss:
    """One row of the update, alone, with dropout off."""

    row: int  # line number in data/validated/train.jsonl
    loss: float | None  # nats per label; None: not a number


@dataclass(frozen=True)
class BadUpdate:
    """What is written down about an update that was not applied."""

    step: int
    fault: str
    loss: float | None  # nats per label
    grad_norm: float | None
    learning_rate: float
    not_finite: tuple[str, ...]  # parameters whose gradient is not a number
    rows: tuple[RowLoss, ...]


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


def remember(recent: Sequence[float], loss: float) -> list[float]:
    """The losses to compare the next update with."""
    return [*recent, loss][-REMEMBERED:]


def path_of(output: Path, step: int) -> Path:
    """The file about one update."""
    return output / BAD_UPDATES / f"step_{step}.json"


def write_down(output: Path, refused: RefusedUpdate, model: BaseModel, layout: BatchLayout) -> Path:
    """Measure each row of the update by itself and leave everything in ``output/bad_updates``; returns the file."""
    model.module.eval()
    loss, update, data = ShardLoss(model, training=False), refused.update, refused.update.data
    single = dataclasses.replace(layout, shards=1)
    rows = []
    for row in (row for group in update.groups for row in group if data.label_counts[row]):
        (shard,) = make_batch(data, [row], single).shards
        rows.append(
            RowLoss(data.numbers([row])[0] + 1, _number(float(np.array(loss(shard))) / int(data.label_counts[row])))
        )
    bad = [name for name, array in tree_flatten(refused.gradient) if not mx.all(mx.isfinite(array)).item()]
    record = BadUpdate(
        step=refused.step,
        fault=refused.fault,
        loss=_number(update.per_label(refused.result.summed_loss)),
        grad_norm=_number(refused.result.grad_norm),
        learning_rate=refused.rate,
        not_finite=tuple(bad),
        rows=tuple(sorted(rows, key=lambda item: -math.inf if item.loss is None else -item.loss)),
    )
    path = path_of(output, refused.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(record))
    return path


def bad_update_error(refused: RefusedUpdate, path: Path) -> BadUpdateError:
    """What to say when training ends there: the same command stops there again."""
    rows = ", ".join(str(row + 1) for row in sorted(set(refused.update.rows))[:32])
    numbers = refused.result.summed_loss, refused.result.grad_norm
    larger = "To allow this jump: a larger train.max_loss_jump, or null. " if all(map(math.isfinite, numbers)) else ""
    return BadUpdateError(
        f"Update {refused.step} was not applied: {refused.fault}.",
        where=f"rows {rows} of data/validated/train.jsonl; each one's loss: {path}",
        do=f"{larger}Repair these rows in your data, or lower train.learning_rate. Then start over: safetrain discard",
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
