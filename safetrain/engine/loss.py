"""The training loss of one shard: the sum over labels, so that shards and micro-batches can be added up exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from safetrain.core.memory.terms import chunk_tokens
from safetrain.engine.backend import device
from safetrain.engine.batches import Shard
from safetrain.engine.cross_entropy import Head, chunked_loss, measured_loss, summed_loss_of_chunk
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.packing import call_packed, call_padded

Observe = Callable[[mx.array], mx.array]  # at what the forward pass gives, before the loss


def _unseen(values: mx.array) -> mx.array:
    return values


class ShardLoss:
    """Sum of the cross-entropies in nats of a shard's labels.

    The logits of labels alone are made, in chunks, through the head, which is never trained; models that do more to
    their logits make all of them.
    """

    def __init__(self, model: BaseModel, *, training: bool, observe: Observe = _unseen) -> None:
        self._model, self._training, self._observe = model, training, observe
        self._split = model.adaptation.split
        self._shared: Head | None = None

    def __call__(self, shard: Shard) -> mx.array:
        """Of one shard, lazily."""
        here, split = device(), self._split
        given = self._observe(through(self._model, split.trunk if split else self._model.module, shard))
        chosen = given[shard.positions]  # (labels, features)
        if split is None:  # the identity stands in for the head
            return summed_loss_of_chunk(_unseen, chosen, shard.targets, shard.weights, fused=here.fuses_loss)
        head, size = self._shared or split.head(), chunk_tokens(split.vocabulary, here.shards)
        make = chunked_loss if self._training else measured_loss
        return make(head, size, fused=here.fuses_loss)(chosen, shard.targets, shard.weights)

    @contextmanager
    def one_head(self) -> Iterator[None]:
        """Inside, all shards use one head: a large quantized vocabulary is dequantized once for all of them."""
        self._shared = self._split.head() if self._split is not None else None
        try:
            yield
        finally:
            self._shared = None


def loss_function(model: BaseModel, observe: Observe = _unseen) -> ShardLoss:
    """For training: its gradient costs no second pass over the logits."""
    return ShardLoss(model, training=True, observe=observe)


def loss_without_gradient(model: BaseModel) -> ShardLoss:
    """For measuring: in a bounded number of logits too, and with no work for gradients."""
    return ShardLoss(model, training=False)


def through(model: BaseModel, call: Callable[..., mx.array], shard: Shard) -> mx.array:
    """(tokens, features) of the model or its trunk, which ``call`` is."""
    if model.packs_rows:
        return call_packed(call, len(model.module.layers), shard.inputs, shard.layout)
    return call_padded(call, shard.inputs, shard.layout)
