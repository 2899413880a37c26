"""CPU streams that run side by side. They live as long as the process: mlx gives each a thread and takes none back."""

import functools

import mlx.core as mx


@functools.cache
def cpu_stream(index: int) -> mx.Stream:
    """Stream number ``index``, made when first asked for."""
    return mx.new_stream(mx.cpu)
