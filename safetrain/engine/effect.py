"""Differences between two models: loss, choice and distribution at every label of the same rows."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.memory.terms import FLOAT32, chunk_tokens
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.fusing import Likeness
from safetrain.engine.batches import Shard, in_order
from safetrain.engine.layout import layout_for
from safetrain.engine.loss import through
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.adaptation import Head

MOST_KEPT_BYTES, MOST_TOKENS = 2**27, 2**15  # of hidden states of labels, and of their rows
Beat = Callable[[], None]  # before each micro-batch
PLACE_BITS = 32  # of a label's key: its row above, its place in the row below


@dataclass(frozen=True, eq=False)
class LabelReadings:
    """A model at every label, (labels,) each, in the order of rows and places."""

    keys: np.ndarray  # int64: row and place
    losses: np.ndarray  # nats
    greedy: np.ndarray  # the token it chooses
    right: np.ndarray  # whether that is the label
    divergences: np.ndarray  # KL(reference || this model) in nats; zeros without a reference


@dataclass(frozen=True, eq=False)
class Reference:
    """The model that others are compared with: what it saw, (labels, width) states before its head, and that head.

    Of the model itself only the head stays in memory, so that another one has room beside it.
    """

    seen: LabelReadings
    states: np.ndarray
    head: Callable[[], Head]


def measured_rows(rows: TokenRows, files: ModelFiles, model: BaseModel, most_tokens: int = MOST_TOKENS) -> TokenRows:
    """Rows to compare models on: all, or as many, evenly spread, as keeps states and time within bounds."""
    width = files.vocab_size if model.adaptation.split is None else files.hidden_size
    state_bytes = FLOAT32 * width * int(rows.label_counts.sum(dtype=np.int64))
    share = min(1.0, MOST_KEPT_BYTES / state_bytes, most_tokens / int(rows.lengths.sum(dtype=np.int64)))
    count = max(1, int(share * len(rows)))
    return rows.take(np.linspace(0, len(rows) - 1, count).round().astype(np.int64))


def refer_to(model: BaseModel, rows: TokenRows, most_tokens: int, beat: Beat = lambda: None) -> Reference:
    """What others are compared with."""
    readings, states = _look(model, rows, most_tokens, None, beat)
    return Reference(readings, states, head_of(model))


def look(
    model: BaseModel,
    rows: TokenRows,
    most_tokens: int,
    reference: Reference,
    beat: Beat = lambda: None,
    *,
    same_head: bool = False,
) -> LabelReadings:
    """The same rows through another model, at most ``most_tokens`` tokens at a time.

    ``same_head``: the reference shares this model's head.
    """
    return _look(model, rows, most_tokens, reference, beat, same_head=same_head)[0]


def likeness(other: LabelReadings, tuned: LabelReadings) -> Likeness:
    """Compare ``other`` with the tuned model."""
    same = other.greedy == tuned.greedy
    rows = other.keys >> PLACE_BITS
    starts = np.flatnonzero(np.diff(rows, prepend=-1))  # of each row, which has a label at least
    right, tuned_right = (np.logical_and.reduceat(seen.right, starts) for seen in (other, tuned))
    return Likeness(
        loss=float(other.losses.mean()),
        divergence=max(0.0, float(other.divergences.mean())),
        same_tokens=float(same.mean()),
        same_answers=float(np.logical_and.reduceat(same, starts).mean()),
        right_answers=int(right.sum()),
        lost_answers=int((tuned_right & ~right).sum()),
        won_answers=int((right & ~tuned_right).sum()),
    )


def _look(
    model: BaseModel,
    rows: TokenRows,
    most_tokens: int,
    reference: Reference | None,
    beat: Beat,
    *,
    same_head: bool = False,
) -> tuple[LabelReadings, np.ndarray]:
    model.module.eval()
    heads = [head_of(model)()]
    if reference is not None:
        heads.append(heads[0] if same_head else reference.head())  # a head may be dequantized: once is enough
    layout = dataclasses.replace(layout_for(model, most_tokens), shards=1)
    chunks: list[tuple[np.ndarray, ...]] = []
    for batch in in_order(rows, layout):
        beat()
        for shard in batch.shards:
            chunks += _of_shard(model, shard, heads, reference)
    keys, losses, greedy, right, divergences, states = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    order = np.argsort(keys)
    readings = LabelReadings(keys[order], losses[order], greedy[order], right[order], divergences[order])
    return readings, states[order] if reference is None else states


def _of_shard(
    model: BaseModel, shard: Shard, heads: list[Head], reference: Reference | None
) -> Iterator[tuple[np.ndarray, ...]]:
    """Keys, losses, choices, whether right, divergences and states of a shard's labels, a chunk at a time."""
    split, labels = model.adaptation.split, int(np.array(shard.weights).sum())
    positions, targets = shard.positions[:labels], shard.targets[:labels]
    states = through(model, split.trunk if split is not None else model.module, shard)[positions]
    keys = np.asarray(shard.tokens)[np.array(positions)]
    size = chunk_tokens(split.vocabulary if split is not None else states.shape[-1])
    size = size if reference is None else max(1, size // 2)  # two models' logits
    for start in range(0, labels, size):
        some = slice(start, start + size)
        own, labels_here = log_softmax(heads[0](states[some])), targets[some]
        greedy, divergence = mx.argmax(own, axis=-1), mx.zeros(labels_here.shape)
        mx.eval(own, greedy)  # before there are more of its size
        if reference is not None:
            places = np.searchsorted(reference.seen.keys, keys[some])
            theirs = log_softmax(heads[1](mx.array(reference.states[places]).astype(states.dtype)))
            divergence = (mx.exp(theirs) * (theirs - own)).sum(axis=-1)
        losses = -mx.take_along_axis(own, labels_here[:, None].astype(mx.int32), axis=-1).squeeze(-1)
        hidden = states[some].astype(mx.float32) if reference is None else mx.zeros((0, 1))
        values_here = (losses, greedy, greedy == labels_here, divergence, hidden)
        mx.eval(values_here)
        yield (keys[some], *(np.array(values) for values in values_here))


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (labels, vocabulary), in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def head_of(model: BaseModel) -> Callable[[], Head]:
    """What makes logits of its states."""
    split = model.adaptation.split
    return split.head if split is not None else no_head


def kept_head(model: BaseModel) -> Callable[[], Head]:
    """The head as it is now, kept in the computer's memory while mlx frees the model."""
    split = model.adaptation.split
    if split is None or split.matrix is None:
        return no_head
    matrix, head_from = np.array(split.matrix.now().astype(mx.float32)), split.matrix.head_of
    return lambda: head_from(mx.array(matrix))


def no_head() -> Head:
    """Of a model that gives logits itself."""
    return lambda logits: logits
