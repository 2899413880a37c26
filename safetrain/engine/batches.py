"""The layout of an update's rows (core/data/training_rows.py) in memory.

Rows become lists of tokens, longest row first, cut into micro-batches of limited size. The cut changes the gradient
only by rounding, because it is a sum over labels. On CPU rows are not padded.

On a GPU rows are padded to rectangles, because mlx compiles a program for each shape and keeps it. A shape is a width,
a number of rows and a number of labels, each rounded up, so that even a large dataset needs few programs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows, TrainRows
from safetrain.core.data.training_rows import Cursor, rows_at
from safetrain.core.memory.terms import width_of, widths_of
from safetrain.core.records.settings import PADDING_TOKENS
from safetrain.engine.backend import device
from safetrain.engine.model import BaseModel
from safetrain.engine.row_attention import Block, Gather, PackedRows

LARGEST_WASTE = 4000  # padded attention scores per row that cost about as much as another rectangle
LABEL_STEP = 64  # a list of labels is padded to a multiple of this
LABEL_SHARES = 4  # in a rectangle the list is padded to one of about this many sizes
PLACE = 2**32 - 1  # low bits of a token's number: its place in its row; the higher bits are the row


@dataclass(frozen=True)
class BatchLayout:
    """How rows become lists of tokens."""

    most_tokens: int  # of a micro-batch, padding included
    shards: int = 1  # lists per micro-batch, computed in parallel
    rectangles: bool = False  # whether each list is one rectangle of padded rows
    rows_per_pair: int = 1  # rows that stay in one list: 2 for pairs, whose loss needs both rows in one graph
    padding_tokens: int = PADDING_TOKENS  # of a rectangle, at most


def layout_for(model: BaseModel, most_tokens: int) -> BatchLayout:
    """The layout for computing at most ``most_tokens`` tokens at a time."""
    return BatchLayout(most_tokens, device().shards, rectangles=not model.packs_rows)


def training_layout(model: BaseModel, batch_size: int, data: TrainRows) -> BatchLayout:
    """The layout for training on ``batch_size`` of the longest rows at once, or on one pair."""
    unit, longest = data.documents.rows_per_pair, width_of(int(data.inputs().max()), rectangles=not model.packs_rows)
    return dataclasses.replace(layout_for(model, max(batch_size, unit) * longest), rows_per_pair=unit)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a shard: rows of the pairs in sequence, chosen before rejected."""

    rows: mx.array  # (labels,) each label's row, 0 for padding
    lengths: mx.array  # (rows,) labels
    references: mx.array  # (rows,) the reference's log-probabilities


@dataclass(frozen=True)
class Shard:
    """Rows that go through the model together, with their labels."""

    inputs: mx.array  # (tokens,) ids, padded with 0
    layout: PackedRows
    positions: mx.array  # (labels,) places in the list whose next token is a label
    targets: mx.array  # (labels,) those next tokens
    weights: mx.array  # (labels,) 1.0, and 0.0 where the list of labels itself is padded
    rows: tuple[int, ...]  # their numbers in messages
    token_keys: Any  # (tokens,) a number for each: its row and its place in it, whatever the layout
    pairs: Pairs | None = None  # if both rows of a pair are here

    @property
    def label_rows(self) -> np.ndarray:
        """(labels,) index of each label's row; arbitrary for padding."""
        return self.token_keys[np.array(self.positions)] >> 32


