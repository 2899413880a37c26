"""Changes to a model's layers: dropout by key, dequantized weights, gradient checkpointing.

Random numbers depend only on seed, update, rows and place in the model. So checkpoints save no random state, and a
block that is computed twice draws the same numbers twice. With different micro-batches or ranks, the same row draws
different numbers.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32

ALL = slice(None)
SLICE_BYTES = 2**22  # of a slice of a weight's rows, in float32
Arrays = Any  # a tuple or list of arrays; mlx types custom gradients as object


class Trained:
    """The trained arrays of a module, by name. They are listed once: walking through a large model takes long."""

    def __init__(self, module: Any) -> None:
        parents = ((name, *name.rpartition(".")) for name, _ in tree_flatten(module.trainable_parameters()))
        self._places = {name: (part_at(module, owner) if owner else module, key) for name, owner, _, key in parents}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, mx.array]:
        """The arrays as they are now: all, or those of some ``names``."""
        places = ((name, *self._places[name]) for name in names or self._places)
        return {name: part[key] for name, part, key in places}

    def put(self, arrays: Mapping[str, mx.array]) -> None:
        """Replace some or all of them."""
        for name, array in arrays.items():
            part, key = self._places[name]
            part[key] = array


def part_at(tree: Any, name: str) -> Any:
    """The part of a tree or module at a dotted name."""
    for key in name.split("."):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


class Randomness:
    """Gives a random key to each place in a model that needs one. Set ``key`` before each forward pass."""

    def __init__(self) -> None:
        self.places = 0
        self.key: Any = None


def key_of(seed: int, update: int, first_row: int) -> mx.array:
    """The random key of rows that an update computes together, starting with ``first_row``."""
    digest = hashlib.blake2b(f"{seed} {update} {first_row}".encode(), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


class Dropout(nn.Module):
    """While training, zeroes a random share of its inputs and scales up all others."""

    def __init__(self, share: float, source: Randomness) -> None:
        super().__init__()
        self._keep, self._source, self._place = 1.0 - share, source, source.places
        source.places += 1

    def __call__(self, x: mx.array) -> mx.array:
        if self._keep == 1.0 or not self.training:
            return x
        mask = mx.random.bernoulli(self._keep, x.shape, key=self._source.key + self._place)
        return mx.where(mask, x * (1.0 / self._keep), 0.0)


def dequantized(layer: Any, rows: slice = ALL, after: mx.array | None = None) -> mx.array:
    """A layer's weight, or some of its rows, dequantized if needed. ``after``: an array to compute first."""
    if "scales" not in layer:
        return layer.weight[rows]
    biases, weight = layer.get("biases"), layer.weight[rows]
    return mx.dequantize(
        weight if after is None else mx.depends([weight], [mx.stop_gradient(after)])[0],
        layer.scales[rows],
        None if biases is None else biases[rows],
        group_size=layer.group_size,
        bits=layer.bits,
        mode=getattr(layer, "mode", "affine"),
    )


def inputs_of(layer: Any) -> int:
    """Input width of a layer, quantized or not."""
    width: int = layer.weight.shape[-1]
    return width * 32 // layer.bits if "scales" in layer else width


def slices_of(count: int, numbers_each: int) -> list[slice]:
    """Divide ``count`` rows of ``numbers_each`` numbers into slices that are small in float32."""
    step = max(1, SLICE_BYTES // (FLOAT32 * numbers_each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def change_classes(module: Any, kinds: Mapping[type, type]) -> None:
    """Change the class of every part of ``module`` whose own class, not a base class, is a key of ``kinds``."""
    for _, part in module.named_modules():
        if type(part) in kinds:
            part.__class__ = kinds[type(part)]


def give(part: Any, members: Mapping[str, Any]) -> None:
    """Add or replace members of one object only, by changing its class to a new subclass."""
    kind: Any = type(part)
    part.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def checkpoint(block: Any) -> None:
    """Let only this block use gradient checkpointing: keep its input and recompute in the backward pass.

    mlx-lm instead replaces ``__call__`` of the first block's class permanently, which misses blocks of other classes.
    A second call changes nothing.
    """
    kind = type(block)
    if getattr(kind, "recomputes", False):
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.__call__(self, *args, **kwargs)
        call_arguments, results = (args, kwargs), []
        _require_no_carrier(kind.__name__, call_arguments)
        values = trained.arrays()

        def compute(*arrays: mx.array) -> list[mx.array]:
            trained.put(dict(zip(values, arrays, strict=False)))
            positional, keywords = _with_floats(call_arguments, arrays[len(values) :])
            results.append(kind.__call__(self, *positional, **keywords))
            return _floats_in(results[-1])

        # every array is an explicit input or output: arrays in a closure get no gradient
        outputs = recomputed(compute, len(values))(*values.values(), *_floats_in(call_arguments))
        trained.put(values)
        return _with_floats(results[0], outputs)

    trained = Trained(block)
    give(block, {"__call__": call, "recomputes": True})


def _require_no_carrier(block: str, arguments: Any) -> None:
    """Raise ModelError if a block could pass arrays to later blocks inside an object: it would lose their gradient."""
    carrier = next((x for _, x in tree_flatten(arguments) if type(x).__module__.startswith("mlx_lm.")), None)
    if carrier is not None:
        what = f"{block} cannot be trained with gradient checkpointing: it passes arrays on in {type(carrier).__name__}"
        raise ModelError(f"{what}, where their gradient is lost.", do="set train.gradient_checkpointing=false")


def recomputed(compute: Callable[..., list[mx.array]], parameters: int) -> Callable[..., list[mx.array]]:
    """Wrap ``compute`` so that the backward pass recomputes it; its first ``parameters`` inputs are trained.

    Recomputation waits for the block's gradient, and the blocks below wait for its parameters' gradients. With
    ``mx.checkpoint`` neither waits, so breadth-first evaluation, as on several streams, keeps all blocks in memory.
    """

    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        del outputs
        later = mx.depends(list(primals), list(cotangents))
        gradients = mx.vjp(compute, later, list(cotangents))[1]
        trained, onward = gradients[:parameters], gradients[parameters:]
        return (*trained, *(mx.depends(onward, trained) if trained and onward else onward))

    return with_gradient(compute, backward)


def with_gradient(forward: Callable[..., Any], backward: Callable[[Arrays, Arrays, Arrays], Arrays]) -> Any:
    """A function with a custom gradient: ``backward`` takes inputs, cotangents and outputs."""
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function


def _floats_in(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if _is_float(leaf)]


def _with_floats(tree: Any, arrays: Iterable[mx.array]) -> Any:
    """A copy of a tree with its floating-point arrays replaced, in order."""
    following = iter(arrays)
    return tree_map(lambda leaf: next(following) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
