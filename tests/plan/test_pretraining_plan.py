"""Training from scratch: how much text, how often, how long; and no long training without consent."""

import dataclasses
from datetime import datetime

import pytest

from safetrain.core.errors import ConfigError
from safetrain.plan.pretraining_plan import (
    PretrainingPlan,
    finish_text,
    passes_for,
    pretraining_lines,
    pretraining_of,
    require_consent,
)
from tests.plan.test_recommend import OPEN
from tests.plan.test_recommend import plan as recommended

DAY = 86_400
NOW = datetime(2026, 11, 23, 12, 0)


@pytest.mark.parametrize(
    ("there", "passes"), [(10**10, 1), (1_700_000_000, 1), (850_000_000, 2), (425_000_000, 4), (10_000_000, 4), (0, 4)]
)
def test_passes_come_to_twenty_tokens_a_parameter_but_are_never_more_than_four(there: int, passes: int) -> None:
    found = passes_for(85_000_000, there, 20)
    assert (found.count, found.wanted_tokens) == (passes, 1_700_000_000)
    assert ("worth much less" in found.reason) == (there < 425_000_000)


def test_a_training_of_more_days_than_agreed_is_refused_with_what_agrees_to_it() -> None:
    require_consent(DAY, 1)
    with pytest.raises(ConfigError) as refused:
        require_consent(39.45 * DAY, 1)
    assert "train.max_days=39.5" in refused.value.do
    require_consent(39.45 * DAY, 39.5)


def plan_of(there: int, epochs: int, seconds: float | None, max_steps: int | None = None) -> PretrainingPlan:
    chosen = dataclasses.replace(
        recommended(), num_epochs=epochs, batch_size=4, gradient_accumulation=8, max_seq_length=1024,
        total_seconds=seconds,
    )  # fmt: skip
    return pretraining_of(chosen, 85_000_000, there, dataclasses.replace(OPEN, max_steps=max_steps))


def test_the_plan_says_how_much_of_the_text_that_is_wanted_is_there() -> None:
    text = "\n".join(pretraining_lines(plan_of(850_000_000, 2, 2 * DAY), NOW))
    assert "1.7 billion tokens" in text
    assert "2 passes, 100 %" in text
    assert "9,838 tokens a second, measured here" in text
    assert "2026-11-25" in text
    assert "find more" not in text


def test_a_run_that_max_steps_ends_sees_the_tokens_of_its_updates() -> None:
    assert plan_of(10**9, 1, DAY, max_steps=100).tokens_trained == pytest.approx(100 * 32 * 1024)


@pytest.mark.parametrize(("epochs", "said"), [(8, "worth much less"), (1, "far below")])
def test_too_little_text_is_said(epochs: int, said: str) -> None:
    assert said in "\n".join(pretraining_lines(plan_of(10**8, epochs, DAY), NOW))


def test_what_was_not_measured_is_not_refused_and_said_to_be_unknown() -> None:
    plan = plan_of(10**9, 2, None)
    require_consent(plan.seconds, 1)
    assert "not known" in "\n".join(pretraining_lines(plan, NOW))


def test_no_date_is_beyond_the_calendar() -> None:
    assert finish_text(NOW, 3600) == "2026-11-23 13:00"
    assert finish_text(NOW, 100 * DAY) == "2027-03-03"
    assert "years" in finish_text(NOW, 1e15)
