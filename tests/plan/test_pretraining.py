"""Training from scratch: how much text, how often, how long; and no long training without consent."""

import dataclasses
from datetime import datetime

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import Recommendation, usual_warmup
from safetrain.plan.candidates import FIXED_TOKENS, RowStatistics, ask, candidates_at
from safetrain.plan.pretraining import (
    PretrainingPlan,
    finish_text,
    passes_for,
    pretraining_lines,
    pretraining_of,
    tokens_to_train,
    wanted_tokens,
)
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, machine, recommend
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
    assert (count, wanted_tokens(85_000_000, 20)) == (passes, 1_700_000_000)
    assert ("worth much less" in reason) == (there < 425_000_000)


def plan_of(
    there: int, epochs: int, seconds: float | None, max_steps: int | None = None, tflops: float | None = None
) -> PretrainingPlan:
    chosen = dataclasses.replace(
        recommended(), num_epochs=epochs, batch_size=4, gradient_accumulation=8, max_seq_length=1024,
        total_seconds=seconds, max_steps=max_steps, disk_bytes=10**9,
    )  # fmt: skip
    return pretraining_of(chosen, 85_000_000, there, 6 * 85e6, tflops, store_bytes=1000)


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


def test_disk_is_of_checkpoints_and_of_what_the_stores_take_whatever_the_tokens() -> None:
    assert plan_of(10**11, 1, DAY).disk_bytes == 10**9 + 1000


def test_what_was_not_measured_takes_the_time_of_its_operations_where_the_speed_is_known() -> None:
    plan = plan_of(850_000_000, 2, None, tflops=0.1)
    assert plan.seconds == pytest.approx(1.7e9 * 6 * 85e6 / 1e11)
    assert "as no dry run was made" in "\n".join(pretraining_lines(plan, NOW))
    assert plan_of(850_000_000, 2, DAY, tflops=0.1) == plan_of(850_000_000, 2, DAY)


def pretraining(there: int, **pins: object) -> Recommendation:
    """Of the embedded model on so many tokens, in windows of 512."""
    train = dataclasses.replace(OPEN, method="pretrain", **pins)  # type: ignore[arg-type]
    rows = RowStatistics(512, 512.0, lambda length, rows: worst_update(length, rows), -(-there // 512), 4)
    return recommend(data(), machine(64), FLOATS, train, NO_LORA_PINS, rows)


@pytest.mark.parametrize("times", [0.3, 0.7, 1.5, 60])
def test_a_run_sees_the_tokens_that_are_wanted_and_ends(times: float) -> None:
    wanted = wanted_tokens(FLOATS.parameters, 20)
    chosen = pretraining(int(times * wanted))
    update = chosen.batch_size * chosen.gradient_accumulation * 512
    plan = pretraining_of(chosen, FLOATS.parameters, int(times * wanted), 1.0, None)
    assert plan.tokens_trained == pytest.approx(wanted, abs=update)
    assert chosen.max_steps == -(-wanted // update)
    assert chosen.warmup_steps == usual_warmup(chosen.max_steps)
    reason = chosen.reasons["max_steps"]
    assert "20 a parameter" in reason


def test_too_little_text_and_pins_set_no_other_end() -> None:
    wanted = wanted_tokens(FLOATS.parameters, 20)
    assert (pretraining(wanted // 9).max_steps, pretraining(wanted // 9).num_epochs) == (None, 4)
    assert (pretraining(9 * wanted, num_epochs=2).max_steps, pretraining(9 * wanted, max_steps=7).max_steps) == (
        None,
        7,
    )


def test_a_number_of_updates_is_made_in_as_many_passes_as_it_takes() -> None:
    wanted = wanted_tokens(FLOATS.parameters, 20)
    chosen = pretraining(wanted // 9, max_steps=10**6)
    update, epochs = chosen.batch_size * chosen.gradient_accumulation * chosen.max_seq_length, chosen.num_epochs
    assert epochs > 4
    assert (epochs - 1) * (wanted // 9) < 10**6 * update <= 1.01 * epochs * (wanted // 9)


def test_the_update_is_for_the_tokens_that_are_trained_not_for_those_that_are_there() -> None:
    train = dataclasses.replace(OPEN, method="pretrain")
    wanted = wanted_tokens(85_000_000, 20)
    assert tokens_to_train(85_000_000, 10**11, train) == tokens_to_train(85_000_000, wanted, train) == wanted
    assert tokens_to_train(85_000_000, 10**11, dataclasses.replace(train, num_epochs=2)) == 2 * 10**11


def test_what_a_large_model_is_said_to_cost_counts_the_shards_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose gradient leaves room for one shard gains nothing from more rows but their fixed cost."""
    monkeypatch.setattr("safetrain.core.memory.terms.usable_cores", lambda: 4)
    monkeypatch.setattr("safetrain.core.memory.terms.MOST_GRADIENT_BYTES", 1)
    train = dataclasses.replace(OPEN, method="pretrain")
    rows = RowStatistics(512, 512.0, lambda length, rows: worst_update(length, rows), 1000, 16)
    question = ask(data(), machine(64), FLOATS, train, NO_LORA_PINS, rows)
    cost = {(each.batch_size, each.checkpointing): each.relative_cost for each in candidates_at(question, 512)}
    assert cost[1, False] == pytest.approx((512 + FIXED_TOKENS["cpu"]) / 512)
    assert cost[16, False] == pytest.approx((16 * 512 + FIXED_TOKENS["cpu"]) / (16 * 512))


def test_a_window_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_seq_length is 4096"):
        pretraining(10**9, max_seq_length=4096)


def test_the_reasons_are_those_of_a_training_from_scratch() -> None:
    texts = pretraining(10**9, num_epochs=9).reasons
    assert "context" in texts["max_seq_length"]
    assert "none is cut" not in texts["max_seq_length"]
    assert "adapter" not in "".join(texts.values())


def test_what_was_not_measured_nor_known_is_said_to_be_unknown() -> None:
    plan = plan_of(10**9, 2, None)
    assert "not known" in "\n".join(pretraining_lines(plan, NOW))


def test_no_date_is_beyond_the_calendar() -> None:
    assert finish_text(NOW, 3600) == "2026-11-23 13:00"
    assert finish_text(NOW, 100 * DAY) == "2027-03-03"
    assert "years" in finish_text(NOW, 1e15)
