"""Scores against values worked out elsewhere."""

import math

import numpy as np
import pytest

from safetrain.core.records.forgetting import Forgetting, PartForgotten
from safetrain.core.records.intervals import improvement, t95, wilson_interval
from safetrain.core.records.reports import Improvement, Score
from safetrain.core.records.scoring import Thresholds, describe_improvement, judge, score


def test_wilson_interval_matches_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I: 81/263, 15/148, 0/20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(50, 50)[1] == 1.0


def test_exact_match_forgives_outer_spaces_only() -> None:
    result = score(0.5, ["a ", "b", "C"], ["a", "b.", "c"])
    assert result.exact_match == pytest.approx(1 / 3)
    assert result.token_f1 == 1.0
    assert result.perplexity == pytest.approx(math.exp(0.5))


def test_without_questions_there_is_only_a_loss() -> None:
    result = score(0.5, [], [])
    assert (result.loss, result.exact_match, result.token_f1, result.chrf_high) == (0.5, None, None, None)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (219, 1.971)])
def test_student_s_distribution_matches_the_tables(freedom: int, expected: float) -> None:
    assert t95(freedom) == pytest.approx(expected, rel=0.01)


def test_the_difference_is_paired_row_by_row() -> None:
    """Rows that are hard for both models do not blur what the tuned one gained on each."""
    source = np.random.default_rng(4)
    labels = source.integers(1, 30, 200)
    hard = labels * source.uniform(0, 10, 200)
    found = improvement(hard + labels * source.normal(0.5, 0.1, 200), hard, labels)
    assert found.nats_per_label == pytest.approx(0.5, abs=0.03)
    assert found.plus_minus is not None
    assert 0.01 < found.plus_minus < 0.03


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    source, held, true = np.random.default_rng(7), 0, 0.2
    for _ in range(1000):
        labels = source.integers(1, 40, 100)
        gained = labels * (true + source.normal(0, 0.3, 100)) + source.normal(0, 2, 100)
        found = improvement(gained, np.zeros(100), labels)
        held += abs(found.nats_per_label - true) <= (found.plus_minus or 0.0)
    assert held / 1000 == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Improvement(2.413, 0.058, 220), "better than base by 2.41 ± 0.06 nats per label, n = 220"),
        (Improvement(-0.3, 0.1, 9), "worse than base by 0.30 ± 0.10 nats per label, n = 9"),
        (Improvement(0.01, 0.05, 9), "not shown to differ from base: better by 0.01 ± 0.05 nats per label, n = 9"),
        (Improvement(0.0021, 0.0004, 9), "better than base by 0.0021 ± 0.0004 nats per label, n = 9"),
        (Improvement(0.5, None, 1), "better than base by 0.50 nats per label on one row: no proof"),
    ],
)
def test_one_sentence_says_it(found: Improvement, text: str) -> None:
    assert describe_improvement(found) == text


def scored(low: float | None, high: float | None) -> Score:
    return Score(1.0, 2.0, low, low, high, *[None] * 6)


@pytest.mark.parametrize(
    ("gain", "half", "least_gain", "exact", "least_exact", "code"),
    [
        (0.5, 0.1, 0.0, (0.8, 0.9), None, 0),
        (0.5, 0.1, 0.45, (0.8, 0.9), None, 2),
        (0.5, 0.1, 0.6, (0.8, 0.9), None, 1),
        (-0.5, 0.1, 0.0, (0.8, 0.9), None, 1),
        (0.5, None, 0.0, (0.8, 0.9), None, 2),
        (0.5, 0.1, 0.0, (0.8, 0.9), 0.7, 0),
        (0.5, 0.1, 0.0, (0.8, 0.9), 0.85, 2),
        (0.5, None, 0.0, (0.8, 0.9), 0.95, 1),
        (0.5, 0.1, 0.0, (None, None), 0.5, 2),
    ],
)
def test_the_gate_goes_by_the_ends_of_the_intervals(
    gain: float,
    half: float | None,
    least_gain: float,
    exact: tuple[float | None, float | None],
    least_exact: float | None,
    code: int,
) -> None:
    asked = Thresholds(least_gain, least_exact, None)
    verdict = judge(Improvement(gain, half, 9), scored(*exact), forgotten(0.0, 0.0), asked)
    assert verdict.exit_code == code
    assert verdict.reasons
    assert verdict.title == ("better", "not better", "it cannot be said")[code]


def forgotten(size: float | None, half: float | None) -> Forgetting:
    part = PartForgotten(size, half, 3.0, 24)
    return Forgetting(size, half, 3.0, 3.0, 60, 0, part, part, part, "" if size is not None else "it knows nothing")


@pytest.mark.parametrize(
    ("size", "half", "code", "title", "said"),
    [
        (0.31, 0.05, 2, "forgets", "forgets: general text costs 0.31 ± 0.05 nats per token more than the base's; "),
        (0.22, 0.05, 2, "it cannot be said", "may forget: general text costs 0.22 ± 0.05 nats per token more"),
        (0.02, 0.05, 0, "better", "does not forget: general text costs 0.02 ± 0.05 nats per token more"),
        (-0.1, 0.02, 0, "better", "does not forget: general text costs 0.10 ± 0.02 nats per token less"),
        (float("nan"), float("nan"), 2, "it cannot be said", "may forget: "),
        (None, None, 0, "better", "whether it forgets cannot be said: it knows nothing"),
    ],
)
def test_a_model_that_forgets_does_not_pass(
    size: float | None, half: float | None, code: int, title: str, said: str
) -> None:
    verdict = judge(Improvement(0.5, 0.1, 9), scored(0.8, 0.9), forgotten(size, half), Thresholds(0.0, None, 0.2))
    assert (verdict.exit_code, verdict.title) == (code, title)
    assert verdict.reasons[-1].startswith(said)


def test_what_is_not_better_is_no_better_for_what_it_keeps() -> None:
    for size in (0.0, 5.0):
        verdict = judge(Improvement(-0.5, 0.1, 9), scored(0.8, 0.9), forgotten(size, 0.01), Thresholds(0.0, None, 0.2))
        assert (verdict.exit_code, verdict.title) == (1, "not better")
