"""What train believes of a plan: a certificate for what it was made of and anything smaller, and nothing more."""

import dataclasses

import pytest

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.errors import MachineError
from safetrain.core.job import Survival, TrainJob
from safetrain.core.model_files import read_model_files
from safetrain.core.settings import Recommendation, TrainSettings, resolve
from safetrain.engine.worker import Loaded, predicted_peak, told_bytes
from safetrain.guard.memory_left import needed_bytes
from stages.train import certified_peak, need_of
from tests.conftest import EMBEDDED
from tests.plan.test_recommend import NO_LORA_PINS, OPEN, data, plan

PLAN = dataclasses.replace(plan(), verified=True, measured_peak_bytes=10**8)
SETTINGS = resolve(OPEN, NO_LORA_PINS, PLAN)


def certified(settings: TrainSettings = SETTINGS, of: Recommendation = PLAN) -> bool:
    return certified_peak(settings, of) is not None


def test_a_certificate_covers_the_plan_and_smaller_ones_alone() -> None:
    assert certified()
    assert certified(dataclasses.replace(SETTINGS, batch_size=1, max_seq_length=32, learning_rate=1.0))
    for change in ({"batch_size": 32}, {"max_seq_length": 1024}, {"method": "dora"}, {"dequantize_base": False}):
        assert not certified(dataclasses.replace(SETTINGS, **change))
    assert not certified(of=dataclasses.replace(PLAN, verified=False))
    assert not certified(of=dataclasses.replace(PLAN, measured_peak_bytes=PLAN.memory_budget_bytes + 1))
    assert not certified(dataclasses.replace(SETTINGS, batch_size=8, gradient_accumulation=16))
    alone = dataclasses.replace(PLAN, gradient_accumulation=1)
    assert not certified(dataclasses.replace(SETTINGS, gradient_accumulation=4), alone)


def test_a_larger_update_than_was_measured_is_predicted_in_proportion() -> None:
    model, rows = read_model_files(EMBEDDED), TokenRows.of([token_row([1] * n, [True] * n) for n in range(20, 80)])
    settings = dataclasses.replace(SETTINGS, batch_size=16, gradient_accumulation=1, num_epochs=2)
    loaded = Loaded(model, TrainingRows(rows, rows[:3]), settings, 8)
    measured = largest_update(rows, rows[:3], 16, 2, None)
    survival = Survival(False, False, 2, 0.0, None)
    job = TrainJob("", settings, True, 10**9, 10**8, survival, (), 9 * 10**7, measured)
    assert predicted_peak(job, loaded, "cpu") == 10**8
    assert told_bytes(job, 10**8) == 9 * 10**7
    small = dataclasses.replace(job, largest_update=dataclasses.replace(measured, tokens=measured.tokens // 2))
    larger = predicted_peak(small, loaded, "cpu")
    assert 1.2 * 10**8 < larger < 2 * 10**8
    assert told_bytes(small, larger) == pytest.approx(0.98 * larger)
    with pytest.raises(MachineError, match="do not fit"):
        predicted_peak(dataclasses.replace(small, memory_budget_bytes=larger), loaded, "cpu")


def test_another_method_than_the_plan_s_needs_more() -> None:
    model, longest_row = read_model_files(EMBEDDED), data().longest_row
    dora = dataclasses.replace(SETTINGS, method="dora")
    lora_bytes, dora_bytes = (needed_bytes(model, each, need_of(each, PLAN, longest_row)) for each in (SETTINGS, dora))
    assert dora_bytes > 1.1 * lora_bytes
