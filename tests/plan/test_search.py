"""What a dry run does not bear out is not recommended; what could not be measured is said to be unverified."""

import dataclasses
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import MachineError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import LengthQuantiles
from safetrain.core.records.schema import Train
from safetrain.core.records.settings import Recommendation
from safetrain.plan.candidates import PlanInputs
from safetrain.plan.recommend import plan_run
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, machine

ROWS = TokenRows.of([token_row([1] * tokens, [True] * tokens) for tokens in range(20, 201, 2)])
FAST = dataclasses.replace(machine(8), gemm_gflops=200.0)
INPUTS = PlanInputs(data(longest=200), FAST, read_model_files(EMBEDDED), TrainingRows(ROWS, ROWS.take(slice(5))))
SHORT = dataclasses.replace(OPEN, max_steps=100)


@pytest.fixture(autouse=True)
def nothing_known(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRY_RUN", raising=False)


def planned(
    train: Train = SHORT, inputs: PlanInputs = INPUTS, module: str = "tests.plan.strict_dry_run"
) -> tuple[Recommendation, list[str]]:
    said: list[str] = []
    return plan_run(inputs, train, NO_LORA_PINS, module, said.append), said


def dry_runs(said: list[str]) -> int:
    return sum(text.startswith("dry run of") for text in said)


def test_what_fits_is_verified_without_a_margin_and_remembered() -> None:
    chosen, said = planned()
    assert (chosen.settings.batch_size, chosen.verified, chosen.margin_bytes) == (16, True, 0)
    assert chosen.measured is not None
    assert chosen.measured.update_seconds == 0.1
    assert (chosen.total_seconds or 0) > 100 * 0.1 + 5  # validations and evaluation come on top
    assert dry_runs(said) == 1
    assert "about 5 s" in said[0]  # it is told before how long it takes
    for module in ("tests.plan.strict_dry_run", ""):
        again, said = planned(module=module)
        assert again == chosen
        assert said == []


def test_preflight_plans_the_same_run_without_a_dry_run() -> None:
    before, said = planned(module="")
    after, _ = planned()
    assert (before.measured, before.verified, said) == (None, False, [])
    assert (before.settings.batch_size, before.settings.max_seq_length, before.predicted_peak_bytes) == (
        after.settings.batch_size, after.settings.max_seq_length, after.predicted_peak_bytes,
    )  # fmt: skip


def test_a_dry_run_that_takes_long_comes_after_the_quick_ones() -> None:
    """Here the expected 16 rows would take a quarter of an hour."""
    for gflops, rows in ((0.08, 2), (200.0, 16)):
        inputs = dataclasses.replace(INPUTS, machine=dataclasses.replace(FAST, gemm_gflops=gflops))
        assert planned(inputs=inputs)[0].settings.batch_size == rows


@pytest.mark.parametrize(("behaviour", "why"), [("dies 4", "killed by signal 6"), ("large 4", "memory budget")])
def test_what_does_not_pass_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch, behaviour: str, why: str) -> None:
    monkeypatch.setenv("DRY_RUN", behaviour)
    chosen, said = planned()
    assert (chosen.settings.batch_size, chosen.verified) == (4, True)
    assert f"16 rows of {chosen.settings.max_seq_length} tokens: " in "\n".join(said)
    assert why in "\n".join(said)


def test_nothing_is_cut_when_something_passes_uncut() -> None:
    """Rows cut to the length that one in 200 exceeds would be faster."""
    lengths = LengthQuantiles(60, 90, 95, 99, 100, 200)
    train = dataclasses.replace(INPUTS.data.train, lengths=lengths)
    cut = dataclasses.replace(INPUTS, data=dataclasses.replace(INPUTS.data, train=train, valid=train))
    chosen, said = planned(dataclasses.replace(SHORT, batch_size=2), cut)
    assert chosen.settings.max_seq_length == 224
    assert "at most 128 tokens" not in "\n".join(said)


def test_when_nothing_passes_that_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRY_RUN", "dies 0")
    pinned = dataclasses.replace(SHORT, batch_size=2, dequantize_base=True, gradient_checkpointing=False)
    with pytest.raises(MachineError, match="every dry run ran out of memory"):
        planned(pinned)


def test_a_dry_run_that_fails_for_another_reason_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRY_RUN", "broken")
    chosen, said = planned()
    assert (chosen.settings.batch_size, chosen.verified) == (16, False)
    assert "not measured: the dry run failed: exit code 1: ImportError: no such thing" in said
