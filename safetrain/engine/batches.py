"""The layout of an update's rows (core/data/row_order.py) in memory.

Rows become lists of tokens, longest row first, cut into micro-batches of limited size. The cut changes the gradient
only by rounding, because it is a sum over labels. On CPU rows are not padded.

On a GPU rows are padded to rectangles, because mlx compiles a program for each shape and keeps it. A shape is a width,
a number of rows and a number of labels, each from a small set, so even a large dataset needs only a few dozen
programs. Shapes depend only on row lengths, not on the order of training.
"""

import dataclasses
import functools
import heapq
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.row_order import Cursor, rows_at
from safetrain.core.data.token_rows import TokenRows, TrainRows
from safetrain.core.memory.terms import WIDTH_STEP, padded
from safetrain.engine.backend import device
from safetrain.engine.model import BaseModel
from safetrain.engine.row_attention import Block, Gather, PackedRows, Way
from safetrain.engine.upstream.probing import head_size

LARGEST_WASTE = 4000  # padded attention scores per row that cost about as much as another rectangle
MOST_PADDING = 128  # padding tokens that cost about as much as another rectangle
LABEL_STEP = 64  # a list of labels is padded to a multiple of this
LABEL_SHARES = 4  # planned rectangles pad it to one of this many sizes
PAD_ID = 0
MOST_WIDTHS = 16
MOST_LONGER = 1.125  # times as wide, for a faster kernel: within the margin of the memory estimate
MOST_CANDIDATES = 256  # widths that are considered
FUSED_STEPS = (WIDTH_STEP, 128)  # cuDNN's backward pass takes widths that are a multiple of 128
KERNEL, GRADIENT_KERNEL = "ScaledDotProductAttention", "ScaledDotProductAttentionVJP"  # as mlx's graphs name them


@dataclass(frozen=True)
class BatchLayout:
    """How rows become lists of tokens.

    ``rectangles``: each shard is one rectangle, of a width in ``widths`` if any are planned. Rectangles whose width is
    a multiple of ``fused_step`` use mlx's own attention, all others use ``way``.
    """

    most_tokens: int  # of a micro-batch, padding included
    shards: int = 1  # lists per micro-batch, computed in parallel
    rectangles: bool = False
    widths: tuple[int, ...] = ()  # ascending; none: any multiple of WIDTH_STEP
    way: Way = Way.POWERS
    fused_step: int = 0  # 0: none


def layout_for(model: BaseModel, most_tokens: int) -> BatchLayout:
    """The layout for measuring: on CPU without padding, one shard per core; on a GPU in rectangles."""
    here = device()
    if here.packs_without_padding:
        return BatchLayout(most_tokens, shards=here.shards, rectangles=not model.packs_rows)
    return BatchLayout(most_tokens, rectangles=True, way=Way.SOFTMAX, fused_step=_fused_step(model, KERNEL))


def training_layout(model: BaseModel, batch_size: int, inputs: np.ndarray) -> BatchLayout:
    """The layout for training on rows that feed ``inputs`` (rows,) tokens, ``batch_size`` of the longest at once.

    On a GPU the rectangles have few shapes, so that mlx compiles few programs.
    """
    if device().packs_without_padding:
        return layout_for(model, batch_size * padded(int(inputs.max())))
    fused_step = _fused_step(model, GRADIENT_KERNEL)
    widths = plan_widths(inputs, long_step=fused_step or WIDTH_STEP)
    return BatchLayout(batch_size * widths[-1], rectangles=True, widths=widths, way=Way.SOFTMAX, fused_step=fused_step)


def _fused_step(model: BaseModel, kernel: str) -> int:
    """The smallest of FUSED_STEPS for whose multiples mlx runs the model's attention with ``kernel``; 0: none."""
    size = head_size(model.module)
    if not model.packs_rows or not size:
        return 0
    was_training = model.module.training
    model.module.eval()  # dropout has no random numbers yet
    dtype = model.module(mx.array([[0]])).dtype
    model.module.train(was_training)
    return next((step for step in FUSED_STEPS if kernel in attention_graph(step, size, dtype, kernel)), 0)


def attention_graph(width: int, head_size: int, dtype: mx.Dtype, kernel: str) -> str:
    """mlx's graph for causal attention, or for its gradient if ``kernel`` is the gradient kernel.

    mlx chooses its kernels when it builds a graph, so nothing is computed.
    """
    attend = functools.partial(mx.fast.scaled_dot_product_attention, scale=1.0, mask="causal")
    part, graph = mx.zeros((1, 1, width, head_size), dtype), io.StringIO()
    outputs = mx.vjp(attend, [part] * 3, [part])[1] if kernel == GRADIENT_KERNEL else [attend(part, part, part)]
    mx.export_to_dot(graph, *outputs)
    return graph.getvalue()


