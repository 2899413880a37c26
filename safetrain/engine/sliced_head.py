"""The loss with a head that is dequantized slice by slice: on a CPU the whole one takes four bytes a weight.

The numbers are those of engine/loss.py to the bit: the same products of the same labels with the same slices, and
their gradients added in the same order. Each slice is dequantized twice, for the logits and for their gradient.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx

from safetrain.core.memory.terms import slices_head
from safetrain.engine.cpu.kernels import side_by_side
from safetrain.engine.loss import chunk_of, losses_of
from safetrain.engine.upstream.adaptation import SplitModel

Labels = tuple[mx.array, mx.array, mx.array]  # hidden states (labels, width), targets, weights


def takes_slices(split: SplitModel | None, labels: int, width: int) -> bool:
    """Whether the logits of the labels of a micro-batch take less memory than the head."""
    return split is not None and split.has_slices and slices_head(labels, width)


def sliced_losses(split: SplitModel, shards: Sequence[Labels]) -> list[tuple[mx.array, mx.array]]:
    """The summed loss of each shard, and its gradient in the hidden states."""
    each = [_Sliced(split, labels) for labels in shards]
    for matrix in split.slices():
        side_by_side(functools.partial(_Sliced.multiply, matrix=matrix), each)
    for place in range(max(len(own.spans) for own in each)):
        side_by_side(functools.partial(_Sliced.lose, place=place), [own for own in each if place < len(own.spans)])
    for matrix in split.slices(backwards=True):  # the order in which mlx adds the gradients of a product's input
        side_by_side(functools.partial(_Sliced.return_through, matrix=matrix), each)
    return [own.result() for own in each]


class _Sliced:
    """The labels of a shard, in chunks."""

    def __init__(self, split: SplitModel, labels: Labels) -> None:
        self.hidden, self.targets, self.weights = labels
        self.finish, size = split.finish, chunk_of(split)
        self.spans = [slice(start, start + size) for start in range(0, self.hidden.shape[0], size)]
        self.parts: list[list[mx.array]] = [[] for _ in self.spans]  # logits by slice, later their gradients
        self.total, self.gradients = mx.array(0.0), list[mx.array]()

    def multiply(self, matrix: mx.array) -> list[mx.array]:
        """Add the logits of one slice."""
        for span, parts in zip(self.spans, self.parts, strict=True):
            parts.append(self.hidden[span] @ matrix.T)
        return [parts[-1] for parts in self.parts]

    def lose(self, place: int) -> list[mx.array]:
        """Replace the logits of one chunk by their gradients, and add its loss."""
        span = self.spans[place]

        def loss(parts: list[mx.array]) -> mx.array:
            whole = mx.concatenate(parts, axis=-1)
            return losses_of(self.finish, whole, self.targets[span], self.weights[span]).sum()

        own, self.parts[place] = mx.value_and_grad(loss)(self.parts[place])
        self.total = self.total + own
        return [self.total, *self.parts[place]]

    def return_through(self, matrix: mx.array) -> list[mx.array]:
        """Add the gradient that returns through one slice, the last one first."""
        for place, (span, parts) in enumerate(zip(self.spans, self.parts, strict=True)):
            (own,) = mx.vjp(lambda hidden: hidden @ matrix.T, [self.hidden[span]], [parts.pop()])[1]
            if place < len(self.gradients):
                self.gradients[place] = self.gradients[place] + own
            else:
                self.gradients.append(own)
        return self.gradients

    def result(self) -> tuple[mx.array, mx.array]:
        """Loss and gradient."""
        return self.total, mx.concatenate([mx.zeros((0, self.hidden.shape[1]), self.hidden.dtype), *self.gradients])
