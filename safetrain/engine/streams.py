"""CPU streams that run side by side. They live as long as the process: mlx gives each a thread and takes none back."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from safetrain.engine.blas import blas_threads

Given = TypeVar("Given")
Made = TypeVar("Made")


def side_by_side(compute: Callable[[int, Given], Made], shards: Sequence[Given]) -> list[Made]:
    """``compute(index, shard)`` of each shard on a CPU stream of its own, evaluated together, the cores shared."""
    made = []
    with blas_threads(len(shards)):
        for index, shard in enumerate(shards):
            with mx.stream(_cpu_stream(index)):
                made.append(compute(index, shard))
        mx.eval(made)
    return made


@functools.cache
def _cpu_stream(index: int) -> mx.Stream:
    return mx.new_stream(mx.cpu)
