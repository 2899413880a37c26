"""Passes through a base that stays on disk, block by block.

Each block is read once for all rows of an update, computed for them, and dropped; in the backward pass, last block
first, it is read and computed again with its gradient. Between the passes only the blocks' inputs are kept. Rows whose
inputs would take more than KEPT_BYTES are computed in several groups, and each group reads the blocks again.

Loss and gradient are those of a base in memory, to the bit on a CPU: the same operations, summed in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from safetrain.core.memory.terms import KEPT_BYTES, slices_head
from safetrain.core.recorder import Phase
from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.engine.cpu.kernels import Given, side_by_side
from safetrain.engine.layers import Trained
from safetrain.engine.loss import ShardLoss, sliced_losses, through
from safetrain.engine.model import OUTSIDE, BaseModel, Blocks, Call
from safetrain.engine.upstream.adaptation import SplitModel


@dataclass
class Piece:
    """A shard on its way through the blocks."""

    shard: Shard
    key: mx.array | None  # for its random numbers
    state: mx.array  # output of the last computed block; on the way back its gradient
    calls: list[Call]
    inputs: list[mx.array] = field(default_factory=list)  # of blocks that the backward pass computes again


class BlockLoop:
    """Passes through a model's blocks. ``lowest``: the number of the first block that is trained."""

    def __init__(self, model: BaseModel, blocks: Blocks) -> None:
        self._model, self._blocks = model, blocks
        self._trained = [Trained(part) for part in blocks.parts]
        self.lowest = next((number for number, part in enumerate(self._trained) if part.arrays()), len(blocks.parts))

    def gradient(
        self,
        loss: ShardLoss,
        update: Update,
        key_of: Callable[[Shard], mx.array],
        tell: Callable[[int, Phase, Any], None],
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Summed loss of an update, and the gradient of its mean loss per label, by the name of the trained array.

        ``tell`` gets a group's first micro-batch, by number, a phase and its values. It is called after each phase, and
        with GRADIENT before each group (values: None) and block (values: ()).
        """
        number, total, sums, before = 0, list[mx.array](), dict[str, mx.array](), self._blocks.pulse
        try:
            for group in self.grouped(update.micro_batches, len(self._blocks.parts) - self.lowest):
                self._blocks.pulse = functools.partial(tell, number, Phase.GRADIENT, ())
                tell(number, Phase.GRADIENT, None)
                batches = self.forward(group, key_of, update.share)
                tell(number, Phase.FORWARD, batches[-1][-1].state)
                total += self._losses(loss, batches, update.share)
                tell(number, Phase.LOSS, total[-1])
                self._backward(batches, sums)
                tell(number, Phase.BACKWARD, list(sums.values()))
                number += len(group)
        finally:
            self._blocks.pulse = before
        self._blocks.require_unchanged()
        trained = self._model.trained.arrays()
        gradient = {name: sums[name] if total else mx.zeros_like(own) for name, own in trained.items()}
        return functools.reduce(mx.add, total or [mx.array(0.0)]) * update.labels, gradient

    def forward(
        self, batches: Sequence[MicroBatch], key_of: Callable[[Shard], mx.array] | None = None, share: float = 1.0
    ) -> list[list[Piece]]:
        """Run micro-batches through all blocks; returns the pieces of each micro-batch.

        With ``key_of`` the pieces keep the inputs of trained blocks, and each label weighs ``share``, unless of a pair.
        """
        blocks, begun = self._blocks, list[list[Piece]]()
        for batch in batches:
            begun.append([])
            for shard in batch.shards:
                state, calls = blocks.noted(functools.partial(through, self._model, shard))
                is_plain = key_of is not None and shard.pairs is None
                own = dataclasses.replace(shard, weights=shard.weights * share) if is_plain else shard
                begun[-1].append(Piece(own, None if key_of is None else key_of(shard), state, calls))
        with blocks.reading():
            mx.eval([piece.state for pieces in begun for piece in pieces])
        blocks.drop(OUTSIDE)

        def through_block(number: int, piece: Piece) -> mx.array:
            self._model.randomness.key = piece.key
            return blocks.compute(number, piece.state, piece.calls[number])

        for number in range(len(blocks.parts)):
            with blocks.at_hand(number, number + 1):
                for pieces in begun:
                    states = _at_once(functools.partial(through_block, number), pieces)
                    for piece, piece_state in zip(pieces, states, strict=True):
                        if key_of is not None and number >= self.lowest:
                            piece.inputs.append(piece.state)
                        piece.state = piece_state
        return begun

    def grouped(self, batches: Iterable[MicroBatch], kept_blocks: int) -> Iterator[list[MicroBatch]]:
        """Group micro-batches, at least one per group, so that inputs of ``kept_blocks`` blocks fit in KEPT_BYTES."""
        group, kept = list[MicroBatch](), 0
        for batch in batches:
            size = sum(shard.inputs.size for shard in batch.shards) * kept_blocks * self._blocks.state_bytes
            if group and kept + size > KEPT_BYTES:
                yield group
                group, kept = [], 0
            group.append(batch)
            kept += size
        if group:
            yield group

    def _losses(self, loss: ShardLoss, batches: list[list[Piece]], share: float) -> list[mx.array]:
        """The summed loss of each micro-batch. Replaces each piece's state, the last output, by its gradient."""
        split, found = self._model.split, list[mx.array]()
        most = max(sum(piece.shard.targets.size for piece in pieces) for pieces in batches)
        is_small = slices_head(most, batches[0][0].state.shape[-1])  # logits take less memory than the head
        sliced = split if split is not None and split.has_slices and is_small else None

        def whole(piece: Piece) -> Any:
            return mx.value_and_grad(self._tail(lambda shard: loss(shard, share), piece))(piece.state)

        with self._blocks.reading(), loss.one_head() if sliced is None else nullcontext():
            for pieces in batches:
                own = _at_once(whole, pieces) if sliced is None else self._by_slices(sliced, pieces, loss, share)
                found.append(mx.stack([value for value, _ in own]).sum())
                mx.eval(found[-1])
                for piece, (_, gradient) in zip(pieces, own, strict=True):
                    piece.state = gradient
        self._blocks.given = {}
        self._blocks.drop(OUTSIDE)
        return found

    def _by_slices(
        self, split: SplitModel, pieces: list[Piece], loss: ShardLoss, share: float
    ) -> list[tuple[mx.array, mx.array]]:
        """The loss of each piece, and the gradient of its state; the head is dequantized in slices."""

        def at_labels(piece: Piece) -> Callable[[mx.array], mx.array]:
            return self._tail(lambda shard: through(self._model, shard)[shard.positions], piece)

        states = _at_once(lambda piece: at_labels(piece)(piece.state), pieces)
        labels = [(own, piece.shard.targets, piece.shard.weights) for own, piece in zip(states, pieces, strict=True)]
        found = list[tuple[mx.array, mx.array]]()
        for piece, (total, losses, own) in zip(pieces, sliced_losses(split, labels), strict=True):
            if (pairs := piece.shard.pairs) is not None:
                total, factors = mx.value_and_grad(functools.partial(loss.of_pairs, pairs, share=share))(losses)
                own = (factors[:, None] * own).astype(own.dtype)
            found.append((total, own))
        given = [(piece, own) for piece, (_, own) in zip(pieces, found, strict=True)]
        gradients = _at_once(lambda pair: mx.vjp(at_labels(pair[0]), [pair[0].state], [pair[1]])[1][0], given)
        return [(total, gradient) for (total, _), gradient in zip(found, gradients, strict=True)]

    def _tail(self, run: Callable[[Shard], mx.array], piece: Piece) -> Callable[[mx.array], mx.array]:
        """``run`` on a piece's shard, as a function of the last block's output."""

        def of_state(state: mx.array) -> mx.array:
            self._blocks.given = {id(piece.shard): state}
            return run(piece.shard)

        return of_state

    def _backward(self, batches: list[list[Piece]], sums: dict[str, mx.array]) -> None:
        """Add the gradients of all pieces to ``sums``, by name, block by block from the last one down."""
        blocks, prefixes = self._blocks, {id(part): name for name, part in self._model.module.named_modules()}
        for number in reversed(range(self.lowest, len(blocks.parts))):
            trained, prefix = self._trained[number], prefixes[id(blocks.parts[number])]
            with blocks.at_hand(number, number - 1 if number > self.lowest else None):
                for pieces in batches:
                    results = _at_once(functools.partial(self._gradients, number, trained), pieces)
                    for piece, (state, *_) in zip(pieces, results, strict=True):
                        piece.state = state
                        piece.inputs.pop()
                    for place, name in enumerate(trained.arrays(), 1):
                        own = functools.reduce(mx.add, [result[place] for result in results])
                        full = f"{prefix}.{name}"
                        sums[full] = sums[full] + own if full in sums else own
                    mx.eval(sums)
                    del results, own

    def _gradients(self, number: int, trained: Trained, piece: Piece) -> list[mx.array]:
        """The gradients of a block's input and of its trained arrays, as lazy arrays."""
        before = trained.arrays()
        self._model.randomness.key = piece.key

        def compute(state: mx.array, *arrays: mx.array) -> list[mx.array]:
            trained.put(dict(zip(before, arrays, strict=True)))
            return [self._blocks.compute(number, state, piece.calls[number])]

        try:
            return mx.vjp(compute, [piece.inputs[-1], *before.values()], [piece.state])[1]
        finally:
            trained.put(before)  # tracing leaves placeholders behind


def _at_once(compute: Callable[[Given], Any], each: Sequence[Given]) -> list[Any]:
    """Call ``compute`` for each item and evaluate the results, in parallel on a CPU."""
    results = side_by_side(compute, each)
    mx.eval(results)
    return results


def computed(model: BaseModel, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield each micro-batch; if the base is on disk, first compute the last block's outputs for ``through`` to use."""
    if model.blocks is None:
        yield from batches
        return
    loop = BlockLoop(model, model.blocks)
    for group in loop.grouped(batches, kept_blocks=1):
        model.blocks.given = {id(piece.shard): piece.state for pieces in loop.forward(group) for piece in pieces}
        yield from group
        model.blocks.given = {}
    model.blocks.drop(OUTSIDE)
