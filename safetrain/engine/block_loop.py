"""Passes through a base that stays on disk, block by block.

Each block is read once for all rows of an update, computed for them, and dropped; in the backward pass, last block
first, it is read and computed again with its gradient. Between the passes only the blocks' inputs are kept. Rows whose
inputs would take more than KEPT_BYTES are computed in several groups, and each group reads the blocks again.

Loss and gradient are those of a base in memory, to the bit: the same operations, summed in the same order.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from safetrain.core.memory.streamed import KEPT_BYTES
from safetrain.core.recorder import Phase
from safetrain.engine.batches import MicroBatch, Shard, Update
from safetrain.engine.blocks import Blocks, Call
from safetrain.engine.cpu.kernels import side_by_side
from safetrain.engine.frozen_store import OUTSIDE
from safetrain.engine.loss import ShardLoss, through
from safetrain.engine.model import BaseModel
from safetrain.engine.sliced_head import sliced_losses, takes_slices
from safetrain.engine.upstream.adaptation import SplitModel

Sums = dict[str, mx.array]  # gradients by the name of their parameter


@dataclass(frozen=True)
class Listener:
    """Whom to tell: ``begin`` gets the number of a group's first micro-batch, ``pulse`` is called before each block.

    ``done`` is called after each phase with its values and the following phase.
    """

    begin: Callable[[int], None]
    pulse: Callable[[], None]
    done: Callable[..., Any]


@dataclass
class Piece:
    """A shard on its way through the blocks."""

    shard: Shard
    key: mx.array | None  # of its random numbers
    state: mx.array  # the last block's output; on the way back its gradient
    calls: list[Call]
    inputs: dict[int, mx.array] = field(default_factory=dict)  # of the blocks that are computed again


def gradient_by_blocks(
    model: BaseModel, loss: ShardLoss, update: Update, key_of: Callable[[Shard], mx.array], progress: Listener
) -> tuple[mx.array, Any]:
    """Summed loss of an update, and the gradient of its mean loss per label, as a tree of the trained parameters."""
    blocks, number, total, sums = blocks_of(model), 0, list[mx.array](), Sums()
    trained = model.module.trainable_parameters()
    lowest = next(place for place, part in enumerate(blocks.parts) if tree_flatten(part.trainable_parameters()))
    before, blocks.pulse = blocks.pulse, progress.pulse
    try:
        for group in grouped(model, update.micro_batches, len(blocks) - lowest):
            progress.begin(number)
            pieces = begun(model, group, key_of)
            forward(model, pieces, lowest)
            progress.done(Phase.FORWARD, pieces[-1][-1].state, Phase.LOSS)
            total += losses(model, loss, pieces, update.per_label(1.0))
            progress.done(Phase.LOSS, total[-1], Phase.BACKWARD)
            backward(model, pieces, lowest, sums)
            progress.done(Phase.BACKWARD, list(sums.values()))
            number += len(group)
    finally:
        blocks.pulse = before
    blocks.store.require_unchanged()
    gradient = tree_map_with_path(lambda name, own: sums[name] if total else mx.zeros_like(own), trained)
    return functools.reduce(mx.add, total or [mx.array(0.0)]) * update.trained_tokens, gradient


def begun(
    model: BaseModel, batches: Sequence[MicroBatch], key_of: Callable[[Shard], mx.array] | None = None
) -> list[list[Piece]]:
    """The pieces of micro-batches before the first block."""
    blocks, found = blocks_of(model), list[list[Piece]]()
    split = model.split
    call = split.trunk if split is not None else model.module
    for batch in batches:
        found.append([])
        for shard in batch.shards:
            state, calls = blocks.noted(functools.partial(through, model, call, shard))
            found[-1].append(Piece(shard, key_of(shard) if key_of is not None else None, state, calls))
    with blocks.store.reading():
        mx.eval([piece.state for pieces in found for piece in pieces])
    blocks.store.drop(OUTSIDE)
    return found


def forward(model: BaseModel, batches: list[list[Piece]], lowest: int | None = None) -> None:
    """Compute all blocks for all pieces; keep the inputs of the blocks from ``lowest`` on."""
    blocks = blocks_of(model)

    def through_block(number: int, piece: Piece) -> mx.array:
        model.randomness.key = piece.key
        return blocks.compute(number, piece.state, piece.calls[number])

    for number in range(len(blocks)):
        with blocks.at_hand(number, number + 1):
            for pieces in batches:
                states = at_once(functools.partial(through_block, number), pieces)
                for piece, state in zip(pieces, states, strict=True):
                    if lowest is not None and number >= lowest:
                        piece.inputs[number] = piece.state
                    piece.state = state
                del states, state


def losses(model: BaseModel, loss: ShardLoss, batches: list[list[Piece]], share: float) -> list[mx.array]:
    """The summed loss of each micro-batch; each piece's state becomes its gradient in the last block's output."""
    blocks, split, found = blocks_of(model), model.split, list[mx.array]()
    call = split.trunk if split is not None else model.module

    def weighted(piece: Piece) -> Shard:
        own = piece.shard
        return Shard(own.inputs, own.layout, own.positions, own.targets, own.weights * share, (), None)

    def tail(piece: Piece, run: Callable[[Shard], mx.array]) -> Callable[[mx.array], mx.array]:
        """``run`` on a shard as a function of the last block's output."""
        shard = weighted(piece)

        def of_state(state: mx.array) -> mx.array:
            blocks.given = {id(shard): state}
            return run(shard)

        return of_state

    def chosen(shard: Shard) -> mx.array:
        return through(model, call, shard)[shard.positions]

    def of_piece(piece: Piece) -> tuple[mx.array, mx.array]:
        pair: tuple[mx.array, mx.array] = mx.value_and_grad(tail(piece, loss))(piece.state)
        return pair

    def by_slices(pieces: list[Piece]) -> list[tuple[mx.array, mx.array]]:
        hidden = at_once(lambda piece: tail(piece, chosen)(piece.state), pieces)
        shards = [(states, p.shard.targets, p.shard.weights * share) for states, p in zip(hidden, pieces, strict=True)]
        pairs = dict(zip(map(id, pieces), sliced_losses(split_of(model), shards), strict=True))
        back = at_once(lambda p: mx.vjp(tail(p, chosen), [p.state], [pairs[id(p)][1]])[1][0], pieces)
        return [(pairs[id(piece)][0], gradient) for piece, gradient in zip(pieces, back, strict=True)]

    most = max(sum(piece.shard.targets.size for piece in pieces) for pieces in batches)
    sliced = takes_slices(split, most, batches[0][0].state.shape[-1])
    with blocks.store.reading(), nullcontext() if sliced else loss.one_head():
        for pieces in batches:
            pairs = by_slices(pieces) if sliced else at_once(of_piece, pieces)
            found.append(mx.stack([value for value, _ in pairs]).sum())
            mx.eval(found[-1])
            for piece, (_, gradient) in zip(pieces, pairs, strict=True):
                piece.state = gradient
    blocks.given = {}
    blocks.store.drop(OUTSIDE)
    return found


