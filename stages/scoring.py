"""Turns answers and losses into scores with their uncertainty. Pure."""

import math
from collections.abc import Sequence

from safetrain.core.records.reports import Score

Z95 = 1.959964  # two-sided 95 % of a normal distribution


def score(loss: float, answers: Sequence[str], expected: Sequence[str]) -> Score:
    """Loss in nats per token, and the share of ``answers`` that are exactly ``expected``, outer spaces apart."""
    perplexity = math.exp(min(loss, 700.0))
    if not expected:
        return Score(loss, perplexity, None, None, None)
    right = sum(answer.strip() == wanted.strip() for answer, wanted in zip(answers, expected, strict=True))
    low, high = wilson_interval(right, len(expected))
    return Score(loss, perplexity, right / len(expected), low, high)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    share, square = right / total, Z95**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)
