"""The loss: next-token cross-entropy summed over labels. Dividing by the number of labels is the caller's, once."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from safetrain.core.memory import chunk_tokens
from safetrain.engine.batches import MicroBatch
from safetrain.engine.cross_entropy import chunked_loss, summed_loss_of_chunk
from safetrain.engine.head import SplitModel, split

LossFunction = Callable[[MicroBatch], mx.array]


def loss_function(module: Any) -> LossFunction:
    """Gives the sum of cross-entropies in nats over the labels of a micro-batch, a float32 scalar.

    Logits are made where there is a label and nowhere else, and with a frozen head a bounded number at a time. A model
    that cannot be split into trunk and head makes all its logits.
    """
    parts = split(module)
    if parts is None:
        return lambda batch: _from_all_logits(module, batch)
    if not parts.head_is_frozen:
        return lambda batch: summed_loss_of_chunk(
            parts.head, _labelled(parts.trunk(batch.inputs), batch), batch.targets, batch.weights
        )
    fused = chunked_loss(parts.head, chunk_tokens(parts.vocabulary))
    return lambda batch: fused(_labelled(parts.trunk(batch.inputs), batch), batch.targets, batch.weights)


def loss_without_gradient(module: Any) -> LossFunction:
    """The same sum for measuring: in a bounded number of logits too, and with no work for gradients."""
    parts = split(module)
    if parts is None:
        return lambda batch: _from_all_logits(module, batch)
    return lambda batch: _measured(parts, batch)


def _measured(parts: SplitModel, batch: MicroBatch) -> mx.array:
    hidden, size = _labelled(parts.trunk(batch.inputs), batch), chunk_tokens(parts.vocabulary)
    total = mx.array(0.0)
    for start in range(0, hidden.shape[0], size):
        part = slice(start, start + size)
        total = total + summed_loss_of_chunk(parts.head, hidden[part], batch.targets[part], batch.weights[part])
        mx.eval(total)
    return total


def _from_all_logits(module: Any, batch: MicroBatch) -> mx.array:
    """Through the whole model; the identity stands in for the head."""
    logits = _labelled(module(batch.inputs), batch)
    return summed_loss_of_chunk(lambda chosen: chosen, logits, batch.targets, batch.weights)


def _labelled(values: mx.array, batch: MicroBatch) -> mx.array:
    """(rows, tokens, features) -> (labels, features)."""
    return values.reshape(-1, values.shape[-1])[batch.positions]