def backward(model: BaseModel, batches: list[list[Piece]], lowest: int, sums: Sums) -> None:
    """Add the gradients of all pieces to ``sums``, block by block from the last one down."""
    blocks = blocks_of(model)
    prefixes = {id(part): name for name, part in model.module.named_modules()}
    for number in reversed(range(lowest, len(blocks))):
        part = blocks.parts[number]
        with blocks.at_hand(number, number - 1 if number > lowest else None):
            names = [name for name, _ in tree_flatten(part.trainable_parameters())]
            for pieces in batches:
                results = at_once(functools.partial(_gradients, model, number, names), pieces)
                for piece, (state, _) in zip(pieces, results, strict=True):
                    piece.state = state
                    del piece.inputs[number]
                for place, name in enumerate(names):
                    own = functools.reduce(mx.add, [gradients[place] for _, gradients in results])
                    full = f"{prefixes[id(part)]}.{name}"
                    sums[full] = sums[full] + own if full in sums else own
                mx.eval(sums)
                del results, state, own


def _gradients(model: BaseModel, number: int, names: list[str], piece: Piece) -> tuple[mx.array, list[mx.array]]:
    """The gradients of a block's input and of its parameters ``names``, as lazy arrays."""
    blocks, trained = blocks_of(model), blocks_of(model).parts[number].trainable_parameters()
    part, values = blocks.parts[number], [value for _, value in tree_flatten(trained)]
    model.randomness.key = piece.key

    def compute(state: mx.array, *arrays: mx.array) -> list[mx.array]:
        part.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        return [blocks.compute(number, state, piece.calls[number])]

    try:
        _, (state, *gradients) = mx.vjp(compute, [piece.inputs[number], *values], [piece.state])
    finally:
        part.update(trained)  # tracing leaves placeholders behind
    return state, gradients


def at_once(compute: Callable[[Piece], Any], pieces: Sequence[Piece]) -> list[Any]:
    """Compute something for each piece, side by side on a CPU."""
    results = side_by_side(compute, pieces)
    mx.eval(results)
    return results


def computed(model: BaseModel, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield each micro-batch; with the base on disk, when the outputs of its last block are there for ``through``."""
    if model.blocks is None:
        yield from batches
        return
    for group in grouped(model, batches, kept_blocks=1):
        pieces = begun(model, group)
        forward(model, pieces)
        model.blocks.given = {id(piece.shard): piece.state for part in pieces for piece in part}
        yield from group
        model.blocks.given = {}
    model.blocks.store.drop(OUTSIDE)


def grouped(model: BaseModel, batches: Iterable[MicroBatch], kept_blocks: int) -> Iterator[list[MicroBatch]]:
    """Micro-batches that are computed together: inputs of so many blocks take at most KEPT_BYTES, or are of one."""
    group, kept = list[MicroBatch](), 0
    for batch in batches:
        tokens = sum(shard.inputs.size for shard in batch.shards)
        size = tokens * kept_blocks * blocks_of(model).state_bytes
        if group and kept + size > KEPT_BYTES:
            yield group
            group, kept = [], 0
        group.append(batch)
        kept += size
    if group:
        yield group


def split_of(model: BaseModel) -> SplitModel:
    """The model as trunk and head."""
    if model.split is None:
        raise RuntimeError("the model has no separate head")
    return model.split


def blocks_of(model: BaseModel) -> Blocks:
    """The blocks of a base that stays on disk."""
    if model.blocks is None:
        raise RuntimeError("the base is in memory")
    return model.blocks
