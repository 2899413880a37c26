"""When a fused model holds: by loss, by distribution, and by answers beyond chance."""

import dataclasses
from typing import Any

import pytest

from safetrain.core.errors import ModelError
from safetrain.core.records.fusing import Likeness, kept_share, refusal, require_effect

TUNED = Likeness(1.0, 0.0, 1.0, 90, 0, 0)
BASE = Likeness(2.0, 0.8, 0.0, 0, 90, 0)


def found(**changes: Any) -> Likeness:
    return dataclasses.replace(TUNED, **changes)


def test_what_is_kept_is_the_smaller_share() -> None:
    assert kept_share(BASE, TUNED, TUNED) == 1
    assert kept_share(BASE, TUNED, BASE) == 0
    assert kept_share(BASE, TUNED, found(loss=1.1, divergence=0.008)) == pytest.approx(0.9)
    assert kept_share(BASE, TUNED, found(loss=0.5, divergence=0.4)) == pytest.approx(0.5)  # a better loss by chance
    worse = found(loss=3.0), found(loss=3.1, divergence=0.08)
    assert kept_share(BASE, *worse) == pytest.approx(0.9), "a training that did not help has a distribution to keep"


@pytest.mark.parametrize(
    ("lost", "won", "holds"), [(3, 0, True), (4, 0, False), (8, 3, True), (12, 3, False), (0, 9, True)]
)
def test_fewer_right_answers_than_chance_allows_are_refused(lost: int, won: int, holds: bool) -> None:
    assert (refusal(0.999, found(lost_answers=lost, won_answers=won), 0.02) == "") == holds
    assert refusal(-3.0, found(lost_answers=90), 1.0) == "", "all may get lost"
    assert "not a number" in refusal(1.0, found(loss=float("nan")), 1.0)
    assert "more than 2 %" in refusal(0.97, TUNED, 0.02)


def test_no_effect_is_an_error_with_the_adapter_named() -> None:
    require_effect(BASE, "adapters")
    with pytest.raises(ModelError, match="changes nothing") as caught:
        require_effect(TUNED, "adapters")
    assert "adapters" in str(caught.value)
