"""Gradient checkpointing: a block keeps only its input and is computed once more in the backward pass.

Per instance: the block gets its own class. mlx-lm replaces ``__call__`` of the class of the first block, which
misses blocks of other classes, nests when done twice, and stays for ever.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

Arrays = Any  # a tuple or list of arrays; mlx types custom gradients as object


def checkpoint(block: Any) -> None:
    """Let this block, and no other, recompute its activations. A second call changes nothing."""
    kind = type(block)
    if getattr(kind, "recomputes", False):
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.__call__(self, *args, **kwargs)
        call_arguments, results = (args, kwargs), []
        names = [name for name, _ in tree_flatten(self.trainable_parameters())]
        values = [value for _, value in tree_flatten(self.trainable_parameters())]

        def compute(*arrays: mx.array) -> list[mx.array]:
            self.update(tree_unflatten(list(zip(names, arrays, strict=False))))
            positional, keywords = _with_floats(call_arguments, arrays[len(names) :])
            results.append(kind.__call__(self, *positional, **keywords))
            return _floats_in(results[-1])

        # every number goes in and comes out openly: what a closure holds gets no gradient
        outputs = recomputed(compute, len(values))(*values, *_floats_in(call_arguments))
        self.update(tree_unflatten(list(zip(names, values, strict=True))))
        return _with_floats(results[0], outputs)

    give(block, {"__call__": call, "recomputes": True})


def recomputed(compute: Callable[..., list[mx.array]], parameters: int) -> Callable[..., list[mx.array]]:
    """``compute`` once more in the backward pass; the first ``parameters`` of its inputs are trained.

    It waits for its gradient, and the blocks below wait for the gradients of its parameters. ``mx.checkpoint`` says
    neither, and a graph that is walked in breadth, as for several streams, then keeps all blocks in memory.
    """
    function: Any = mx.custom_function(compute)

    @function.vjp
    def backward(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        del outputs
        later = mx.depends(list(primals), list(cotangents))
        gradients = mx.vjp(compute, later, list(cotangents))[1]
        trained, onward = gradients[:parameters], gradients[parameters:]
        return (*trained, *(mx.depends(onward, trained) if trained and onward else onward))

    return function


def give(part: Any, members: Mapping[str, Any]) -> None:
    """Let this object, and no other, have these methods, by its own subclass."""
    kind: Any = type(part)
    part.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def _floats_in(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if _is_float(leaf)]


def _with_floats(tree: Any, arrays: Iterable[mx.array]) -> Any:
    """The same tree with other numbers."""
    following = iter(arrays)
    return tree_map(lambda leaf: next(following) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
