"""Random numbers as values: each is a function of (seed, update, row, token, place in the model, feature).

Nothing random is state, so nothing of it has to be saved; a block that is computed twice (gradient checkpointing)
draws the same numbers twice; and how an update's rows are divided into micro-batches changes no draw, so a training
that goes on with smaller ones after running out of memory stays the same training.
"""

import functools
import hashlib
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from safetrain.core.data.row_order import row_order

RANGE_OF_BITS = 2.0**32


class Randomness:
    """Hands out random bits to the places in a model that draw. ``tokens`` is set before each forward pass."""

    def __init__(self) -> None:
        self.places = 0
        self.tokens: mx.array | None = None  # (tokens,) 32 random bits each
        self.sorted: mx.array | None = None  # (lines,) the token of each line that was last sorted by expert

    def place(self) -> int:
        """Register one more place and return its number."""
        self.places += 1
        return self.places - 1

    def bits(self, place: int, shape: tuple[int, ...]) -> mx.array:
        """Uniform 32-bit numbers of ``shape`` (..., features), for this forward pass.

        Multiply-add hashing: a t + b modulo 2^32, with random bits t of each token and random a, b for each
        feature of the place, independent in pairs (Dietzfelbinger, STACS 1996). Where the leading axes are not the
        tokens, the place in the array stands for the token.
        """
        return self._hashed(self._given(), place, shape)

    def bits_of_experts(self, place: int, shape: tuple[int, ...]) -> mx.array:
        """The same for lines (..., features) that go to experts: one a token, or one for each expert of a token.

        All lines of a token draw alike, whether they are sorted by expert (then they have one axis before the last two)
        or too few for that: how many there are depends on the micro-batch.
        """
        tokens, lines = self._given().reshape(-1), math.prod(shape[:-1])
        if len(shape) == 3 and self.sorted is not None and self.sorted.size == lines:
            tokens = tokens[self.sorted]
        elif lines % tokens.size == 0:
            tokens = mx.repeat(tokens, lines // tokens.size)
        return self._hashed(tokens, place, shape)

    def _given(self) -> mx.array:
        if self.tokens is None:
            raise RuntimeError("a layer draws random numbers before it was given random bits")
        return self.tokens

    def _hashed(self, tokens: mx.array, place: int, shape: tuple[int, ...]) -> mx.array:
        lines = math.prod(shape[:-1])
        if lines != tokens.size:
            odd = mx.arange(lines, dtype=mx.uint32) * 2 + 1
            tokens = (odd * 0x9E3779B1) ^ tokens.reshape(-1)[0]
        factor, offset = _of_features(place, shape[-1])
        return tokens.reshape(*shape[:-1], 1) * factor + offset


@functools.lru_cache(maxsize=4096)
def _of_features(place: int, features: int) -> tuple[mx.array, mx.array]:
    """Two random bits for each feature of a place, the first odd."""
    drawn = np.random.default_rng([place, features]).integers(2**32, size=(2, features), dtype=np.uint32)
    factor, offset = mx.array(drawn[0] | 1), mx.array(drawn[1])
    mx.eval(factor, offset)
    return factor, offset


def token_bits(seed: int, update: int, tokens: Any) -> mx.array:
    """32 random bits for each of ``tokens``, numbers that name a row and a place in it (splitmix64's finalizer)."""
    key = np.random.default_rng([seed, update]).integers(2**64, dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mx.array((mixed >> np.uint64(32)).astype(np.uint32))


@functools.cache
def draws() -> str:
    """A fingerprint of what numpy draws for dropout and the order of rows: another version may draw otherwise.

    Two versions of the same fingerprint continue each other's runs.
    """
    drawn = token_bits(1, 2, np.arange(64)), *_of_features(3, 64)
    digest = hashlib.blake2b(row_order(1, 2, 4096, 0).tobytes(), digest_size=8)
    for bits in drawn:
        digest.update(np.array(bits).tobytes())
    return digest.hexdigest()


class Dropout(nn.Module):
    """Zeroes a share of its input while training and scales up the rest."""

    def __init__(self, share: float, source: Randomness) -> None:
        super().__init__()
        self._keep, self._source, self._place = 1.0 - share, source, source.place()

    def __call__(self, x: mx.array) -> mx.array:
        if self._keep == 1.0 or not self.training:
            return x
        kept = self._bits(x.shape) < mx.array(int(self._keep * RANGE_OF_BITS), mx.uint32)
        return mx.where(kept, x * (1.0 / self._keep), 0.0)

    def _bits(self, shape: tuple[int, ...]) -> mx.array:
        return self._source.bits(self._place, shape)


class ExpertDropout(Dropout):
    """Dropout of what goes to the experts of a mixture."""

    def _bits(self, shape: tuple[int, ...]) -> mx.array:
        return self._source.bits_of_experts(self._place, shape)
