"""Quantizes a tuned model so that it still computes what base and adapter compute.

Rounding alone loses what an adapter changes by less than a step between two quantized numbers. So each layer's weight
is first moved until its outputs, for the inputs that the quantized blocks before it give, are the tuned model's (least
squares). Then its columns are rounded one after the other, and each makes up for the errors of those before it (GPTQ,
arXiv 2210.17323; written as LDLQ in arXiv 2307.13304). Size and speed stay those of the base.

Both models stay on disk, and one block of each is in memory at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.data.token_rows import TokenRows
from safetrain.core.memory.terms import FLOAT32
from safetrain.engine.batches import Shard, in_order, layout_for
from safetrain.engine.layers import give, inputs_of
from safetrain.engine.loss import through
from safetrain.engine.model import OUTSIDE, BaseModel, Call, open_base
from safetrain.engine.weight_files import apply_adapter

DAMPING = 0.01  # of the mean square of a layer's inputs: keeps weights that few tokens use where they are
COPIES, MODELS = 8, 4  # of a layer's sums, (inputs, inputs); of a block's weights
TOGETHER = 128  # columns that are rounded before the others hear of their errors
Stored = tuple[dict[str, Any], Any]  # how mlx quantizes a layer; the type of its scales and biases
WeightOf = Callable[[str, mx.array], mx.array]
Heard = list[tuple[str, mx.array, mx.array]]  # a layer's name, its inputs and its outputs, in the order of calls


class Walk:
    """A model whose blocks are computed one by one on the same tokens; ``heard``: what its layers got and gave."""

    def __init__(self, model: BaseModel, shards: Iterable[Shard], names: Iterable[str]) -> None:
        assert model.blocks is not None
        self.blocks, self.heard = model.blocks, Heard()
        self.layers = {name: part for name, part in model.module.named_modules() if name in set(names)}
        self._began: list[tuple[mx.array, list[Call]]] = [
            self.blocks.noted(functools.partial(through, model, shard)) for shard in shards
        ]
        self.states = [state for state, _ in self._began]
        mx.eval(self.states)
        self.blocks.drop(OUTSIDE)
        for name, layer in self.layers.items():
            self._listen(name, layer)

    def _listen(self, name: str, layer: Any) -> None:
        kind: Any = type(layer)

        def call(part: Any, inputs: mx.array) -> mx.array:
            outputs: mx.array = kind.__call__(part, inputs)
            self.heard.append((name, inputs, outputs))
            return outputs

        give(layer, {"__call__": call})

    def outputs(self, number: int) -> Iterator[mx.array]:
        """Of a block, for each shard, as lazy arrays."""
        for state, (_, calls) in zip(self.states, self._began, strict=True):
            self.heard.clear()
            yield self.blocks.compute(number, state, calls[number])

    def advance(self, number: int) -> None:
        """Go past a block."""
        for place, output in enumerate(self.outputs(number)):
            mx.eval(output)
            self.states[place] = output
        self.heard.clear()


def refit_bytes(module: Any, names: Iterable[str]) -> int:
    """Most memory that refitting layers of a model takes, in bytes (measured: a 0.5B shape, within a fifth)."""
    sizes = {name: (len(part.weight), inputs_of(part)) for name, part in module.named_modules() if "weight" in part}
    block = sum(math.prod(sizes[name]) for name in names) // len(module.layers)
    widest = max(sizes[name][1] for name in names)
    return FLOAT32 * max(2 * max(map(math.prod, sizes.values())), COPIES * widest**2 + MODELS * block)


def refitted(
    base: Path, adapter: Path, weight_of: WeightOf, plan: Mapping[str, Stored], rows: TokenRows, most_tokens: int
) -> Iterator[tuple[str, list[mx.array]]]:
    """Yield each layer in ``plan`` with its packed weight, scales and, in affine modes, biases.

    ``weight_of``: a layer's tuned weight, of its name and its weight in the base. ``rows``: a few thousand tokens.
    Raises ModelError if the model's blocks cannot be computed one by one.
    """
    tuned, model = (open_base(base, dequantize=True, compute_dtype="float32", stream=True) for _ in range(2))
    apply_adapter(tuned, adapter)
    layout = dataclasses.replace(layout_for(model, most_tokens), shards=1)
    shards = [shard for batch in in_order(rows, layout) for shard in batch.shards]
    walks = [Walk(each, shards, plan) for each in (tuned, model)]
    theirs, own = walks
    for number in range(len(own.blocks.parts)):
        with theirs.blocks.at_hand(number), own.blocks.at_hand(number):
            for group in _in_order_of_use(own, number):
                layers = {name: own.layers[name] for name in group}
                for name, layer in layers.items():
                    layer.weight = weight_of(name, layer.weight)
                squares, wanted = _sums(theirs, own, number, layers)
                for name, layer in layers.items():
                    yield name, _refit(layer, squares, wanted[name], plan[name])
            for walk in walks:
                walk.advance(number)


def _in_order_of_use(walk: Walk, number: int) -> list[list[str]]:
    """A block's layers in groups with the same inputs."""
    next(walk.outputs(number))
    first_inputs = {name: id(inputs) for name, inputs, _ in reversed(walk.heard)}
    groups: dict[int, list[str]] = {}
    for name in dict.fromkeys(name for name, _, _ in walk.heard):
        groups.setdefault(first_inputs[name], []).append(name)
    return list(groups.values())


