"""Dropout whose draws are a function of seed, update, rows and place in the model.

Nothing random is state, so nothing of it has to be saved, and a block that is computed twice (gradient checkpointing)
draws the same numbers twice. Rows that are computed together share a key: with other micro-batches, or on other ranks,
the same row draws other numbers.
"""

import hashlib

import mlx.core as mx
import mlx.nn as nn


class Randomness:
    """Hands out keys to the places in a model that draw. ``key`` is set before each forward pass."""

    def __init__(self) -> None:
        self.places = 0
        self.key: mx.array | None = None

    def place(self) -> int:
        """Register one more place and return its number."""
        self.places += 1
        return self.places - 1

    def key_at(self, place: int) -> mx.array:
        """The key of a place, for this forward pass."""
        if self.key is None:
            raise RuntimeError("a layer draws random numbers before it was given a key")
        return self.key + place


def key_of(seed: int, update: int, first_row: int) -> mx.array:
    """The key of the rows that an update computes together, of which ``first_row`` is the first."""
    digest = hashlib.blake2b(f"{seed} {update} {first_row}".encode(), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


class Dropout(nn.Module):
    """Zeroes a share of its input while training and scales up the rest."""

    def __init__(self, share: float, source: Randomness) -> None:
        super().__init__()
        self._keep, self._source, self._place = 1.0 - share, source, source.place()

    def __call__(self, x: mx.array) -> mx.array:
        if self._keep == 1.0 or not self.training:
            return x
        mask = mx.random.bernoulli(self._keep, x.shape, key=self._source.key_at(self._place))
        return mx.where(mask, x * (1.0 / self._keep), 0.0)