def plan_widths(lengths: np.ndarray, most: int = MOST_WIDTHS, long_step: int = WIDTH_STEP) -> tuple[int, ...]:
    """At most ``most`` widths, ascending, that hold rows of these lengths with the least padding.

    Widths are multiples of WIDTH_STEP; above ``long_step``, multiples of that if padding stays small. The solution is
    exact, by dynamic programming over the distinct widths.
    """
    rounded = padded_to(lengths, WIDTH_STEP)
    longer = padded_to(lengths, long_step)
    rounded = np.where((rounded > long_step) & (longer <= MOST_LONGER * rounded), longer, rounded)
    coarse = WIDTH_STEP * -(-int(rounded.max()) // (WIDTH_STEP * MOST_CANDIDATES))
    sizes, counts = np.unique(padded_to(rounded, max(coarse, WIDTH_STEP)), return_counts=True)
    sums, before = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(counts * sizes)])
    best = np.full(len(sizes) + 1, np.inf)
    widths: list[tuple[int, ...]] = [()] * (len(sizes) + 1)
    best[0] = 0.0
    for _ in range(min(most, len(sizes))):
        new, picked = best.copy(), list(widths)
        for stop in range(1, len(sizes) + 1):
            size = sizes[stop - 1]
            cost = best[:stop] + size * (sums[stop] - sums[:stop]) - (before[stop] - before[:stop])
            start = int(cost.argmin())
            if cost[start] < new[stop]:
                new[stop], picked[stop] = cost[start], (*widths[start], int(size))
        best, widths = new, picked
    return widths[-1]


