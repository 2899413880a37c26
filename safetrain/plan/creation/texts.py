"""The text that a tokenizer is made of: read once, of which a bounded sample stays in memory."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

SAMPLE_MIB = 64


@dataclass(frozen=True)
class TextSample:
    """Some of the texts that were read, in their order; all of them where they are few."""

    texts: tuple[str, ...]
    sample_bytes: int
    total_bytes: int

    @property
    def is_all(self) -> bool:
        """Whether nothing was left out."""
        return self.sample_bytes == self.total_bytes


def read_sample(texts: Iterable[str], most_bytes: int) -> TextSample:
    """At most ``most_bytes`` of the texts, spread evenly.

    Each text has a number, by its place, and those with the smallest numbers stay: the same ones each time.
    """
    kept, size, total, limit = list[tuple[int, int, str]](), 0, 0, 2**64
    for place, text in enumerate(texts):
        length = len(text.encode("utf-8"))
        total += length
        number = int.from_bytes(hashlib.blake2b(place.to_bytes(8, "big"), digest_size=8).digest(), "big")
        if number < limit:
            kept.append((number, length, text))
            size += length
        while size > most_bytes and len(kept) > 1:
            limit //= 2
            kept = [each for each in kept if each[0] < limit] or [min(kept)]
            size = sum(length for _, length, _ in kept)
    return TextSample(tuple(text for _, _, text in kept), size, total)
