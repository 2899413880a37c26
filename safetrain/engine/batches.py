"""How the rows of an update (core/data/row_order.py) lie in memory.

They are laid out as lists of tokens, longest row first, cut into micro-batches by a bound on tokens; that changes the
gradient by rounding alone, because it is a sum over labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.row_order import Cursor, rows_at
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.memory_terms import padded
from safetrain.engine.row_attention import Block, Gather, Rows

LABEL_STEP = 64  # the list of labels is padded to a multiple of this
LARGEST_WASTE = 4000  # scores of padding per row that cost about what a rectangle of its own does
PAD_ID = 0


@dataclass(frozen=True)
class Layout:
    """How rows become lists of tokens.

    ``list_like``: the model takes lists; otherwise each part is one rectangle. ``masked``: attention is one call under
    a mask (GPU), and a list is padded to one of ``sizes``, pairs of (tokens, labels), where there are any.
    """

    most_tokens: int  # of a micro-batch, padding included
    parts: int = 1  # lists that a micro-batch is divided into, to be computed side by side
    list_like: bool = True
    masked: bool = False
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Part:
    """Rows that go through the model together, and the labels in them."""

    inputs: mx.array  # (tokens,) ids, padded with PAD_ID
    layout: Rows
    positions: mx.array  # (labels,) places in the list whose next token is a label
    targets: mx.array  # (labels,) those next tokens
    weights: mx.array  # (labels,) 1.0, and 0.0 where the list of labels itself is padded
    row_lengths: mx.array  # (tokens,) tokens of the row that each token belongs to
    rows: tuple[int, ...]  # indices into the training rows
    tokens: Any  # (tokens,) a number for each: its row and its place in it, whatever the layout


@dataclass(frozen=True)
class MicroBatch:
    """Parts that are computed at the same time."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of its rows."""
        return tuple(row for part in self.parts for row in part.rows)


@dataclass(frozen=True)
class Update:
    """The micro-batches of one optimizer update and what is in them."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int
    input_tokens: int  # of the rows themselves, padding not counted
    computed_tokens: int  # with padding

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of every row in the update."""
        return tuple(row for batch in self.micro_batches for row in batch.rows)


def update_at(data: TokenRows, cursor: Cursor, seed: int, rows_per_update: int, layout: Layout) -> Update:
    """The update at ``cursor``: the same rows whatever the layout."""
    return update_of_rows(data, fill(data, rows_at(data, cursor, seed, rows_per_update), layout), layout)


def update_of_rows(data: TokenRows, groups: Sequence[Sequence[int]], layout: Layout) -> Update:
    """The update of these groups of rows, a micro-batch each."""
    batches = tuple(make_batch(data, rows, layout) for rows in groups)
    tokens = sum(part.inputs.size for batch in batches for part in batch.parts)
    window = np.array([row for rows in groups for row in rows], dtype=np.int64)
    return Update(batches, int(data.label_counts[window].sum()), int(data.inputs(window).sum()), tokens)


def in_order(data: TokenRows, layout: Layout) -> Iterator[MicroBatch]:
    """Every row once, the longest first."""
    for rows in groups_of(data, data.by_length, layout):
        yield make_batch(data, rows, layout)


def fill(data: TokenRows, rows: Sequence[int], layout: Layout) -> list[list[int]]:
    """``rows``, sorted longest first, in groups of at most ``most_tokens`` tokens, padding included, or of one row."""
    return list(groups_of(data, rows, layout))


def groups_of(data: TokenRows, rows: Sequence[int] | np.ndarray, layout: Layout) -> Iterator[list[int]]:
    """The groups of ``fill``, one at a time."""
    chosen = np.asarray(rows, dtype=np.int64)
    widths = data.inputs(chosen)
    ends = np.cumsum(widths, dtype=np.int64)
    start = 0
    while start < len(chosen):
        if layout.list_like:
            before = int(ends[start]) - int(widths[start])
            stop = int(np.searchsorted(ends, before + layout.most_tokens, side="right"))
        else:  # a rectangle is as wide as its first row
            stop = start + layout.most_tokens // padded(int(widths[start]))
        stop = max(start + 1, stop)
        yield chosen[start:stop].tolist()
        start = stop


