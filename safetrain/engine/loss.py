"""The training loss of one shard: the sum over labels, so that shards and micro-batches can be added up exactly.

The head is applied only to labelled tokens, in chunks that bound the logits in memory.
A GPU has ``mx.fast.cross_entropy``, one kernel each way, which adds up in float32 whatever the logits are; a CPU takes
powers of two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from safetrain.core.memory.terms import chunk_tokens
from safetrain.engine.backend import device
from safetrain.engine.batches import Shard
from safetrain.engine.cpu.powers import cross_entropy
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.adaptation import Head, SplitModel
from safetrain.engine.upstream.packing import call_packed, call_padded

Arrays = Any  # a tuple of arrays; mlx types custom gradients as object
Observe = Callable[[mx.array], mx.array]  # at what the forward pass gives, before the loss


def _unseen(values: mx.array) -> mx.array:
    return values


class ShardLoss:
    """Sum of the cross-entropies in nats of a shard's labels.

    Only the logits of labels are made, in chunks, through the head, which is trained only where the whole model is
    (``trains_head``); models that do more to their logits make all of them. ``training``: the gradient is made with
    the loss, and costs no second pass over the logits.
    """

    def __init__(
        self, model: BaseModel, *, training: bool, observe: Observe | None = None, trains_head: bool = False
    ) -> None:
        self._model, self._training, self._observe = model, training, observe or _unseen
        self._split = model.adaptation.split
        self._matrix = self._split.matrix if self._split is not None and trains_head else None
        if trains_head and self._matrix is None:
            self._split = None  # all logits at once: mlx then finds every gradient by itself
        self._shared: Head | None = None

    def __call__(self, shard: Shard) -> mx.array:
        """Loss of one shard, lazily."""
        if not self._training:
            return self.by_label(shard).sum()
        if self._matrix is not None and self._split is not None:
            size = chunk_tokens(self._split.vocabulary, device().shards)
            loss_of = chunked_loss_of_matrix(self._matrix.head_of, size, fused=device().fuses_loss)
            return loss_of(self._matrix.now(), self._chosen(shard), shard.targets, shard.weights)
        if self._split is None:  # the identity stands in for the head
            arguments = (_unseen, self._chosen(shard), shard.targets, shard.weights)
            return summed_loss_of_chunk(*arguments, fused=device().fuses_loss)
        make = chunked_loss(*self._head(self._split), fused=device().fuses_loss)
        return make(self._chosen(shard), shard.targets, shard.weights)

    def by_label(self, shard: Shard) -> mx.array:
        """(labels,) of one shard, lazily and without a gradient; 0 where the list of labels is padded."""
        head, size = (_unseen, shard.targets.size) if self._split is None else self._head(self._split)
        measure = measured_losses(head, size, fused=device().fuses_loss)
        return measure(self._chosen(shard), shard.targets, shard.weights)

    def _chosen(self, shard: Shard) -> mx.array:
        """(labels, features) of what predicts the labels."""
        call = self._split.trunk if self._split else self._model.module
        return self._observe(through(self._model, call, shard))[shard.positions]

    def _head(self, split: SplitModel) -> tuple[Head, int]:
        """The head, and how many labels it takes at a time."""
        return self._shared or split.head(), chunk_tokens(split.vocabulary, device().shards)

    @contextmanager
    def one_head(self) -> Iterator[None]:
        """Inside, all shards use one head: a large quantized vocabulary is dequantized once for all of them."""
        self._shared = self._split.head() if self._split is not None else None
        try:
            yield
        finally:
            self._shared = None


def through(model: BaseModel, call: Callable[..., mx.array], shard: Shard) -> mx.array:
    """(tokens, features) of the model or its trunk, which ``call`` is."""
    if model.packs_rows:
        return call_packed(call, len(model.module.layers), shard.inputs, shard.layout)
    return call_padded(call, shard.inputs, shard.layout)


def summed_loss_of_chunk(
    head: Head, hidden: mx.array, targets: mx.array, weights: mx.array, *, fused: bool
) -> mx.array:
    """Weighted sum of the losses of (tokens, width) hidden states; ``fused``: with the backend's own kernel."""
    return _losses_of_chunk(head, hidden, targets, weights, fused=fused).sum()


