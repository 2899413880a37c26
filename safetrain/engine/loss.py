"""The training loss of one shard: the sum over labels, so that shards and micro-batches can be added up exactly.

In preference training it is the sum over pairs of answers.

The head is applied only to labelled tokens, in chunks that bound the logits in memory.
A GPU has ``mx.fast.cross_entropy``, one kernel each way, which sums in float32 whatever the logits' type; a CPU uses
powers of two.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.memory.terms import chunk_tokens
from safetrain.core.records.schema import DPO
from safetrain.engine.backend import device
from safetrain.engine.batches import Pairs, Shard
from safetrain.engine.cpu.kernels import cross_entropy, side_by_side
from safetrain.engine.layers import Arrays, with_gradient
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.adaptation import Head, SplitModel, call_packed, call_padded

Observe = Callable[[mx.array], mx.array]  # sees the output of the forward pass, before the loss
LEAST_DOUBT = -1e-6  # log of the highest probability of a token: at 1 the odds are infinite
TIE = 1e-5  # nats: a smaller margin is rounding, as before the first step of DPO


@dataclass(frozen=True)
class PairScores:
    """What a model prefers, for each pair: arrays of shape (pairs,), in nats."""

    losses: np.ndarray
    margins: np.ndarray  # reward of the chosen answer minus that of the rejected one
    chosen: np.ndarray  # log-probability of the chosen answer
    rejected: np.ndarray

    @property
    def sums(self) -> list[float]:
        """Sums over the pairs: loss, right pairs, margin, and the log-probabilities of chosen and rejected answers."""
        right = self.margins > TIE
        return [float(each.sum()) for each in (self.losses, right, self.margins, self.chosen, self.rejected)]


@dataclass(frozen=True)
class PairLoss:
    """DPO (arXiv 2305.18290, equation 7) or ORPO (arXiv 2403.07691, equations 5 to 7) on pairs, chosen row first.

    Arrays have shape (rows,), two rows a pair: the log-probability of each answer (``sums``), its number of tokens, and
    its log-probability under the reference model. Results have shape (pairs,). ``xp``: numpy, or mlx.core.
    """

    method: str
    beta: float
    xp: Any = np

    def __call__(self, sums: Any, lengths: Any, references: Any) -> Any:
        """The loss of each pair, in nats."""
        xp = self.xp
        if self.method == DPO:
            return xp.logaddexp(xp.zeros(()), -self.margins(sums, lengths, references))
        means = sums / lengths
        odds = means - xp.log1p(-xp.exp(xp.minimum(means, LEAST_DOUBT)))  # log(p / (1 - p))
        return -means[::2] + self.beta * xp.logaddexp(xp.zeros(()), odds[1::2] - odds[::2])

    def margins(self, sums: Any, lengths: Any, references: Any) -> Any:
        """Reward of the chosen answer minus that of the rejected one; above 0 the model prefers the chosen one."""
        rewards = self.beta * (sums - references if self.method == DPO else sums / lengths)
        return rewards[::2] - rewards[1::2]

    def scores(self, sums: np.ndarray, rows: TokenRows, references: np.ndarray | None = None) -> PairScores:
        """Score the pairs in ``rows``; ``references``: None for those of the rows."""
        given = rows.reference(np.arange(len(rows))) if references is None else references
        theirs = sums, np.maximum(1, rows.label_counts), given
        return PairScores(self(*theirs), self.margins(*theirs), sums[::2], sums[1::2])


class ShardLoss:
    """Summed cross-entropy of a shard's labels, in nats.

    The head computes the logits of labels only, in chunks, unless the model has no split: then all logits are computed.
    ``trains_head``: the head is trained too, as in pretraining.
    """

    def __init__(
        self, model: BaseModel, *, observe: Observe | None = None, trains_head: bool = False,
        pair_loss: PairLoss | None = None,
    ) -> None:  # fmt: skip
        if trains_head and model.split is not None and model.split.matrix is None:
            model = dataclasses.replace(model, split=None)  # all logits at once: mlx then derives every gradient itself
        self._model, self._observe, self._trains_head = model, observe, trains_head
        self._shared: Head | None = None
        self._pair_loss = pair_loss

    def __call__(self, shard: Shard, share: mx.array | float = 1.0) -> mx.array:
        """The loss of one shard, as a lazy array; its gradient is computed with it, not in a second pass.

        ``share``: the weight of a pair, as ``weights`` are those of labels.
        """
        split, head = self._model.split, self._shared or self._model.head()
        if split is None:
            losses = losses_of(head, self._chosen(shard), shard.targets, shard.weights)
            total = losses.sum()
        else:
            trained = [split.matrix] if self._trains_head else []
            loss_of = chunked_losses(split.head_of if trained else lambda: head, chunk_of(split))
            total, losses = loss_of(self._chosen(shard), shard.targets, shard.weights, *trained)
        return total if shard.pairs is None else self.of_pairs(shard.pairs, losses, share)

    def of_pairs(self, pairs: Pairs, losses: mx.array, share: mx.array | float) -> mx.array:
        """The summed loss of pairs, times ``share``, from the losses of their labels, (labels,)."""
        assert self._pair_loss is not None
        sums = mx.zeros(pairs.lengths.shape).at[pairs.rows].add(-losses)
        return self._pair_loss(sums, pairs.lengths, pairs.references).sum() * share

    def by_label(self, shard: Shard) -> mx.array:
        """(labels,) losses of one shard without a gradient, as a lazy array; 0 for padding labels.

        Computed one chunk after the other, to save memory.
        """
        head, hidden, losses = self._shared or self._model.head(), self._chosen(shard), [mx.zeros(0)]
        size = max(1, len(hidden)) if self._model.split is None else chunk_of(self._model.split)
        for start in range(0, len(hidden), size):
            some = slice(start, start + size)
            here = mx.depends([hidden[some]], [losses[-1]])[0]
            losses.append(losses_of(head, here, shard.targets[some], shard.weights[some]))
        return mx.concatenate(losses)

    def _chosen(self, shard: Shard) -> mx.array:
        """(labels, features) outputs that predict the labels."""
        outputs = through(self._model, shard)
        return (outputs if self._observe is None else self._observe(outputs))[shard.positions]

    @contextmanager
    def one_head(self) -> Iterator[None]:
        """Share one head between all shards, so that a large quantized vocabulary is dequantized only once."""
        self._shared = self._model.head()
        try:
            yield
        finally:
            self._shared = None


def chunk_of(split: SplitModel) -> int:
    """Labels per chunk of logits."""
    return chunk_tokens(split.vocabulary, device().shards, split.labels_at_once)


def through(model: BaseModel, shard: Shard) -> mx.array:
    """(tokens, features) outputs of the model's trunk."""
    blocks, given = model.blocks, model.blocks.given.get(id(shard)) if model.blocks is not None else None
    with nullcontext() if blocks is None or given is None else blocks.after(given):
        if model.packs_rows:
            return call_packed(model.trunk, len(model.module.layers), shard.inputs, shard.layout)
        return call_padded(model.trunk, shard.inputs, shard.layout)


