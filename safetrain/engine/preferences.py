"""Preference training when the two rows of a pair are not in one graph: the memory of one row.

DPO and ORPO depend on the model only through the log-probabilities of the two answers. So their gradient is that of
each row's own cross-entropy, times a factor, which a first pass without a gradient determines.
"""

import dataclasses

import mlx.core as mx
import numpy as np

from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.engine.pairs import PairLoss


def factored(update: Update, loss: PairLoss, sums: np.ndarray) -> tuple[float, Update]:
    """The summed loss of an update's pairs, and the update whose labels have their row's factor as weight.

    ``sums``: log-probabilities of the update's answers, at the places of their rows in its data. A factor is the
    derivative of the loss by the row's summed cross-entropy.
    """
    data, shards = update.data, [shard for batch in update.micro_batches for shard in batch.shards]
    rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(shard.tokens >> 32 for shard in shards)]))
    if not len(rows):  # a rank without pairs in this update
        return 0.0, update
    given = sums[rows], data.label_counts[rows], data.reference(rows)
    own, *rest = (mx.array(each.astype(np.float32)) for each in given)

    def total(values: mx.array) -> mx.array:
        return loss(values, *rest).sum()

    value, gradient = mx.value_and_grad(total)(own)
    weights = np.zeros(len(data), dtype=np.float32)
    weights[rows] = -np.array(gradient)
    batches = tuple(
        MicroBatch(tuple(_weighted(shard, weights) for shard in batch.shards)) for batch in update.micro_batches
    )
    return float(np.array(value)), dataclasses.replace(update, micro_batches=batches)


def _weighted(shard: Shard, weights: np.ndarray) -> Shard:
    return dataclasses.replace(shard, weights=shard.weights * mx.array(weights[shard.label_rows]))
