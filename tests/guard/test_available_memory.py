"""A training that was planned for more memory than is free now starts with less at a time, or says why it does not."""

import dataclasses

import pytest

from safetrain.core.errors import MachineError
from safetrain.core.memory.estimate import memory_of_run, with_margin
from safetrain.core.memory.system import MemoryBudget, Readings
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import LoraSettings, PlannedMemory, TrainJob
from safetrain.guard import ladder
from safetrain.guard.ladder import PlannedUpdate, available_memory, fit_to_available_memory, needed_bytes
from tests.conftest import EMBEDDED
from tests.support.settings import SETTINGS as USUAL
from tests.updates import worst_update

GIB = 2**30
SETTINGS = dataclasses.replace(
    USUAL, batch_size=8, gradient_accumulation=2, max_seq_length=128,
    lora=LoraSettings(8, 2.0, 0.0, 6, ("all-linear",)),
)  # fmt: skip
LARGEST = worst_update(100, 16)
PLANNED = PlannedMemory(SETTINGS, LARGEST, 3 * GIB)
JOB = TrainJob(str(EMBEDDED), SETTINGS, True, MemoryBudget(8 * GIB), PLANNED)
UPDATE = PlannedUpdate("cpu", LARGEST)
IDLE = Readings(8 * GIB, 2 * GIB, wired_bytes=GIB, pressure_level=1, free_percent=54)


def start(
    monkeypatch: pytest.MonkeyPatch, left: int, job: TrainJob = JOB, planned: PlannedUpdate = UPDATE
) -> tuple[TrainJob, str]:
    monkeypatch.setattr(ladder, "read_memory", lambda: Readings(16 * GIB, left))
    said: list[str] = []
    return fit_to_available_memory(job, planned, said.append), "".join(said)


def test_with_room_nothing_changes_and_with_nothing_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, 4 * GIB) == (JOB, "")
    assert start(monkeypatch, 1, planned=dataclasses.replace(UPDATE, backend="cuda")) == (JOB, ""), "a GPU has its own"
    with pytest.raises(MachineError, match="Not enough free memory"):
        start(monkeypatch, GIB // 8)


def test_what_was_measured_is_believed_and_what_was_estimated_gets_a_margin() -> None:
    model = read_model_files(EMBEDDED)
    assert needed_bytes(model, SETTINGS, JOB, UPDATE) == 3 * GIB + 200 * 2**20
    estimated = dataclasses.replace(JOB, planned=None)
    terms = memory_of_run(model, SETTINGS, LARGEST, "cpu", JOB.memory_budget, None).terms
    assert needed_bytes(model, SETTINGS, estimated, UPDATE) == with_margin(terms) + 200 * 2**20


def test_on_a_mac_free_memory_says_nothing_until_it_is_critically_short() -> None:
    """8 GB M1 that trained a 7B: 2.05 GiB `available` (giampaolo/psutil #1503), 54 to 69 % free by memory_pressure."""
    job = dataclasses.replace(JOB, memory_budget=MemoryBudget(int(4.8 * GIB)))
    assert available_memory(job, "metal", IDLE)[0] == int(4.8 * GIB)
    for reading in ({"pressure_level": 4}, {"free_percent": 7}):
        left, words, _ = available_memory(job, "metal", dataclasses.replace(IDLE, **reading))
        assert left == 0
        assert "critical memory pressure" in words
    assert available_memory(job, "metal", dataclasses.replace(IDLE, pressure_level=2))[0] > 0


def test_with_less_it_starts_on_a_lower_rung_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job, said = start(monkeypatch, 5 * GIB // 2)
    assert (job.settings.batch_size, job.settings.gradient_accumulation) == (4, 4)
    assert job.rungs[0].failed.batch_size == 8
    assert said.startswith("warning: only 2.50 GiB are free now and 3.20 GiB are needed, so training starts with 4 x 4")


def test_a_limit_that_the_plan_was_not_made_under_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(limit: int, budget: int) -> TrainJob:
        return dataclasses.replace(JOB, memory_limit_bytes=limit, memory_budget=MemoryBudget(budget))

    job, said = start(monkeypatch, 20 * GIB, limited(5 * GIB // 2, 8 * GIB))
    assert job.settings.batch_size == 4
    assert said.startswith("warning: train.memory_limit_gb leaves only 2.40 GiB and 3.20 GiB are needed")
    planned_so = limited(5 * GIB // 2, 5 * GIB // 2 - GIB // 10)
    assert start(monkeypatch, 20 * GIB, planned_so) == (planned_so, "")
    with pytest.raises(MachineError, match=r"raise train\.memory_limit_gb"):
        start(monkeypatch, 20 * GIB, limited(GIB // 8, 8 * GIB))