def losses_of(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Weighted loss of each token, (tokens,), from hidden states (tokens, width)."""
    logits = head(hidden)  # (tokens, vocabulary)
    if device().on_cpu:
        return cross_entropy(logits.astype(mx.float32), targets) * weights
    return mx.fast.cross_entropy(logits, targets) * weights


def chunked_losses(head_of: Callable[..., Head], chunk: int) -> Callable[..., tuple[mx.array, mx.array]]:
    """A function for the sum of losses, and the losses, (labels,), that holds the logits of at most ``chunk`` labels.

    Its inputs are hidden states (labels, width), targets and weights (labels,), and the arguments of ``head_of``: the
    matrix of a trained head, nothing for a frozen head. The forward pass computes the gradients chunk by chunk, each
    waiting for the chunk before, so nothing is computed twice.
    """

    def of_chunk(inputs: list[mx.array], targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        hidden, *trained = inputs
        losses = losses_of(head_of(*trained), hidden, targets, weights)
        return losses.sum(), losses

    with_gradients = mx.value_and_grad(of_chunk)

    def forward(hidden: mx.array, targets: mx.array, weights: mx.array, *trained: mx.array) -> Arrays:
        total, losses, of_hidden = mx.array(0.0), [mx.zeros(0)], [mx.zeros((0, hidden.shape[1]), hidden.dtype)]
        of_trained = [mx.zeros(each.shape, mx.float32) for each in trained]
        for start in range(0, hidden.shape[0], chunk):
            some = slice(start, start + chunk)
            here = mx.depends([hidden[some]], [of_hidden[-1], *of_trained])[0] if start else hidden[some]
            (loss, own), (gradient, *added) = with_gradients([here, *trained], targets[some], weights[some])
            total, losses, of_hidden = total + loss, [*losses, own], [*of_hidden, gradient]
            of_trained = [old + new.astype(mx.float32) for old, new in zip(of_trained, added, strict=True)]
        return total, mx.concatenate(losses), mx.concatenate(of_hidden), *of_trained

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        hidden, targets, weights, *trained = primals
        of_total, of_losses, *_ = cotangents  # a trained head has only a sum
        of_hidden = ((of_total + of_losses[:, None]) * outputs[2]).astype(hidden.dtype)
        of_trained = ((of_total * own).astype(each.dtype) for own, each in zip(outputs[3:], trained, strict=True))
        return of_hidden, mx.zeros_like(targets), mx.zeros_like(weights), *of_trained

    function = with_gradient(forward, backward)
    return lambda *arrays: function(*arrays)[:2]


@dataclass(eq=False)
class _Chunk:
    """Some labels of a shard on their way through the slices of a head."""

    hidden: mx.array
    targets: mx.array
    weights: mx.array
    parts: list[mx.array] = field(default_factory=list)  # logits by slice, later their gradients
    total: Any = None
    losses: Any = None
    gradient: Any = None


def _loss_of_chunk(finish: Head, chunk: _Chunk) -> list[mx.array]:
    """Compute a chunk's losses, and replace its logits by their gradients."""

    def of_parts(parts: list[mx.array]) -> tuple[mx.array, mx.array]:
        losses = losses_of(finish, mx.concatenate(parts, axis=-1), chunk.targets, chunk.weights)
        return losses.sum(), losses

    (chunk.total, chunk.losses), chunk.parts = mx.value_and_grad(of_parts)(chunk.parts)
    return [chunk.total, chunk.losses, *chunk.parts]


def sliced_losses(split: SplitModel, shards: Sequence[Arrays]) -> list[tuple[mx.array, mx.array, mx.array]]:
    """Of each shard (states, targets and weights): its summed loss, its losses (labels,), and its states' gradient.

    The head is dequantized slice by slice, twice: on a CPU the whole head takes four bytes a weight. The numbers are
    those of ``ShardLoss`` to the bit: the same products, and gradients added in the same order.
    """
    size = chunk_of(split)
    chunked = [
        [_Chunk(*(part[start : start + size] for part in shard)) for start in range(0, len(shard[0]), size)]
        for shard in shards
    ]

    def multiply(chunks: list[_Chunk], matrix: mx.array) -> list[mx.array]:
        for chunk in chunks:
            chunk.parts.append(chunk.hidden @ matrix.T)
        return [chunk.parts[-1] for chunk in chunks]

    def return_through(chunks: list[_Chunk], matrix: mx.array) -> list[mx.array]:
        for chunk in chunks:
            (own,) = mx.vjp(lambda hidden: hidden @ matrix.T, [chunk.hidden], [chunk.parts.pop()])[1]
            chunk.gradient = own if chunk.gradient is None else chunk.gradient + own
        return [chunk.gradient for chunk in chunks]

    for matrix in split.slices():
        side_by_side(functools.partial(multiply, matrix=matrix), chunked)
    for some in itertools.zip_longest(*chunked):
        side_by_side(functools.partial(_loss_of_chunk, split.finish), [chunk for chunk in some if chunk is not None])
    for matrix in split.slices(backwards=True):  # the order in which mlx adds the gradients of a product's input
        side_by_side(functools.partial(return_through, matrix=matrix), chunked)
    zero = mx.array(0.0)
    return [
        (
            functools.reduce(mx.add, [chunk.total for chunk in chunks], zero),
            mx.concatenate([mx.zeros(0), *(chunk.losses for chunk in chunks)]),
            mx.concatenate([shard[0][:0], *(chunk.gradient for chunk in chunks)]),
        )
        for shard, chunks in zip(shards, chunked, strict=True)
    ]
