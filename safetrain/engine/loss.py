"""The training loss of one part: the sum over labels, so that parts and micro-batches can be added up exactly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from safetrain.core.memory_terms import chunk_tokens
from safetrain.engine.batches import Part
from safetrain.engine.cross_entropy import Head, chunked_loss, measured_loss, summed_loss_of_chunk
from safetrain.engine.head import SplitModel, as_list, as_rectangle, split
from safetrain.engine.model import BaseModel, on_cpu, parts_at_a_time

Look = Callable[[mx.array], mx.array]  # at what the forward pass gives, before the loss


def _unseen(values: mx.array) -> mx.array:
    return values


class PartLoss:
    """Sum of the cross-entropies in nats of a part's labels.

    The logits of labels alone are made, in chunks, through the head, which is never trained; models that do more to
    their logits make all of them.
    """

    def __init__(self, model: BaseModel, *, training: bool, look: Look = _unseen) -> None:
        self._model, self._training, self._look = model, training, look
        self._parts = split(model.module)
        self._shared: Head | None = None

    def __call__(self, part: Part) -> mx.array:
        """Of one part, lazily."""
        if self._parts is None:
            return _from_all_logits(self._model, part, self._look)
        hidden = _labelled(self._look(_hidden(self._model, self._parts, part)), part)
        head, size = self._shared or self._parts.head(), chunk_tokens(self._parts.vocabulary, parts_at_a_time())
        make = chunked_loss if self._training else measured_loss
        return make(head, size, fused=not on_cpu())(hidden, part.targets, part.weights)

    @contextmanager
    def one_head(self) -> Iterator[None]:
        """Inside, all parts use one head: packed weights of a large vocabulary are unpacked once for all of them."""
        self._shared = self._parts.head() if self._parts is not None else None
        try:
            yield
        finally:
            self._shared = None


def loss_function(model: BaseModel, look: Look = _unseen) -> PartLoss:
    """For training: its gradient costs no second pass over the logits."""
    return PartLoss(model, training=True, look=look)


def loss_without_gradient(model: BaseModel) -> PartLoss:
    """For measuring: in a bounded number of logits too, and with no work for gradients."""
    return PartLoss(model, training=False)


def _hidden(model: BaseModel, parts: SplitModel, part: Part) -> mx.array:
    """(tokens, width) hidden states."""
    if model.takes_lists:
        return as_list(parts.trunk, len(model.module.layers), part.inputs, part.layout)
    return as_rectangle(parts.trunk, part)


def _from_all_logits(model: BaseModel, part: Part, look: Look = _unseen) -> mx.array:
    """Through the whole model; the identity stands in for the head."""
    if model.takes_lists:
        logits = as_list(model.module, len(model.module.layers), part.inputs, part.layout)
    else:
        logits = as_rectangle(model.module, part)
    chosen = _labelled(look(logits), part)
    return summed_loss_of_chunk(_unseen, chosen, part.targets, part.weights, fused=not on_cpu())


def _labelled(values: mx.array, part: Part) -> mx.array:
    """(tokens, features) -> (labels, features)."""
    return values[part.positions]
