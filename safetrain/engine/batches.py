"""Which rows make which update. The order is a function of (seed, epoch); the position is a value that can be saved."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from safetrain.core.chat import Rendered
from safetrain.core.memory import padded
from safetrain.core.settings import updates_per_epoch

LABEL_STEP = 64  # the list of labels is padded to a multiple of this, which bounds the number of shapes
PAD_ID = 0


@dataclass(frozen=True)
class Cursor:
    """Where the data stands: the next update is number ``window`` of ``epoch``, both from 0."""

    epoch: int
    window: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, and the labels in them."""

    inputs: mx.array  # (rows, width) token ids, padded with PAD_ID
    positions: mx.array  # (labels,) places in the flattened inputs whose next token is a label
    targets: mx.array  # (labels,) those next tokens
    weights: mx.array  # (labels,) 1.0, and 0.0 where the list of labels itself is padded
    rows: tuple[int, ...]  # indices into the training rows


@dataclass(frozen=True)
class Update:
    """The micro-batches of one optimizer update and the number of labels and tokens in them."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int
    input_tokens: int  # of the rows themselves, padding not counted

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of every row in the update."""
        return tuple(row for batch in self.micro_batches for row in batch.rows)


def update_at(data: Sequence[Rendered], cursor: Cursor, seed: int, batch_size: int, rows_per_update: int) -> Update:
    """The update at ``cursor``: the same rows whatever the micro-batch size, the longest first, to pad little.

    The longest row of all is in the first update of an epoch, so a shape that does not fit is met at once.
    """
    order = np.random.default_rng([seed, cursor.epoch]).permutation(len(data))
    longest = int(np.argmax([len(data[row].ids) for row in order]))
    order[[0, longest]] = order[[longest, 0]]
    window = order[cursor.window * rows_per_update : (cursor.window + 1) * rows_per_update].tolist()
    window.sort(key=lambda row: (-len(data[row].ids), row))
    micro = tuple(make_batch(data, window[i : i + batch_size]) for i in range(0, len(window), batch_size))
    return Update(micro, sum(data[row].trained_tokens for row in window), sum(len(data[row].ids) - 1 for row in window))


def advance(cursor: Cursor, rows: int, rows_per_update: int) -> Cursor:
    """The cursor after one update."""
    if cursor.window + 1 < updates_per_epoch(rows, rows_per_update):
        return Cursor(cursor.epoch, cursor.window + 1)
    return Cursor(cursor.epoch + 1, 0)


def in_order(data: Sequence[Rendered], max_tokens: int) -> Iterator[MicroBatch]:
    """Every row once, the longest first, in batches of at most ``max_tokens``, padding included, or of one row."""
    order = sorted(range(len(data)), key=lambda row: (-len(data[row].ids), row))
    while order:
        width = padded(len(data[order[0]].ids) - 1)
        size = max(1, max_tokens // width)
        yield make_batch(data, order[:size])
        order = order[size:]


def make_batch(data: Sequence[Rendered], rows: Sequence[int]) -> MicroBatch:
    """Pad ``rows`` to a common width and list their labels; padding is never a label."""
    width = padded(max(len(data[row].ids) for row in rows) - 1)
    inputs = np.full((len(rows), width), PAD_ID, dtype=np.int32)
    trained = np.zeros((len(rows), width), dtype=bool)
    next_ids = np.full((len(rows), width), PAD_ID, dtype=np.int32)
    for index, row in enumerate(rows):
        item, length = data[row], len(data[row].ids) - 1
        inputs[index, :length] = item.ids[:-1]
        next_ids[index, :length] = item.ids[1:]
        trained[index, :length] = item.trained[1:]
    positions = np.flatnonzero(trained)
    padding = -len(positions) % LABEL_STEP
    weights = np.pad(np.ones(len(positions), dtype=np.float32), (0, padding))
    positions = np.pad(positions, (0, padding))
    return MicroBatch(
        mx.array(inputs),
        mx.array(positions.astype(np.int32)),
        mx.array(next_ids.ravel()[positions]),
        mx.array(weights),
        tuple(rows),
    )