def _sums(theirs: Walk, own: Walk, number: int, layers: Mapping[str, Any]) -> tuple[mx.array, dict[str, mx.array]]:
    """Sums over all tokens: products of the inputs that some layers share; of each layer's tuned outputs with them."""
    squares, wanted = mx.array(0.0), dict.fromkeys(layers, mx.array(0.0))
    for _ in zip(theirs.outputs(number), own.outputs(number), strict=True):
        outputs = {name: outputs for name, _, outputs in theirs.heard}
        inputs = next(inputs for name, inputs, _ in own.heard if name in layers)
        flat = inputs.reshape(-1, inputs.shape[-1]).astype(mx.float32)
        squares = squares + flat.T @ flat
        for name, layer in layers.items():
            given = outputs[name].astype(mx.float32) - layer.get("bias", 0.0)
            wanted[name] = wanted[name] + given.reshape(-1, given.shape[-1]).T @ flat
        mx.eval(squares, wanted)
    return squares, wanted


def _refit(layer: Any, squares: mx.array, wanted: mx.array, stored: Stored) -> list[mx.array]:
    """Quantize a layer by its sums, and give it the quantized weight."""
    (settings, dtype), products = stored, np.array(squares)
    weight = np.array(layer.weight.astype(mx.float32))
    damping = DAMPING * float(np.mean(np.diag(products))) + np.finfo(np.float32).tiny
    products[np.diag_indices_from(products)] += damping
    moved = np.linalg.solve(products, (np.array(wanted) + damping * weight).T).T
    parts = [*mx.quantize(mx.array(np.ascontiguousarray(moved, dtype=np.float32)), **settings)]
    if settings["mode"] == "affine":
        own = [each.astype(dtype) for each in parts[1:]]
        scales, biases = (np.array(each.astype(mx.float32)) for each in own)
        parts = [rounded(moved, scales, biases, products, settings["bits"]), *own]
    dequantize: Any = mx.dequantize
    layer.weight = dequantize(*parts, **settings).astype(layer.weight.dtype)
    mx.eval(layer.weight, parts)
    return parts


def rounded(weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, products: np.ndarray, bits: int) -> mx.array:
    """Round a weight (outputs, inputs) to mlx's packed numbers; scales and biases have shape (outputs, groups).

    The error in its outputs, error @ products @ error.T, is kept small: products = U D U.T, and a column is rounded
    after the errors of the columns before it, times U, are added to it.
    """
    upper = np.linalg.cholesky(products[::-1, ::-1])[::-1, ::-1]
    upper = upper / np.diag(upper)
    numbers, errors, size = np.empty(weight.shape, np.uint8), np.zeros_like(weight), weight.shape[1] // scales.shape[1]
    for start in range(0, weight.shape[1], TOGETHER):
        stop = min(start + TOGETHER, weight.shape[1])
        aim = weight[:, start:stop] + errors[:, :start] @ upper[:start, start:stop]
        for column in range(start, stop):
            scale, bias = scales[:, column // size], biases[:, column // size]
            own = aim[:, column - start] + errors[:, start:column] @ upper[start:column, column]
            numbers[:, column] = np.clip(np.rint((own - bias) / scale), 0, 2**bits - 1)
            errors[:, column] = weight[:, column] - (numbers[:, column] * scale + bias)
    return packed(numbers, bits)


def packed(numbers: np.ndarray, bits: int) -> mx.array:
    """Pack numbers (outputs, inputs) as mlx does: a stream of bits, lowest first, in uint32."""
    stream = np.unpackbits(numbers[..., None], axis=-1, bitorder="little")[..., :bits].reshape(len(numbers), -1)
    return mx.array(np.packbits(stream, axis=-1, bitorder="little").view(np.uint32))