@dataclass(frozen=True)
class Shard:
    """Rows that go through the model together, with their labels."""

    inputs: mx.array  # (tokens,) ids, padded with PAD_ID
    layout: PackedRows
    positions: mx.array  # (labels,) places in the list whose next token is a label
    targets: mx.array  # (labels,) those next tokens
    weights: mx.array  # (labels,) 1.0, and 0.0 where the list of labels itself is padded
    rows: tuple[int, ...]  # their numbers in messages
    tokens: Any  # (tokens,) a number for each: its row and its place in it, whatever the layout

    @property
    def label_rows(self) -> np.ndarray:
        """(labels,) index of each label's row; arbitrary for padding."""
        return (self.tokens[np.array(self.positions)] >> 32) - 1


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
    """The micro-batches of one optimizer update and what is in them."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int
    input_tokens: int  # of the rows themselves, padding not counted
    computed_tokens: int  # with padding
    data: TokenRows  # the rows that it takes from
    groups: tuple[tuple[int, ...], ...]  # indices into it, a micro-batch each

    @property
    def rows(self) -> tuple[int, ...]:
        """Row numbers of the update, as messages show them."""
        return tuple(row for batch in self.micro_batches for row in batch.rows)

    def per_label(self, total: float) -> float:
        """Divide a sum by the number of labels; 0 without labels, as in fully masked windows."""
        return total / max(1, self.trained_tokens)


@dataclass(frozen=True)
class Share:
    """One rank's part of an update's rows. Which rank computes a row changes sums only by rounding."""

    rank: int = 0
    ranks: int = 1

    def of(self, sizes: np.ndarray) -> np.ndarray:
        """Indices of this rank's rows. ``sizes``: (rows,) tokens of each row, longest first.

        Each row goes to the rank with the least work so far: at most a third above the optimum (Graham 1969).
        """
        places, work = list[int](), [(0, rank) for rank in range(self.ranks)]
        for place, size in enumerate(sizes.tolist()):
            tokens, rank = work[0]
            heapq.heapreplace(work, (tokens + size, rank))
            if rank == self.rank:
                places.append(place)
        return np.array(places, dtype=np.int64)


WHOLE = Share()


def update_at(
    data: TrainRows, cursor: Cursor, seed: int, rows_per_update: int, layout: BatchLayout, share: Share = WHOLE
) -> Update:
    """Build the update at ``cursor``. The layout does not change its rows.

    With several ranks it holds only this rank's micro-batches, perhaps none; label and token counts cover all ranks.
    """
    update = rows_at(data, cursor, seed, rows_per_update)
    rows, widths = update.rows, update.data.inputs(update.rows)
    if share == WHOLE:
        return update_of_rows(update.data, list(fill(update.data, rows, layout)), layout)
    mine = np.array(rows, dtype=np.int64)[share.of(widths)]
    own = update_of_rows(update.data, list(fill(update.data, mine, layout)), layout)
    labels = int(update.data.label_counts[rows].sum(dtype=np.int64))
    return dataclasses.replace(own, trained_tokens=labels, input_tokens=int(widths.sum(dtype=np.int64)))


def update_of_rows(data: TokenRows, groups: Sequence[Sequence[int]], layout: BatchLayout) -> Update:
    """Build an update from groups of rows, one micro-batch per group."""
    batches = tuple(make_batch(data, rows, layout) for rows in groups)
    tokens = sum(shard.inputs.size for batch in batches for shard in batch.shards)
    window = np.array([row for rows in groups for row in rows], dtype=np.int64)
    labels, inputs = int(data.label_counts[window].sum()), int(data.inputs(window).sum())
    return Update(batches, labels, inputs, tokens, data, tuple(tuple(rows) for rows in groups))


def in_order(data: TokenRows, layout: BatchLayout) -> Iterator[MicroBatch]:
    """Yield every row once, the longest first."""
    for rows in fill(data, data.by_length, layout):
        yield make_batch(data, rows, layout)


def fill(data: TokenRows, rows: Sequence[int] | np.ndarray, layout: BatchLayout) -> Iterator[list[int]]:
    """``rows``, sorted longest first, in groups of at most ``most_tokens`` tokens, padding included, or of one row."""
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


def _rows_together(widths: np.ndarray, layout: BatchLayout) -> int:
    """Count the longest rows that share a rectangle, until padding costs more than another rectangle."""
    width = int(widths_of(widths[:1], layout.widths)[0])
    most = max(1, layout.most_tokens // width)
    wasted = width - widths_of(widths[:most], layout.widths)
    rows = int(np.searchsorted(np.cumsum(wasted), MOST_PADDING, side="right"))
    return whole_rows(rows, most) if layout.widths else rows


def make_batch(data: TokenRows, rows: Sequence[int], layout: BatchLayout) -> MicroBatch:
    """Divide ``rows``, sorted longest first, into shards of about equal work, and lay each out."""
    shares: list[list[int]] = [[] for _ in range(min(layout.shards, len(rows)))]
    tokens = [0] * len(shares)
    for row, width in zip(rows, data.inputs(rows).tolist(), strict=True):
        least = tokens.index(min(tokens))
        shares[least].append(row)
        tokens[least] += width
    return MicroBatch(tuple(make_shard(data, share, layout) for share in shares))


def make_shard(data: TokenRows, rows: Sequence[int], layout: BatchLayout) -> Shard:
    """Concatenate rows, sorted longest first; padding is never a label."""
    widths, labels = data.inputs(rows), int(data.label_counts[list(rows)].sum())
    blocks = (_rectangle(widths, layout),) if layout.rectangles else _blocks(widths.tolist(), layout.way)
    size = blocks[-1].stop
    ids, next_ids = np.full(size, PAD_ID, dtype=np.int32), np.full(size, PAD_ID, dtype=np.int32)
    trained, row_of = np.zeros(size, dtype=bool), np.full(size, -1, dtype=np.int64)
    offsets = np.arange(size, dtype=np.int32)
    if layout.rectangles:
        offsets %= blocks[0].width
    start = 0
    for row, length in zip(rows, widths.tolist(), strict=True):
        item = data[row]
        end = start + (blocks[0].width if layout.rectangles else length)
        ids[start : start + length] = item.ids[:-1]
        next_ids[start : start + length] = item.ids[1:]
        trained[start : start + length] = item.trained[1:]
        offsets[start:end] = np.arange(end - start)
        row_of[start:end] = row
        start = end
    positions = np.flatnonzero(trained)
    padding = (padded_labels(labels, size) if layout.widths else int(padded_to(labels, LABEL_STEP))) - labels
    return Shard(
        inputs=mx.array(ids),
        layout=PackedRows(mx.array(offsets), blocks),
        positions=mx.array(np.pad(positions, (0, padding)).astype(np.int32)),
        targets=mx.array(np.pad(next_ids[positions], (0, padding))),
        weights=mx.array(np.pad(np.ones(labels, dtype=np.float32), (0, padding))),
        rows=tuple(data.numbers(rows)),
        tokens=((row_of + 1) << 32) + offsets,
    )


def _rectangle(widths: np.ndarray, layout: BatchLayout) -> Block:
    """A rectangle for rows of these widths, widest first."""
    width, rows = int(widths_of(widths[:1], layout.widths)[0]), len(widths)
    fused = layout.fused_step and width % layout.fused_step == 0
    return Block(0, rows * width, rows, width, way=Way.FUSED if fused else layout.way)


def _blocks(widths: Sequence[int], way: Way) -> tuple[Block, ...]:
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
        blocks.append(Block(start, start + sum(group), len(group), group[0], _gather(group), way))
        start += sum(group)
    return tuple(blocks)


def _gather(widths: list[int]) -> Gather | None:
    """Indices that gather rows of these widths into a rectangle; None if all widths are equal."""
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


def widths_of(lengths: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Each row's padded width: the next planned width, or the next multiple of WIDTH_STEP."""
    if not len(widths):
        return padded_to(lengths, WIDTH_STEP)
    places = np.searchsorted(widths, lengths)
    beyond = places == len(widths)
    return np.where(beyond, padded_to(lengths, WIDTH_STEP), np.asarray(widths)[np.where(beyond, 0, places)])


def whole_rows(rows: int, most: int) -> int:
    """Rows to take, so that rectangles have few distinct row counts: ``most``, or a power of two up to ``rows``."""
    return most if rows >= most else 2 ** (rows.bit_length() - 1)


def padded_labels(labels: int, tokens: int) -> int:
    """Length of the padded label list: one, two, three or four quarters of the rectangle's tokens."""
    share = -(-tokens // (LABEL_SHARES * LABEL_STEP)) * LABEL_STEP
    return max(share, -(-labels // share) * share)


def padded_to(lengths: np.ndarray | int, step: int) -> np.ndarray:
    """Round lengths up to multiples of ``step``."""
    return -(-np.asarray(lengths, dtype=np.int64) // step) * step