def make_batch(data: TokenRows, rows: Sequence[int], layout: Layout) -> MicroBatch:
    """Divide ``rows``, sorted longest first, into parts of about equal work, and lay each out."""
    shares: list[list[int]] = [[] for _ in range(min(layout.parts, len(rows)))]
    tokens = [0] * len(shares)
    for row, width in zip(rows, data.inputs(rows).tolist(), strict=True):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += width
    return MicroBatch(tuple(make_part(data, share, layout) for share in shares))


def make_part(data: TokenRows, rows: Sequence[int], layout: Layout) -> Part:
    """Lay rows, sorted longest first, one after the other; padding is never a label."""
    widths = data.inputs(rows).tolist()
    blocks = _blocks(widths, layout)
    size, label_size = _sizes(blocks[-1].stop, int(data.label_counts[list(rows)].sum()), layout)
    ids, next_ids = np.full(size, PAD_ID, dtype=np.int32), np.full(size, PAD_ID, dtype=np.int32)
    trained, segments = np.zeros(size, dtype=bool), np.full(size, -1, dtype=np.int32)
    offsets, lengths = np.arange(size, dtype=np.int32), np.ones(size, dtype=np.float32)
    step = blocks[0].width if not layout.list_like else None  # padded rows are that far apart
    start = 0
    for row, length in zip(rows, widths, strict=True):
        item = data[row]
        end = start + (step or length)
        ids[start : start + length] = item.ids[:-1]
        next_ids[start : start + length] = item.ids[1:]
        trained[start : start + length] = item.trained[1:]
        offsets[start:end] = np.arange(end - start)
        segments[start:end], lengths[start:end] = row, length
        start = end
    positions = np.flatnonzero(trained)
    padding = label_size - len(positions)
    return Part(
        inputs=mx.array(ids),
        layout=Rows(mx.array(offsets), blocks, mx.array(segments) if layout.masked else None),
        positions=mx.array(np.pad(positions, (0, padding)).astype(np.int32)),
        targets=mx.array(np.pad(next_ids[positions], (0, padding))),
        weights=mx.array(np.pad(np.ones(len(positions), dtype=np.float32), (0, padding))),
        row_lengths=mx.array(lengths),
        rows=tuple(rows),
        tokens=((segments.astype(np.int64) + 1) << 32) + offsets,
    )


def _blocks(widths: Sequence[int], layout: Layout) -> tuple[Block, ...]:
    """Rectangles for the attention of rows of these widths, widest first.

    Short rows share one, whatever their lengths; a long row only one with rows of nearly its own.
    """
    if not layout.list_like:
        width = padded(widths[0])
        return (Block(0, len(widths) * width, len(widths), width),)
    if layout.masked:
        return (Block(0, sum(widths), len(widths), widths[0]),)
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
    """Indices of a rectangle of rows of these widths, None if they are all the same."""
    if len(set(widths)) == 1:
        return None
    starts = np.cumsum([0, *widths[:-1]])
    place = np.arange(widths[0])[None, :]
    real = place < np.array(widths)[:, None]  # (rows, width)
    places = np.where(real, starts[:, None] + place, 0)
    return Gather(
        places=mx.array(places.ravel().astype(np.int32)),
        real=mx.array(real.ravel().astype(np.float32)[:, None, None, None]),
        back=mx.array(np.flatnonzero(real).astype(np.int32)),
    )


def _sizes(tokens: int, labels: int, layout: Layout) -> tuple[int, int]:
    """Lengths of the list of tokens and of the list of labels."""
    for size, label_size in layout.sizes:
        if size >= tokens and label_size >= labels:
            return size, label_size
    return tokens, -(-labels // LABEL_STEP) * LABEL_STEP
