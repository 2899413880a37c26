"""One optimizer update: gradients of all micro-batches summed, divided once by the label count, clipped, applied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from safetrain.engine.batches import MicroBatch, Update
from safetrain.engine.loss import loss_function
from safetrain.engine.model import BaseModel

LossAndGradient = Callable[[MicroBatch], tuple[mx.array, Any]]


@dataclass(frozen=True)
class UpdateResult:
    """What one update measured."""

    summed_loss: float  # nats over all labels of the update
    grad_norm: float  # of the mean gradient, before clipping


def loss_and_gradient(model: BaseModel) -> LossAndGradient:
    """The function that gives a micro-batch's summed loss and its gradient in the trainable parameters."""
    return nn.value_and_grad(model.module, loss_function(model.module))


def gradient_of(update: Update, compute: LossAndGradient) -> tuple[float, Any]:
    """Summed loss, and the gradient of the mean loss per label over the whole update.

    k micro-batches give the gradient of the one big batch, whatever their lengths, because sums add and the division
    happens once. Each micro-batch is evaluated before the next, so that only one is in memory.
    """
    total, summed = 0.0, None
    for batch in update.micro_batches:
        loss, gradient = compute(batch)
        summed = gradient if summed is None else tree_map(mx.add, summed, gradient)
        mx.eval(loss, summed)
        total += float(np.array(loss))
    return total, tree_map(lambda part: part / update.trained_tokens, summed)


def apply_update(
    model: BaseModel,
    optimizer: optim.Optimizer,
    update: Update,
    compute: LossAndGradient,
    rate: float,
    max_grad_norm: float,
) -> UpdateResult:
    """Make one update at learning rate ``rate``. With a loss or gradient that is not finite, nothing is changed."""
    loss, gradient = gradient_of(update, compute)
    clipped, norm = optim.clip_grad_norm(gradient, max_grad_norm)
    result = UpdateResult(loss, float(np.array(norm)))
    if is_finite(result):
        optimizer.learning_rate = rate
        optimizer.update(model.module, clipped)
        mx.eval(model.module.trainable_parameters(), optimizer.state)
    return result


def is_finite(result: UpdateResult) -> bool:
    """Whether loss and gradient are numbers."""
    return abs(result.summed_loss) < float("inf") and abs(result.grad_norm) < float("inf")
