"""Training from scratch: how much text, how often, how long; and no long training without consent."""

import dataclasses
from datetime import datetime

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import Recommendation, usual_warmup
from safetrain.plan.candidates import FIXED_TOKENS, candidates_at
from safetrain.plan.pretraining import (
    finish_text,
    passes_for,
    pretraining_lines,
    trained_tokens,
    wanted_tokens,
)
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, machine, question_of, recommend
from tests.plan.test_recommend import plan as recommended
from tests.updates import worst_update

DAY = 86_400
FLOATS = dataclasses.replace(read_model_files(EMBEDDED), quantization_bits=None)
NOW = datetime(2026, 11, 23, 12, 0)


@pytest.mark.parametrize(
    ("there", "passes"), [(10**10, 1), (1_700_000_000, 1), (850_000_000, 2), (425_000_000, 4), (10_000_000, 4), (0, 4)]
)
def test_passes_come_to_twenty_tokens_a_parameter_but_are_never_more_than_four(there: int, passes: int) -> None:
    count, reason = passes_for(85_000_000, there)
    assert (count, wanted_tokens(85_000_000)) == (passes, 1_700_000_000)
    assert ("worth much less" in reason) == (there < 425_000_000)


def said(there: int, epochs: int, seconds: float | None, estimated: float | None = None) -> str:
    chosen = dataclasses.replace(
        recommended(), num_epochs=epochs, batch_size=4, gradient_accumulation=8, max_seq_length=1024,
        total_seconds=seconds, step_seconds=None if seconds is None else 3.3, disk_bytes=10**9,
    )  # fmt: skip
    return "\n".join(pretraining_lines(chosen, 85_000_000, there, estimated, 1000, NOW))


def test_the_plan_says_how_much_of_the_text_that_is_wanted_is_there() -> None:
    text = said(850_000_000, 2, 2 * DAY)
    assert "1.7 billion tokens" in text
    assert "2 passes, 100 %" in text
    assert "9,930 tokens a second, measured here" in text
    assert "2026-11-25" in text
    assert "find more" not in text


def test_what_was_not_measured_takes_the_time_of_its_operations_where_the_speed_is_known() -> None:
    assert "as no dry run was made: " in said(850_000_000, 2, None, DAY)
    assert said(850_000_000, 2, DAY, 3 * DAY) == said(850_000_000, 2, DAY)
    assert "unknown" in said(10**9, 2, None)
    assert "worth much less" in said(10**8, 8, DAY)
    assert "far below" in said(10**8, 1, DAY)


def pretraining(there: int, **pins: object) -> Recommendation:
    """Of the embedded model on so many tokens, in windows of 512."""
    train = dataclasses.replace(OPEN, method="pretrain", **pins)  # type: ignore[arg-type]
    rows = {"largest": worst_update, "row_count": -(-there // 512), "usual_per_update": 4}
    return recommend(data(), machine(64), FLOATS, train, NO_LORA_PINS, **rows)


@pytest.mark.parametrize("times", [0.3, 0.7, 1.5, 60])
def test_a_run_sees_the_tokens_that_are_wanted_and_ends(times: float) -> None:
    wanted = wanted_tokens(FLOATS.parameters)
    chosen = pretraining(int(times * wanted))
    update = chosen.batch_size * chosen.gradient_accumulation * 512
    assert trained_tokens(chosen, int(times * wanted)) == pytest.approx(wanted, abs=update)
    assert chosen.max_steps == -(-wanted // update)
    assert chosen.warmup_steps == usual_warmup(chosen.max_steps)
    reason = chosen.reasons["max_steps"]
    assert "20 per parameter" in reason


def test_too_little_text_and_pins_set_no_other_end() -> None:
    wanted = wanted_tokens(FLOATS.parameters)
    assert (pretraining(wanted // 9).max_steps, pretraining(wanted // 9).num_epochs) == (None, 4)
    assert pretraining(9 * wanted, num_epochs=2).max_steps is None
    assert pretraining(9 * wanted, max_steps=7).max_steps == 7
    chosen = pretraining(wanted // 9, max_steps=10**6)  # in as many passes as it takes
    update, epochs = chosen.batch_size * chosen.gradient_accumulation * chosen.max_seq_length, chosen.num_epochs
    assert (epochs - 1) * (wanted // 9) < 10**6 * update <= 1.01 * epochs * (wanted // 9)
    assert "adapter" not in "".join(chosen.reasons.values())
    with pytest.raises(ConfigError, match=r"train\.max_seq_length is 4096"):  # longer than the context
        pretraining(10**9, max_seq_length=4096)


def test_what_a_large_model_is_said_to_cost_counts_the_shards_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose gradient leaves room for one shard gains nothing from more rows but their fixed cost."""
    monkeypatch.setattr("safetrain.core.memory.terms.usable_cores", lambda: 4)
    monkeypatch.setattr("safetrain.core.memory.terms.MOST_GRADIENT_BYTES", 1)
    train = dataclasses.replace(OPEN, method="pretrain")
    rows = {"largest": worst_update, "row_count": 1000, "usual_per_update": 16}
    question = question_of(data(), machine(64), FLOATS, train, NO_LORA_PINS, **rows)
    cost = {(each.rows, each.checkpointing): each.relative_cost for each in candidates_at(question, 512)}
    assert cost[1, False] == pytest.approx((512 + FIXED_TOKENS["cpu"]) / 512)
    assert cost[16, False] == pytest.approx((16 * 512 + FIXED_TOKENS["cpu"]) / (16 * 512))


def test_no_date_is_beyond_the_calendar() -> None:
    assert finish_text(NOW, 3600) == "2026-11-23 13:00"
    assert finish_text(NOW, 100 * DAY) == "2027-03-03"
    assert "years" in finish_text(NOW, 1e15)
