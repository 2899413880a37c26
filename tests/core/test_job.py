"""What the supervising process tells the training process arrives as it was sent."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.records.settings import (
    LargestUpdate,
    LoraSettings,
    PlannedMemory,
    Rung,
    TrainJob,
    memory_shape,
)
from safetrain.core.storage.files import read_record, write_record
from tests.support.settings import SETTINGS


def job(**other: Any) -> TrainJob:
    lora = LoraSettings(8, 2.0, 0.1, 4, ("q_proj", "mlp.down_proj"))
    settings = dataclasses.replace(SETTINGS, lora=lora, max_steps=7, max_loss_jump=None, early_stopping_patience=3)
    rungs = (Rung(memory_shape(SETTINGS), 7, "killed by the system"), Rung(memory_shape(settings), 0, "segfault"))
    planned = PlannedMemory(SETTINGS, LargestUpdate(4, 99, 300, 120), 2**33)
    budget = MemoryBudget(2**34, 2**28)
    whole = TrainJob("models/a model", settings, True, budget, planned, True, 3, rungs=rungs)
    return dataclasses.replace(whole, **other)


GIVEN = [
    job(),
    job(rungs=()),
    job(planned=None, mlx_limit_bytes=2**30, memory_limit_bytes=5 * 2**30),
    job(gpu_rungs=("step 3: the watchdog",)),
]


@pytest.mark.parametrize("given", GIVEN)
def test_a_job_comes_back_equal(tmp_path: Path, given: TrainJob) -> None:
    write_record(tmp_path / "flight" / "job.json", given)
    again = read_record(tmp_path / "flight" / "job.json", TrainJob)
    assert again == given
    assert isinstance(again.settings.lora.targets, tuple)
    assert hash(again) == hash(given)


@pytest.mark.parametrize("change", [{"rungs": [{"at_step": 1}]}, {"memory_budget": {}}, {"settings": None}])
def test_a_job_of_another_version_is_an_error_and_not_a_training(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "job.json"
    write_record(path, job())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_record(path, TrainJob)
