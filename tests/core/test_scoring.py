"""Scores and intervals against values worked out elsewhere."""

import math

import numpy as np
import pytest

from safetrain.core.records.scoring import improvement, score, t95, token_f1, wilson_interval


def test_intervals_match_published_tables() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I: 81/263, 15/148, 0/20.
    for right, total, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))):
        assert wilson_interval(right, total) == pytest.approx(ends, abs=5e-5)
    for freedom, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (219, 1.971)):
        assert t95(freedom) == pytest.approx(expected, rel=0.01)


def test_exact_match_forgives_outer_spaces_only() -> None:
    result = score(0.5, ["a ", "b", "C"], ["a", "b.", "c"])
    assert (result.exact_match, result.token_f1) == (pytest.approx(1 / 3), 1.0)
    assert result.perplexity == pytest.approx(math.exp(0.5))
    assert (score(0.5, [], []).loss, score(0.5, [], []).exact_match) == (0.5, None)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    """The difference is paired, so rows that are hard for both models do not widen it."""
    source, held, true = np.random.default_rng(7), 0, 0.2
    for _ in range(1000):
        labels = source.integers(1, 40, 100)
        gained = labels * (true + source.normal(0, 0.3, 100)) + source.normal(0, 2, 100)
        hard = labels * source.uniform(0, 10, 100)
        found = improvement(hard + gained, hard, labels)
        held += abs(found.nats_per_label - true) <= (found.plus_minus or 0.0)
    assert held / 1000 == pytest.approx(0.95, abs=0.02)
    one = improvement(np.array([0.0, 12.0, 0.0]), np.array([0.0, 6.0, 0.0]), np.array([0, 4, 0]))
    assert (one.nats_per_label, one.plus_minus, one.rows) == (1.5, None, 1)


@pytest.mark.parametrize(
    ("answer", "expected", "by_words"),
    [
        ("The capital of Japan is Tokyo.", "The capital of Japan is Tokyo.", 1.0),
        ("The capital of Japan is Kyoto.", "The capital of Japan is Tokyo.", 5 / 6),
        ("O símbolo é Fe.", "O símbolo químico do elemento ferro é Fe.", 2 / 3),
        ("日本の首都", "日本の首都は東京", 10 / 13),  # a script without spaces: each letter is a word
        ("a b", "ab", 0.0),
        ("", "something", 0.0),
    ],
)
def test_nearness_of_answers(answer: str, expected: str, by_words: float) -> None:
    assert token_f1(answer, expected) == pytest.approx(by_words)
