"""Adapters as numbers, for trainings that may differ by rounding."""

import math
from pathlib import Path

import numpy as np

Adapter = dict[str, np.ndarray]
NO_LEARNING = 1e-6  # a learning rate that moves an adapter by next to nothing: by nothing at all is an error


def read_adapter(file: Path) -> Adapter:
    """The arrays of a safetensors file."""
    import mlx.core as mx

    loaded = mx.load(str(file))
    if not isinstance(loaded, dict):
        raise RuntimeError(f"{file} holds no named arrays")
    return {name: np.array(value, dtype=np.float64) for name, value in loaded.items()}


def difference_of_movement(one: Adapter, other: Adapter, initial: Adapter) -> float:
    """How far apart two trained adapters are, as a share of the way that the second has gone."""
    return distance(one, other) / distance(other, initial)


def distance(one: Adapter, other: Adapter) -> float:
    """Euclidean."""
    return math.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one))