@dataclass(frozen=True)
class MicroBatch:
    """Shards that are computed at the same time."""

    shards: tuple[Shard, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Row numbers as messages show them."""
        return tuple(row for shard in self.shards for row in shard.rows)


@dataclass(frozen=True)
class Update:
    """The micro-batches of one optimizer update of ``data``, and its token counts."""

    data: TokenRows
    micro_batches: tuple[MicroBatch, ...]
    labels: int
    input_tokens: int  # of the rows themselves, padding not counted
    computed_tokens: int  # with padding
    pairs: int = 0  # the mean is over labels, or over pairs if there are any
    scale: float = 1.0  # factor on the loss that is differentiated, against underflow in float16

    @property
    def share(self) -> float:
        """The weight of a label, or a pair, in the loss that is differentiated: its share of the mean, times scale."""
        return self.scale / max(1, self.pairs or self.labels)


def update_at(
    data: TrainRows, cursor: Cursor, seed: int, rows_per_update: int, layout: BatchLayout, rank: int = 0, ranks: int = 1
) -> Update:
    """Build the update at ``cursor``. The layout does not change its rows.

    With several ranks it holds only one rank's micro-batches, perhaps none; label and token counts cover all ranks.
    Ranks take the rows in turn, the longest first; which rank computes a row changes sums only by rounding.
    """
    update = rows_at(data, cursor, seed, rows_per_update)
    rows, own = update.rows, update.rows[rank::ranks]
    if update.data.rows_per_pair > 1:  # ranks share pairs
        own = update.data.of_update(_by_pair(update.data, rows)[rank::ranks].reshape(-1)).rows
    return update_of_rows(update.data, list(fill(update.data, own, layout)), layout, rows)


def _by_pair(data: TokenRows, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """(pairs, 2) the rows of whole pairs; the pair with the longest row first."""
    pairs = np.sort(np.asarray(rows, dtype=np.int64)).reshape(-1, 2)
    return pairs[np.lexsort((pairs[:, 0], -data.lengths[pairs].max(axis=1)))]


def update_of_rows(
    data: TokenRows, groups: Sequence[Sequence[int]], layout: BatchLayout, counted: Sequence[int] | None = None
) -> Update:
    """Build an update from groups of rows, one micro-batch per group. ``counted``: all ranks' rows, for its counts."""
    rows = np.array([row for rows in groups for row in rows] if counted is None else counted, dtype=np.int64)
    pairs = len(rows) // 2 if data.rows_per_pair == 2 else 0
    batches = tuple(make_batch(data, rows, layout) for rows in groups)
    labels, inputs = (int(each.sum(dtype=np.int64)) for each in (data.label_counts[rows], data.inputs(rows)))
    computed = sum(shard.inputs.size for batch in batches for shard in batch.shards)
    return Update(data, batches, labels, inputs, computed, pairs)


def in_order(data: TokenRows, layout: BatchLayout) -> Iterator[MicroBatch]:
    """Yield micro-batches that hold every row once, the longest first."""
    for rows in fill(data, data.by_length, layout):
        yield make_batch(data, rows, layout)


def fill(data: TokenRows, rows: Sequence[int] | np.ndarray, layout: BatchLayout) -> Iterator[list[int]]:
    """Divide ``rows``, sorted longest first, into groups: one row, or at most ``most_tokens`` tokens with padding.

    In a layout of pairs, a group holds whole pairs.
    """
    if layout.rows_per_pair > 1:
        yield from _fill_with_pairs(data, rows, layout)
        return
    order = np.asarray(rows, dtype=np.int64)
    widths = data.inputs(order)
    ends = np.cumsum(widths, dtype=np.int64)
    start = 0
    while start < len(order):
        before = int(ends[start]) - int(widths[start])
        if layout.rectangles:
            stop = start + _rows_together(widths[start:], layout)
        else:
            stop = int(np.searchsorted(ends, before + layout.most_tokens, side="right"))
        stop = max(start + 1, stop)
        yield order[start:stop].tolist()
        start = stop


def _fill_with_pairs(data: TokenRows, rows: Sequence[int] | np.ndarray, layout: BatchLayout) -> Iterator[list[int]]:
    """Divide whole pairs into groups of at most ``most_tokens`` tokens with padding, or of one pair."""
    group, tokens = list[int](), 0
    for pair in _by_pair(data, rows):
        widest = int(widths_of(data.inputs(group or pair).max()))
        wide = len(pair) * widest if layout.rectangles else int(data.inputs(pair).sum())
        if group and tokens + wide > layout.most_tokens:
            yield group
            group, tokens = [], 0
        group, tokens = [*group, *pair.tolist()], tokens + wide
    if group:
        yield group


def _rows_together(widths: np.ndarray, layout: BatchLayout) -> int:
    """How many of the longest rows to put in one rectangle before padding costs more than another rectangle."""
    width = int(widths_of(widths[0]))
    most = max(1, layout.most_tokens // width)
    rows = int(np.searchsorted(np.cumsum(width - widths_of(widths[:most])), layout.padding_tokens, side="right"))
    return most if rows >= most else 2 ** (rows.bit_length() - 1)  # few distinct numbers of rows


def make_batch(data: TokenRows, rows: Sequence[int], layout: BatchLayout) -> MicroBatch:
    """Divide ``rows``, sorted longest first, into shards of about equal work, and lay each out."""
    shares: list[list[int]] = [[] for _ in range(min(layout.shards, len(rows) // layout.rows_per_pair))]
    tokens = [0] * len(shares)
    for kept in np.asarray(rows, dtype=np.int64).reshape(-1, layout.rows_per_pair):
        least = tokens.index(min(tokens))
        shares[least] += kept.tolist()
        tokens[least] += int(data.inputs(kept).sum())
    return MicroBatch(tuple(make_shard(data, share, layout) for share in shares))


def make_shard(data: TokenRows, rows: Sequence[int], layout: BatchLayout) -> Shard:
    """Concatenate rows, the longest first; padding is never a label."""
    if layout.rows_per_pair > 1:
        rows = sorted(rows, key=lambda row: (-int(data.lengths[row]), row))
    widths, labels = data.inputs(rows), int(data.label_counts[list(rows)].sum())
    width = int(widths_of(widths[0])) if layout.rectangles else 0
    blocks = (Block(0, len(rows) * width, len(rows), width),) if width else _blocks(widths.tolist())
    size = blocks[-1].stop
    ids, next_ids = np.zeros((2, size), dtype=np.int32)
    trained, tokens = np.zeros(size, dtype=bool), np.zeros(size, dtype=np.int64)
    start = 0
    for row, length in zip(rows, widths.tolist(), strict=True):
        item, end, following = data[row], start + length, start + (width or length)
        ids[start:end], next_ids[start:end], trained[start:end] = item.ids[:-1], item.ids[1:], item.trained[1:]
        tokens[start:following] = (row << 32) + np.arange(following - start)
        start = following
    positions = np.flatnonzero(trained)
    step = -(-size // (LABEL_SHARES * LABEL_STEP)) * LABEL_STEP if layout.rectangles else LABEL_STEP
    padding = max(step * layout.rectangles, -(-labels // step) * step) - labels
    return Shard(
        inputs=mx.array(ids),
        layout=PackedRows(mx.array((tokens & PLACE).astype(np.int32)), blocks),
        positions=mx.array(np.pad(positions, (0, padding)).astype(np.int32)),
        targets=mx.array(np.pad(next_ids[positions], (0, padding))),
        weights=mx.array(np.pad(np.ones(labels, dtype=np.float32), (0, padding))),
        rows=tuple(data.numbers(rows)),
        token_keys=tokens,
        pairs=_pairs_of(data, rows, np.pad(tokens[positions] >> 32, (0, padding)))
        if layout.rows_per_pair > 1
        else None,
    )


def _pairs_of(data: TokenRows, rows: Sequence[int], label_rows: np.ndarray) -> Pairs:
    """The pairs of a shard; ``label_rows``, (labels,): the row of each label, 0 for padding."""
    order = np.sort(rows)
    places = np.clip(np.searchsorted(order, label_rows), 0, len(order) - 1)
    lengths = mx.array(data.label_counts[order].astype(np.float32))
    return Pairs(mx.array(places.astype(np.int32)), lengths, mx.array(data.reference(order)))


def _blocks(widths: Sequence[int]) -> tuple[Block, ...]:
    """Rectangles for the attention of unpadded rows of these widths, widest first.

    Short rows share one rectangle; a long row shares one only with rows of nearly the same length.
    """
    groups: list[list[int]] = []
    for width in widths:
        if groups and groups[-1][0] ** 2 - width**2 <= LARGEST_WASTE:
            groups[-1].append(width)
        else:
            groups.append([width])
    blocks, start = [], 0
    for group in groups:
        blocks.append(Block(start, start + sum(group), len(group), group[0], _gather(group)))
        start += sum(group)
    return tuple(blocks)


def _gather(widths: list[int]) -> Gather | None:
    """Indices that gather rows of these widths into a rectangle; None if all widths are equal."""
    if len(set(widths)) == 1:
        return None
    starts = np.cumsum([0, *widths[:-1]])
    place = np.arange(widths[0])[None, :]
    real = place < np.array(widths)[:, None]  # (rows, width)
    return Gather(
        places=mx.array(np.where(real, starts[:, None] + place, 0).ravel().astype(np.int32)),
        real=mx.array(real.ravel().astype(np.float32)[:, None, None, None]),
        back=mx.array(np.flatnonzero(real).astype(np.int32)),
    )
