"""Scores against values worked out elsewhere."""

import math

import pytest

from safetrain.core.records.scoring import score, wilson_interval


def test_wilson_interval_matches_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I: 81/263, 15/148, 0/20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_exact_match_forgives_outer_spaces_only() -> None:
    result = score(0.5, ["a ", "b", "C"], ["a", "b.", "c"])
    assert result.exact_match == pytest.approx(1 / 3)
    assert result.perplexity == pytest.approx(math.exp(0.5))


def test_without_questions_there_is_no_exact_match() -> None:
    assert score(0.5, [], []).exact_match is None
