"""With too little memory the same update is made with less at a time: rung by rung, also where little is free now."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetrain.core.errors import MachineError
from safetrain.core.memory.estimate import memory_of_run, with_margin
from safetrain.core.memory.system import MemoryBudget, Readings
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import (
    LoraSettings,
    PlannedMemory,
    Rung,
    TrainJob,
    TrainSettings,
    identity_of,
    memory_shape,
)
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import LADDER
from safetrain.guard import keep_going as ladder
from safetrain.guard.keep_going import (
    MOST_RUNGS,
    Ladder,
    PlannedUpdate,
    available_memory,
    fit_to_available_memory,
    needed_bytes,
    next_settings,
    read_ladder,
)
from tests.conftest import EMBEDDED
from tests.support.settings import SETTINGS
from tests.updates import worst_update

LIMIT = 8 * 2**30
SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 12, 15)


def settings(batch_size: int = 4, length: int = 512) -> TrainSettings:
    return dataclasses.replace(SETTINGS, batch_size=batch_size, gradient_accumulation=2, max_seq_length=length)


def rungs(start: TrainSettings, *, quantized: bool) -> Iterator[TrainSettings]:
    """Every rung below ``start``."""
    now = next_settings(start, quantized=quantized)
    while now is not None:
        yield now
        now = next_settings(now, quantized=quantized)


def shape(s: TrainSettings) -> tuple[int, int, bool, bool, bool, int]:
    ways = s.gradient_checkpointing, s.dequantize_base, s.stream_base
    return s.batch_size, s.gradient_accumulation, *ways, s.max_seq_length


def test_the_rungs_come_in_order_down_to_the_bottom() -> None:
    assert [shape(s) for s in rungs(settings(), quantized=True)] == [
        (2, 4, False, True, False, 512),
        (1, 8, False, True, False, 512),
        (1, 8, True, True, False, 512),
        (1, 8, True, False, False, 512),
        (1, 8, True, False, True, 512),
    ]


@pytest.mark.parametrize(
    ("size", "windows"),
    [(6, ["3 x 4", "1 x 12"]), (7, ["1 x 14"]), (9, ["3 x 6", "1 x 18"]), (12, ["6 x 4", "3 x 8", "1 x 24"])],
)
def test_an_odd_micro_batch_is_divided_by_its_smallest_factor(size: int, windows: list[str]) -> None:
    found = [memory_shape(s).window for s in rungs(settings(size), quantized=False)]
    assert found[: len(windows)] == windows
    assert set(found[len(windows) :]) == {windows[-1]}


@pytest.mark.parametrize("quantized", [True, False])
def test_no_rung_changes_what_is_computed(quantized: bool) -> None:
    """Neither the rows of an update nor anything else that tells one run from another; each rung is a new one."""
    for start in map(settings, SIZES):
        found = list(rungs(start, quantized=quantized))
        assert {s.rows_per_update for s in found} == {start.rows_per_update}
        assert {identity_of(s) for s in found} == {identity_of(start)}
        assert len({memory_shape(s) for s in [start, *found]}) == len(found) + 1 <= MOST_RUNGS + 1
        assert (found[-1].batch_size, found[-1].gradient_checkpointing) == (1, True)


def test_while_loading_only_the_base_itself_can_take_less() -> None:
    start = settings(8)
    quantized = next_settings(start, quantized=True, loading=True)
    assert quantized == dataclasses.replace(start, dequantize_base=False)
    on_disk = dataclasses.replace(quantized, stream_base=True)
    assert next_settings(quantized, quantized=True, loading=True) == on_disk
    assert next_settings(start, quantized=False, loading=True) == on_disk
    assert next_settings(on_disk, quantized=True, loading=True) is None
    assert next_settings(dataclasses.replace(start, method="full"), quantized=False, loading=True) is None


def written(output: Path) -> Ladder:
    first = memory_shape(settings())
    tried = next_settings(settings(), quantized=True)
    assert tried is not None
    ladder = Ladder(first, LIMIT, memory_shape(tried), (Rung(first, 7, "killed by the system: out of memory"),))
    write_record(output / LADDER, ladder)
    return ladder


def test_a_ladder_is_remembered_for_the_same_settings_and_no_more_memory(tmp_path: Path) -> None:
    ladder = written(tmp_path)
    assert read_ladder(tmp_path, settings(), LIMIT) == read_ladder(tmp_path, settings(), LIMIT // 2) == ladder
    others = ((settings(), LIMIT + 1), (settings(2), LIMIT), (settings(length=256), LIMIT))
    assert [read_ladder(tmp_path, *other) for other in others] == [None, None, None]
    assert read_ladder(tmp_path / "elsewhere", settings(), LIMIT) is None
    content = (tmp_path / LADDER).read_bytes()
    for kept in (0, len(content) // 2, len(content) - 3):
        (tmp_path / LADDER).write_bytes(content[:kept])
        assert read_ladder(tmp_path, settings(), LIMIT) is None


GIB = 2**30
EIGHT = dataclasses.replace(
    SETTINGS, batch_size=8, gradient_accumulation=2, max_seq_length=128,
    lora=LoraSettings(8, 2.0, 0.0, 6, ("all-linear",)),
)  # fmt: skip
LARGEST = worst_update(100, 16)
PLANNED = PlannedMemory(EIGHT, LARGEST, 3 * GIB)
JOB = TrainJob(str(EMBEDDED), EIGHT, True, MemoryBudget(8 * GIB), PLANNED)
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
    assert needed_bytes(model, EIGHT, JOB, UPDATE) == 3 * GIB + 200 * 2**20
    estimated = dataclasses.replace(JOB, planned=None)
    terms = memory_of_run(model, EIGHT, LARGEST, "cpu", JOB.memory_budget, None).terms
    assert needed_bytes(model, EIGHT, estimated, UPDATE) == with_margin(terms) + 200 * 2**20


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