def _losses_of_chunk(head: Head, hidden: mx.array, targets: mx.array, weights: mx.array, *, fused: bool) -> mx.array:
    logits = head(hidden)  # (tokens, vocabulary)
    losses = mx.fast.cross_entropy if fused else cross_entropy
    return losses(logits if fused else logits.astype(mx.float32), targets) * weights


def chunked_loss(head: Head, chunk: int, *, fused: bool = False) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """A loss of hidden states through a frozen head that never holds the logits of more than ``chunk`` tokens.

    The gradient in the hidden states is made in the forward pass, chunk after chunk, each waiting for the one before:
    a frozen head needs no gradient, so nothing is computed twice.
    """

    def of_chunk(hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return summed_loss_of_chunk(head, hidden, targets, weights, fused=fused)

    with_gradient = mx.value_and_grad(of_chunk)

    def forward(hidden: mx.array, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        total = mx.array(0.0)
        gradients: list[mx.array] = []
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            here = hidden[part] if not gradients else mx.depends([hidden[part]], [gradients[-1]])[0]
            loss, gradient = with_gradient(here, targets[part], weights[part])
            total = total + loss
            gradients.append(gradient)
        return total, mx.concatenate(gradients)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        gradient = (cotangents[0] * outputs[1]).astype(primals[0].dtype)
        return gradient, mx.zeros_like(primals[1]), mx.zeros_like(primals[2])

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return lambda hidden, targets, weights: function(hidden, targets, weights)[0]


def chunked_loss_of_matrix(
    head_of: Callable[[mx.array], Head], chunk: int, *, fused: bool = False
) -> Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]:
    """The same loss where the head's matrix is trained: its gradient is added up in the forward pass too.

    Takes the matrix (vocabulary, width), hidden states (labels, width), targets and weights (labels,).
    """

    def of_chunk(matrix: mx.array, hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return summed_loss_of_chunk(head_of(matrix), hidden, targets, weights, fused=fused)

    with_gradients = mx.value_and_grad(of_chunk, argnums=(0, 1))

    def forward(matrix: mx.array, hidden: mx.array, targets: mx.array, weights: mx.array) -> Arrays:
        total, of_matrix = mx.array(0.0), mx.zeros(matrix.shape, mx.float32)
        of_hidden = [mx.zeros((0, hidden.shape[1]), hidden.dtype)]
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            here = mx.depends([hidden[part]], [of_matrix])[0] if start else hidden[part]
            loss, (added, gradient) = with_gradients(matrix, here, targets[part], weights[part])
            total, of_matrix = total + loss, of_matrix + added.astype(mx.float32)
            of_hidden.append(gradient)
        return total, of_matrix, mx.concatenate(of_hidden)

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        of_matrix = (cotangents[0] * outputs[1]).astype(primals[0].dtype)
        of_hidden = (cotangents[0] * outputs[2]).astype(primals[1].dtype)
        return of_matrix, of_hidden, mx.zeros_like(primals[2]), mx.zeros_like(primals[3])

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return lambda matrix, hidden, targets, weights: function(matrix, hidden, targets, weights)[0]


def measured_losses(
    head: Head, chunk: int, *, fused: bool = False
) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """The losses themselves, (tokens,), without what a gradient needs, in chunks that wait for one another too."""

    def measure(hidden: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        losses = [mx.zeros(0)]
        for start in range(0, hidden.shape[0], chunk):
            some = slice(start, start + chunk)
            here = mx.depends([hidden[some]], [losses[-1]])[0]
            losses.append(_losses_of_chunk(head, here, targets[some], weights[some], fused=fused))
        return mx.concatenate(losses)

    return measure
