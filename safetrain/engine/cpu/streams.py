"""Work on several CPU streams at once: only products are threaded inside mlx's CPU backend, all else uses one core."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from safetrain.engine.cpu.blas import blas_threads

Given = TypeVar("Given")
Made = TypeVar("Made")


def side_by_side(compute: Callable[[int, Given], Made], shards: Sequence[Given]) -> list[Made]:
    """``compute(index, shard)`` of each shard on its own stream, evaluated together, the cores shared.

    The streams live as long as the process: mlx gives each a thread and takes none back.
    """
    results = []
    with blas_threads(len(shards)):
        for index, shard in enumerate(shards):
            with mx.stream(cpu_stream(index)):
                results.append(compute(index, shard))
        mx.eval(results)
    return results


@functools.cache
def cpu_stream(index: int) -> mx.Stream:
    """One of those that work side by side."""
    return mx.new_stream(mx.cpu)
