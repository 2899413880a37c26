"""The loss: next-token cross-entropy summed over labels. Dividing by the number of labels is the caller's, once."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from safetrain.engine.batches import MicroBatch


def summed_loss(module: Any, batch: MicroBatch) -> mx.array:
    """Sum of cross-entropies in nats over the trained tokens of ``batch``, a float32 scalar."""
    logits = module(batch.ids[:, :-1]).astype(mx.float32)  # (rows, width - 1, vocabulary)
    losses = nn.losses.cross_entropy(logits, batch.ids[:, 1:])  # (rows, width - 1)
    return (losses * batch.labels).sum()
