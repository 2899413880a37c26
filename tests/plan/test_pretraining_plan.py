"""Training from scratch: how much text, how often, how long; and no long training without consent."""

from datetime import datetime

import pytest

from safetrain.core.errors import ConfigError
from safetrain.plan.pretraining_plan import finish_text, passes_for, plan_of, pretraining_lines, require_consent

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


def test_the_plan_says_how_much_of_the_text_that_is_wanted_is_there() -> None:
    plan = plan_of(85_000_000, 850_000_000, 20, 2 * 850_000_000, 2 * DAY, 2**30)
    text = "\n".join(pretraining_lines(plan, NOW))
    assert "1.7 billion tokens" in text
    assert "2 passes, 100 %" in text
    assert "9,838 tokens a second" in text
    assert "2026-11-25" in text
    assert "find more text" not in text


@pytest.mark.parametrize(("trained", "said"), [(8 * 10**8, "worth much less"), (10**8, "far below")])
def test_too_little_text_is_said(trained: int, said: str) -> None:
    text = "\n".join(pretraining_lines(plan_of(85_000_000, 10**8, 20, trained, DAY, 0), NOW))
    assert said in text


def test_no_date_is_beyond_the_calendar() -> None:
    assert finish_text(NOW, 3600) == "2026-11-23 13:00"
    assert finish_text(NOW, 100 * DAY) == "2027-03-03"
    assert "years" in finish_text(NOW, 1e15)
