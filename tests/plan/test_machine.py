"""The budget is what a training may really take, and noise in it changes no plan."""

import dataclasses

import psutil
import pytest

from safetrain.core.reports import Machine
from safetrain.plan import machine as facts
from safetrain.plan.machine import Probe, budget_bytes, read_machine_now, settle

GIB = 2**30
CPU = Probe("cpu", "", 0, 0, 0, "OpenBLAS", True, "", 200.0)
METAL = dataclasses.replace(CPU, backend="metal", device="Apple M1", working_set_bytes=int(5.3 * GIB))
CUDA = dataclasses.replace(CPU, backend="cuda", device_total_bytes=16 * GIB, device_free_bytes=15 * GIB)


@pytest.fixture
def no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cgroup_room_bytes", lambda: None)


@pytest.mark.usefixtures("no_container")
def test_each_backend_has_its_budget() -> None:
    assert budget_bytes(CPU, 7 * GIB) == 7 * GIB
    assert budget_bytes(CUDA, 100 * GIB) == 15 * GIB - 3 * GIB // 4
    assert budget_bytes(METAL, 64 * GIB) == int(0.9 * METAL.working_set_bytes)
    reserve = 2 * GIB if psutil.virtual_memory().total <= 16 * GIB else 4 * GIB
    assert budget_bytes(METAL, 5 * GIB) == min(int(0.9 * METAL.working_set_bytes), max(5 * GIB - reserve, 5 * GIB // 2))
    assert budget_bytes(METAL, 1 * GIB) == GIB // 2


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cgroup_room_bytes", lambda: 3 * GIB)
    assert budget_bytes(CPU, 7 * GIB) == 3 * GIB


def test_small_changes_of_the_budget_are_ignored_and_large_ones_are_not() -> None:
    before = read_machine_now(CPU)

    def now(share: float) -> Machine:
        return dataclasses.replace(before, memory_budget_bytes=int(share * before.memory_budget_bytes))

    assert settle(now(0.92), before) == before
    assert settle(now(1.2), before) == before
    assert settle(now(0.88), before) == now(0.88)
    assert settle(now(1.4), before) == now(1.4)
    assert settle(dataclasses.replace(now(1.1), mlx="9"), before) == dataclasses.replace(before, mlx="9")
    assert settle(now(0.5), None) == now(0.5)
