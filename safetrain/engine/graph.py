"""Kernels that a computation launches on a GPU, counted in mlx's graph before it is evaluated."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

# They describe an array anew and launch nothing, unless what they describe is not contiguous: that is not in the graph.
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten",
    "NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip
COPIES_EACH = "Concatenate"  # launches a copy for each of its inputs
NODE = re.compile(r'^\{ (\d+) \[label ="([^"]*)", shape=rectangle\]; \}$|^"\w+" -> (\d+)$', re.MULTILINE)


def count_kernels(*trees: Any) -> int:
    """How many kernels computing these arrays, or trees of arrays, launches. Nothing is computed."""
    return kernels_by_name(*trees).total()


def kernels_by_name(*trees: Any) -> Counter[str]:
    """The same for each operation, by mlx's name for it."""
    written = io.StringIO()
    mx.export_to_dot(written, *(leaf for _, leaf in tree_flatten(list(trees)) if isinstance(leaf, mx.array)))
    names, found = dict[str, str](), Counter[str]()
    for node, name, into in NODE.findall(written.getvalue()):
        if node:
            names[node] = name
            found[name] += name not in VIEWS and name != COPIES_EACH
        elif names[into] == COPIES_EACH:
            found[COPIES_EACH] += 1
    return found


@contextmanager
def unevaluated() -> Iterator[None]:
    """Let mx.eval and mx.async_eval do nothing inside, so that the graph stays whole. In a process of its own."""
    own = mx.eval, mx.async_eval
    mx.eval = mx.async_eval = lambda *_: None
    try:
        yield
    finally:
        mx.eval, mx.async_eval = own
