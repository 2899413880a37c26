"""Which rows make which update. The order is a function of (seed, epoch); the position is a value that can be saved."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from safetrain.core.chat import Rendered

WIDTH_STEP = 32  # rows are padded to a multiple of this, plus one for the shifted label, to bound the number of shapes
PAD_ID = 0


@dataclass(frozen=True)
class Cursor:
    """Where the data stands: the next update is number ``window`` of ``epoch``, both from 0."""

    epoch: int
    window: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together."""

    ids: mx.array  # (rows, width) token ids, padded with PAD_ID
    labels: mx.array  # (rows, width - 1) 1.0 where ids[:, 1:] is trained, else 0.0
    rows: tuple[int, ...]  # indices into the training rows


@dataclass(frozen=True)
class Update:
    """The micro-batches of one optimizer update and the number of labels in them."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of every row in the update."""
        return tuple(row for batch in self.micro_batches for row in batch.rows)


def windows_per_epoch(rows: int, rows_per_update: int) -> int:
    """Updates in one pass; the last one may be smaller."""
    return -(-rows // rows_per_update)


def update_at(data: Sequence[Rendered], cursor: Cursor, seed: int, batch_size: int, rows_per_update: int) -> Update:
    """The update at ``cursor``: the same rows whatever the micro-batch size, sorted by length to pad little."""
    order = np.random.default_rng([seed, cursor.epoch]).permutation(len(data))
    window = order[cursor.window * rows_per_update : (cursor.window + 1) * rows_per_update].tolist()
    window.sort(key=lambda row: (len(data[row].ids), row))
    micro = tuple(make_batch(data, window[i : i + batch_size]) for i in range(0, len(window), batch_size))
    return Update(micro, sum(data[row].trained_tokens for row in window))


def advance(cursor: Cursor, rows: int, rows_per_update: int) -> Cursor:
    """The cursor after one update."""
    if cursor.window + 1 < windows_per_epoch(rows, rows_per_update):
        return Cursor(cursor.epoch, cursor.window + 1)
    return Cursor(cursor.epoch + 1, 0)


def in_order(data: Sequence[Rendered], batch_size: int) -> list[MicroBatch]:
    """Every row once, the longest first, so that a shape that does not fit is met at once."""
    order = sorted(range(len(data)), key=lambda row: (-len(data[row].ids), row))
    return [make_batch(data, order[i : i + batch_size]) for i in range(0, len(order), batch_size)]


def make_batch(data: Sequence[Rendered], rows: Sequence[int]) -> MicroBatch:
    """Pad ``rows`` to a common width; padding is never a label."""
    longest = max(len(data[row].ids) for row in rows)
    width = -(-(longest - 1) // WIDTH_STEP) * WIDTH_STEP + 1
    ids = np.full((len(rows), width), PAD_ID, dtype=np.int32)
    labels = np.zeros((len(rows), width - 1), dtype=np.float32)
    for index, row in enumerate(rows):
        item = data[row]
        ids[index, : len(item.ids)] = item.ids
        labels[index, : len(item.ids) - 1] = item.trained[1:]
    return MicroBatch(mx.array(ids), mx.array(labels), tuple(rows))
