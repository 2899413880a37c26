"""The memory budget of a training process on each backend."""

import resource

import pytest

from safetrain.core.memory import system
from safetrain.core.memory.system import Readings, own_limit_bytes, read_memory, within_data_limit
from safetrain.plan.child import budget_bytes, cuda_budget_bytes, metal_budget_bytes
from tests.core.readings import READINGS, Reading

GIB = 2**30
IDLE = Readings(16 * GIB, 12 * GIB)


def test_each_backend_has_its_rule() -> None:
    eight = int(5.333 * GIB)
    assert metal_budget_bytes(eight, 8 * GIB, GIB, 0) == int(0.9 * eight)
    assert metal_budget_bytes(eight, 8 * GIB, GIB, 100) == int(0.9 * eight) + 100  # Metal does not see the process
    assert metal_budget_bytes(eight, 8 * GIB, 5 * GIB // 2) == 4 * GIB  # much is wired
    assert metal_budget_bytes(50 * GIB, 50 * GIB, 2 * GIB, 0) == int(0.85 * 50 * GIB)
    assert metal_budget_bytes(50 * GIB, 50 * GIB, 9 * GIB) == 36 * GIB
    assert metal_budget_bytes(eight, 8 * GIB, 8 * GIB) == 0
    assert cuda_budget_bytes(15 * GIB) == int(0.92 * 14.5 * GIB)
    assert budget_bytes("cuda", GIB // 2, IDLE) == 0
    busy = Readings(8 * GIB, GIB // 2, wired_bytes=int(1.3 * GIB))  # what macOS calls available does not count
    assert budget_bytes("metal", eight, busy, 0) == int(0.9 * eight)


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.name)
def test_the_budget_of_real_machines_is_below_what_was_usable_there(reading: Reading) -> None:
    host = Readings(reading.total_bytes, 0, reading.wired_bytes)
    assert 0.55 <= budget_bytes(reading.backend, reading.device_bytes, host) / reading.usable_bytes <= 0.95


def test_on_cpu_it_is_what_is_available() -> None:
    host = read_memory()
    assert 0 < budget_bytes("cpu", 0, host) <= host.available_bytes < host.total_bytes


def test_limits_of_the_shell_of_a_container_and_of_one_s_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, before[1]))
    try:
        assert budget_bytes("cpu", 0, IDLE) == 3 * GIB - GIB // 10
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert within_data_limit(8 * GIB, None) == 8 * GIB
    assert within_data_limit(8 * GIB, own_limit_bytes(2.0)) == 2 * GIB - GIB // 10
    assert within_data_limit(GIB, 2 * GIB) == GIB
    monkeypatch.setattr(system, "memory_room_bytes", lambda _groups: GIB // 4)
    assert budget_bytes("cpu", 0, IDLE) == GIB // 4
