"""The training loss of one shard: the sum over labels, so that shards and micro-batches can be added up exactly.

The head is applied only to labelled tokens, in chunks that bound the logits in memory.
A GPU has ``mx.fast.cross_entropy``, one kernel each way, which sums in float32 whatever the logits' type; a CPU uses
powers of two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import mlx.core as mx

from safetrain.core.memory.terms import chunk_tokens
from safetrain.engine.backend import device
from safetrain.engine.batches import Shard
from safetrain.engine.cpu.kernels import cross_entropy
from safetrain.engine.layers import Arrays, with_gradient
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.adaptation import Head, SplitModel, call_packed, call_padded

Observe = Callable[[mx.array], mx.array]  # sees the output of the forward pass, before the loss


def _unseen(values: mx.array) -> mx.array:
    return values


class ShardLoss:
    """Summed cross-entropy of a shard's labels, in nats.

    The head computes only the logits of labels, in chunks, unless the model changes its logits afterwards: then it
    computes all. ``trains_head``: the head is trained too, as in pretraining. ``training``: the gradient is computed
    with the loss, without a second pass over the logits.
    """

    def __init__(
        self, model: BaseModel, *, training: bool, observe: Observe | None = None, trains_head: bool = False
    ) -> None:
        self._model, self._training, self._observe = model, training, observe or _unseen
        self._split, self._trains_head = model.split, trains_head
        if trains_head and self._split is not None and self._split.matrix is None:
            self._split = None  # all logits at once: mlx then derives every gradient itself
        self._shared: Head | None = None

    def __call__(self, shard: Shard) -> mx.array:
        """The loss of one shard, as a lazy array."""
        split = self._split
        if not self._training:
            return self.by_label(shard).sum()
        if split is None:  # the identity stands in for the head
            return losses_of(_unseen, self._chosen(shard), shard.targets, shard.weights).sum()
        if self._trains_head:
            loss_of, trained = chunked_loss(split.head_of, chunk_of(split)), [split.matrix]
        else:
            head = self._head(split)
            loss_of, trained = chunked_loss(lambda: head, chunk_of(split)), []
        return loss_of(self._chosen(shard), shard.targets, shard.weights, *trained)

    def by_label(self, shard: Shard) -> mx.array:
        """(labels,) losses of one shard, as a lazy array without a gradient; 0 for padding labels."""
        split = self._split
        head, size = (_unseen, shard.targets.size) if split is None else (self._head(split), chunk_of(split))
        return measured_losses(head, size, self._chosen(shard), shard.targets, shard.weights)

    def _chosen(self, shard: Shard) -> mx.array:
        """(labels, features) outputs that predict the labels."""
        call = self._split.trunk if self._split else self._model.module
        return self._observe(through(self._model, call, shard))[shard.positions]

    def _head(self, split: SplitModel) -> Head:
        return self._shared or split.head()

    @contextmanager
    def one_head(self) -> Iterator[None]:
        """Share one head between all shards, so that a large quantized vocabulary is dequantized only once."""
        self._shared = self._split.head() if self._split is not None else None
        try:
            yield
        finally:
            self._shared = None


def chunk_of(split: SplitModel) -> int:
    """Labels per chunk of logits."""
    return chunk_tokens(split.vocabulary, device().shards)


def through(model: BaseModel, call: Callable[..., mx.array], shard: Shard) -> mx.array:
    """(tokens, features) outputs of ``call``, the model or its trunk."""
    blocks, given = model.blocks, model.blocks.given.get(id(shard)) if model.blocks is not None else None
    with nullcontext() if blocks is None or given is None else blocks.after(given):
        if model.packs_rows:
            return call_packed(call, len(model.module.layers), shard.inputs, shard.layout)
        return call_padded(call, shard.inputs, shard.layout)


def losses_of(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Weighted losses of (tokens, width) hidden states."""
    logits = head(hidden)  # (tokens, vocabulary)
    if device().on_cpu:
        return cross_entropy(logits.astype(mx.float32), targets) * weights
    return mx.fast.cross_entropy(logits, targets) * weights


def chunked_loss(head_of: Callable[..., Head], chunk: int) -> Callable[..., mx.array]:
    """A loss that never holds the logits of more than ``chunk`` tokens.

    Its inputs are hidden states (labels, width), targets and weights (labels,), and the arguments of ``head_of``: the
    matrix of a trained head, nothing for a frozen one. The forward pass computes the gradients chunk by chunk, each
    waiting for the one before, so nothing is computed twice.
    """

    def of_chunk(inputs: list[mx.array], targets: mx.array, weights: mx.array) -> mx.array:
        hidden, *trained = inputs
        return losses_of(head_of(*trained), hidden, targets, weights).sum()

    with_gradients = mx.value_and_grad(of_chunk)

    def forward(hidden: mx.array, targets: mx.array, weights: mx.array, *trained: mx.array) -> Arrays:
        total, of_hidden = mx.array(0.0), [mx.zeros((0, hidden.shape[1]), hidden.dtype)]
        of_trained = [mx.zeros(each.shape, mx.float32) for each in trained]
        for start in range(0, hidden.shape[0], chunk):
            some = slice(start, start + chunk)
            here = mx.depends([hidden[some]], [of_hidden[-1], *of_trained])[0] if start else hidden[some]
            loss, (gradient, *added) = with_gradients([here, *trained], targets[some], weights[some])
            total, of_hidden = total + loss, [*of_hidden, gradient]
            of_trained = [old + new.astype(mx.float32) for old, new in zip(of_trained, added, strict=True)]
        return total, mx.concatenate(of_hidden), *of_trained

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        hidden, targets, weights, *trained = primals
        of_hidden, *of_trained = (
            (cotangents[0] * gradient).astype(primal.dtype)
            for gradient, primal in zip(outputs[1:], (hidden, *trained), strict=True)
        )
        return of_hidden, mx.zeros_like(targets), mx.zeros_like(weights), *of_trained

    function = with_gradient(forward, backward)
    return lambda *arrays: function(*arrays)[0]


def measured_losses(head: Head, chunk: int, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """(tokens,) losses without a gradient, computed one chunk after the other to save memory."""
    losses = [mx.zeros(0)]
    for start in range(0, hidden.shape[0], chunk):
        some = slice(start, start + chunk)
        here = mx.depends([hidden[some]], [losses[-1]])[0]
        losses.append(losses_of(head, here, targets[some], weights[some]))
    return mx.concatenate(losses)
