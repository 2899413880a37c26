"""What train believes of a plan: a certificate for what it was made of and anything smaller, and nothing more."""

import dataclasses
from pathlib import Path

import pytest

from safetrain.core import paths
from safetrain.core.model_files import read_model_files
from safetrain.core.reports import write_record
from safetrain.core.settings import Recommendation, TrainSettings, resolve
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
    alone = dataclasses.replace(PLAN, gradient_accumulation=1)
    assert not certified(dataclasses.replace(SETTINGS, gradient_accumulation=4), alone)


def test_another_method_than_the_plan_s_needs_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(paths.DATA_REPORT, data())
    model = read_model_files(EMBEDDED)
    dora = dataclasses.replace(SETTINGS, method="dora")
    lora_bytes, dora_bytes = (needed_bytes(model, each, need_of(each, PLAN)) for each in (SETTINGS, dora))
    assert dora_bytes > 1.1 * lora_bytes
