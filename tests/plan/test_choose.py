"""What the model itself does not bear out is not recommended; what could not be measured is said to be unverified."""

import dataclasses
import os
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import MachineError
from safetrain.core.model_files import read_model_files
from safetrain.core.reports import LengthQuantiles
from safetrain.core.schema import Train
from safetrain.core.settings import Recommendation
from safetrain.plan import choose
from safetrain.plan.choose import Facts, bench_of, plan_certified, plan_measured
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, machine

ROWS = TokenRows.of([token_row([1] * tokens, [True] * tokens) for tokens in range(20, 201, 2)])
FACTS = Facts(data(longest=200), machine(8), read_model_files(EMBEDDED), TrainingRows(ROWS, ROWS[:5]))
MODULES = ("tests.plan.strict_probe", "tests.plan.strict_rehearsal")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PROBE", raising=False)


def certified(train: Train = OPEN, facts: Facts = FACTS) -> tuple[Recommendation, str]:
    said: list[str] = []
    chosen = plan_certified(facts, train, NO_LORA_PINS, bench_of(facts.machine, *MODULES, said.append))
    return chosen, "\n".join(said)


def test_what_fits_is_verified_without_a_margin_and_remembered() -> None:
    chosen, said = certified()
    assert (chosen.batch_size, chosen.verified, chosen.margin_bytes) == (16, True, 0)
    assert chosen.measured_peak_bytes is not None
    assert "certifying" in said
    again, said = certified()
    assert again == chosen
    assert said == ""


def test_others_are_rehearsed_only_where_a_faster_one_makes_up_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for own_seconds, rehearsals in (("0.9", 3), ("1.0", 1)):  # a twentieth of the training is 0.945 s
        monkeypatch.setenv("PROBE_SECONDS", own_seconds)
        monkeypatch.setenv("SAFETRAIN_CACHE_DIR", f"{os.environ['SAFETRAIN_CACHE_DIR']}-{own_seconds}")
        _, said = certified()
        assert said.count("certifying") == rehearsals


def test_what_is_measured_on_a_shortened_model_is_not_called_verified() -> None:
    said: list[str] = []
    chosen = plan_measured(FACTS, OPEN, NO_LORA_PINS, bench_of(FACTS.machine, *MODULES, said.append))
    assert chosen.verified is False
    assert chosen.measured_peak_bytes is None


@pytest.mark.parametrize(("behaviour", "why"), [("dies 4", "killed by signal 6"), ("large 4", "memory budget")])
def test_what_does_not_pass_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch, behaviour: str, why: str) -> None:
    monkeypatch.setenv("PROBE", behaviour)
    chosen, said = certified()
    assert (chosen.batch_size, chosen.verified) == (4, True)
    assert f"16 rows of {chosen.max_seq_length} tokens: " in said
    assert why in said


def test_a_death_under_one_s_own_limit_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", "dies 4")
    limited = dataclasses.replace(OPEN, memory_limit_gb=8.0)
    chosen, first = certified(limited)
    again, second = certified(limited)
    assert again == chosen
    assert (first.count("certifying") > 1, second.count("certifying")) == (True, 0)
    assert "killed by signal 6" in second


def test_after_a_death_far_less_is_tried_first_and_then_a_little_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", "dies 8")
    monkeypatch.setattr(choose, "LESS_AFTER_A_DEATH", 1e-6)  # nothing takes so little
    pinned = dataclasses.replace(OPEN, dequantize_base=True, gradient_checkpointing=False)
    chosen, said = certified(pinned)
    assert (chosen.batch_size, chosen.verified) == (8, True)
    assert said.count("killed by signal") == 1


def test_nothing_is_cut_when_something_passes_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cut to the length that one in 200 exceeds would be faster."""
    lengths = LengthQuantiles(60, 90, 95, 99, 100, 200)
    train = dataclasses.replace(FACTS.data.train, lengths=lengths)
    cut = dataclasses.replace(FACTS, data=dataclasses.replace(FACTS.data, train=train, valid=train))
    chosen, said = certified(dataclasses.replace(OPEN, batch_size=2), cut)
    assert chosen.max_seq_length == 224
    assert "at most 128 tokens" not in said


def test_when_nothing_passes_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", "dies 0")
    pinned = dataclasses.replace(OPEN, batch_size=2, dequantize_base=True, gradient_checkpointing=False)
    with pytest.raises(MachineError, match="predicted to fit did not"):
        certified(pinned)
    chosen, _ = certified(dataclasses.replace(pinned, oversize=True))
    assert (chosen.batch_size, chosen.verified) == (2, False)


def test_a_probe_that_fails_for_another_reason_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", "broken")
    chosen, said = certified()
    assert (chosen.batch_size, chosen.verified) == (16, False)
    assert "not certified: the measuring process ended with exit code 1: ImportError" in said


def test_what_oversize_asks_for_is_not_measured() -> None:
    small = dataclasses.replace(FACTS, machine=machine(0.2))
    with pytest.raises(MachineError, match="do not fit"):
        certified(facts=small)
    chosen, said = certified(dataclasses.replace(OPEN, oversize=True), small)
    assert chosen.verified is False
    assert "certifying" not in said
