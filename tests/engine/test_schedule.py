"""Warm-up and schedules, counted in updates."""

import itertools

import pytest

from safetrain.engine.optimizer import learning_rate


def test_it_rises_to_the_peak_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(update, 1.0, 10, 110) for update in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_without_warm_up_it_starts_at_the_peak() -> None:
    assert learning_rate(0, 1.0, 0, 1) == 1.0


@pytest.mark.parametrize(
    ("schedule", "middle", "near_the_end", "end"),
    [("cosine", 0.55, 0.1222, 0.1), ("linear", 0.55, 0.19, 0.1), ("constant", 1.0, 1.0, 1.0), ("wsd", 1.0, 0.55, 0.1)],
)
def test_schedules(schedule: str, middle: float, near_the_end: float, end: float) -> None:
    """After ten updates of warm-up, a hundred: at half of them, at nine tenths, after the last."""
    found = [learning_rate(update, 1.0, 10, 110, schedule) for update in (60, 100, 110)]
    assert found == pytest.approx([middle, near_the_end, end], abs=1e-3)
    assert learning_rate(4, 1.0, 10, 110, schedule) == 0.5
