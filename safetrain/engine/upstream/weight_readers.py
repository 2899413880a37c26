"""Linear layers that cannot carry an adapter, because the model does more with them than call them.

Some models read a layer's weight themselves, or store another one in it (Gemma 3n clips two in each pass). An adapter
in the layer's place has no weight, and what is stored while a gradient is traced may be a placeholder. Found in the
code of the model's classes, never by the model's name.
"""

import dis
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from safetrain.engine.adapters import LINEAR
from safetrain.engine.upstream.rebind import give

NOT_IN_A_PASS = ("__init__", "sanitize", "shard", "fuse", "to_quantized", "to_lora")
READS, STORES = frozenset({"LOAD_ATTR", "STORE_ATTR"}), frozenset({"STORE_ATTR"})


def without_adapter(block: Any) -> set[str]:
    """Full names inside ``block`` of such layers, and of those that mlx-lm adapts in a way of their own (AFM's)."""
    found = set()
    for name, part in block.named_modules():
        if hasattr(part, "to_lora"):
            found.add(name)
        kind: Any = type(part)
        for child in _read_by(kind):
            if isinstance(part.get(child), LINEAR):
                found.add(f"{name}.{child}" if name else child)
    return found


def restore_weights(module: Any) -> None:
    """Let every method that stores a layer's weight leave the one behind that it found."""
    for _, part in module.named_modules():
        kind: Any = type(part)
        own = {name: _restoring(method, children) for name, method, children in _storing(kind)
               if all(child in part for child in children)}  # fmt: skip
        if own:
            give(part, own)


def _restoring(method: Callable[..., Any], children: frozenset[str]) -> Callable[..., Any]:
    def restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {child: self[child].weight for child in children}
        try:
            return method(self, *args, **kwargs)
        finally:
            for child, weight in before.items():
                self[child].weight = weight

    return restored


@functools.cache
def _read_by(kind: type) -> frozenset[str]:
    """Names of children whose weight the class's own code reads or stores."""
    return frozenset().union(*(_children(method, READS) for each in _kinds(kind) for method in _methods(each).values()))


@functools.cache
def _storing(kind: type) -> tuple[tuple[str, Callable[..., Any], frozenset[str]], ...]:
    """Methods that store a weight, and in which children."""
    methods: dict[str, types.FunctionType] = {}
    for each in reversed(_kinds(kind)):
        methods |= _methods(each)
    found = [(name, method, _children(method, STORES)) for name, method in methods.items()]
    return tuple(each for each in found if each[2])


def _kinds(kind: type) -> list[type]:
    """The class and those it is made of, as far as mlx's own."""
    return [each for each in kind.__mro__ if each is not object and not each.__module__.startswith(nn.__name__)]


def _methods(kind: type) -> dict[str, types.FunctionType]:
    """That a pass may call, by name."""
    return {
        name: value
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and name not in NOT_IN_A_PASS
    }


def _children(method: types.FunctionType, operations: frozenset[str]) -> frozenset[str]:
    """X wherever the code says something.X.weight."""
    code = list(dis.get_instructions(method))
    return frozenset(
        str(child.argval)
        for child, weight in itertools.pairwise(code)
        if child.opname == "LOAD_ATTR" and weight.opname in operations and weight.argval == "weight"
    )
