"""The training loss of one part: the sum over labels, so that parts and micro-batches can be added up exactly."""

from collections.abc import Callable

import mlx.core as mx

from safetrain.core.memory import chunk_tokens
from safetrain.engine.batches import Part
from safetrain.engine.cross_entropy import chunked_loss, summed_loss_of_chunk
from safetrain.engine.head import SplitModel, as_list, as_rectangle, split
from safetrain.engine.model import BaseModel, parts_at_a_time

LossFunction = Callable[[Part], mx.array]
Look = Callable[[mx.array], mx.array]  # at what the forward pass gives, before the loss


def _unseen(values: mx.array) -> mx.array:
    return values


def loss_function(model: BaseModel, look: Look = _unseen) -> LossFunction:
    """Sum of the cross-entropies in nats of a part's labels, for training.

    The logits of labels alone are made, in chunks, through the head, which is never trained; models that do more to
    their logits make all of them.
    """
    parts = split(model.module)
    if parts is None:
        return lambda part: _from_all_logits(model, part, look)
    size = chunk_tokens(parts.vocabulary, parts_at_a_time())
    return lambda part: chunked_loss(parts.head(), size)(
        _labelled(look(_hidden(model, parts, part)), part), part.targets, part.weights
    )


def loss_without_gradient(model: BaseModel) -> LossFunction:
    """The same sum for measuring: in a bounded number of logits too, and with no work for gradients."""
    parts = split(model.module)
    if parts is None:
        return lambda part: _from_all_logits(model, part)
    size = chunk_tokens(parts.vocabulary, parts_at_a_time())
    return lambda part: _measured(model, parts, part, size)


def _measured(model: BaseModel, parts: SplitModel, part: Part, size: int) -> mx.array:
    hidden, head = _labelled(_hidden(model, parts, part), part), parts.head()
    total = mx.array(0.0)
    for start in range(0, hidden.shape[0], size):
        some = slice(start, start + size)
        here = mx.depends([hidden[some]], [total])[0]
        total = total + summed_loss_of_chunk(head, here, part.targets[some], part.weights[some])
    return total


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
    return summed_loss_of_chunk(_unseen, _labelled(look(logits), part), part.targets, part.weights)


def _labelled(values: mx.array, part: Part) -> mx.array:
    """(tokens, features) -> (labels, features)."""
    return values[part.positions]
