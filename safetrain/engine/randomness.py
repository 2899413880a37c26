"""Random numbers of a training as values: each is a function of (seed, update, part of the update, place in the model).

Nothing random is state, so nothing of it has to be saved, and a block that is computed twice (gradient checkpointing)
draws the same numbers twice.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class Randomness:
    """Hands out keys to the places in a model that draw. ``keys`` is set before each forward pass, one per place."""

    def __init__(self) -> None:
        self.places = 0
        self.keys: mx.array | None = None  # (places, 2) words

    def place(self) -> int:
        """Register one more place and return its number."""
        self.places += 1
        return self.places - 1

    def key(self, place: int) -> mx.array:
        """The key of a place for this forward pass."""
        if self.keys is None:
            raise RuntimeError("a layer draws random numbers before it was given keys")
        return self.keys[place]

    def keys_for(self, seed: int, *position: int) -> mx.array:
        """One key for every place, at a position such as (update, part of it)."""
        number = int(np.random.default_rng([seed, *position]).integers(2**63))
        return mx.random.split(mx.random.key(number), max(1, self.places))


class Dropout(nn.Module):
    """Zeroes a share of its input while training and scales up the rest."""

    def __init__(self, share: float, source: Randomness) -> None:
        super().__init__()
        self._keep, self._source, self._place = 1.0 - share, source, source.place()

    def __call__(self, x: mx.array) -> mx.array:
        if self._keep == 1.0 or not self.training:
            return x
        kept = mx.random.bernoulli(self._keep, x.shape, key=self._source.key(self._place))
        return mx.where(kept, x * (1.0 / self._keep), 0.0)


class NoisyEmbedding(nn.Module):
    """An embedding that adds uniform noise of alpha / sqrt(tokens x width) while training (NEFTune, arXiv 2310.05914).

    ``tokens`` is the length of a token's own row, so that padding and packing change nothing.
    """

    def __init__(self, embedding: Any, alpha: float, source: Randomness) -> None:
        super().__init__()
        self.embedding = embedding
        self._alpha, self._source, self._place = alpha, source, source.place()
        self._row_lengths: mx.array | None = None  # like the ids, set before each forward pass

    def set_row_lengths(self, lengths: mx.array) -> None:
        """The length of the row that each token of the next forward pass belongs to, shaped as the ids."""
        self._row_lengths = lengths

    def __call__(self, ids: mx.array) -> mx.array:
        embedded = self.embedding(ids)
        if not self.training or self._row_lengths is None:
            return embedded
        noise = mx.random.uniform(-1.0, 1.0, embedded.shape, key=self._source.key(self._place))
        size = self._alpha / mx.sqrt(self._row_lengths * embedded.shape[-1])
        return embedded + (noise * size[..., None]).astype(embedded.dtype)

    @property
    def weight(self) -> mx.array:
        """Some models read it."""
        return self.embedding.weight

    def as_linear(self, x: mx.array) -> mx.array:
        """Tied heads use the embedding itself."""
        return self.embedding.as_linear(x)
