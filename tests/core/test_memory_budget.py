"""The budget is what a training may really take: on each backend, in a container, under a limit of the shell."""

import resource
from collections.abc import Iterator

import pytest

from safetrain.core.memory import budget as memory_budget
from safetrain.core.memory.budget import (
    Readings,
    budget_bytes,
    cuda_budget_bytes,
    metal_budget_bytes,
    own_limit_bytes,
    read_memory,
    within_data_limit,
)
from tests.core.readings import PRESSED_MACS, READINGS, Reading

GIB = 2**30
IDLE = Readings(16 * GIB, 12 * GIB)


@pytest.fixture
def data_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


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


def test_what_macos_calls_available_does_not_count() -> None:
    idle = Readings(8 * GIB, GIB // 2, wired_bytes=int(1.3 * GIB))
    assert budget_bytes("metal", int(5.333 * GIB), idle, 0) == int(0.9 * int(5.333 * GIB))


@pytest.mark.parametrize("reading", [*READINGS, PRESSED_MACS[0]], ids=lambda reading: reading.name)
def test_the_budget_of_real_machines_is_below_what_was_usable_there(reading: Reading) -> None:
    device_bytes = reading.free_bytes if reading.backend == "cuda" else reading.working_set_bytes
    host = Readings(reading.total_bytes, 0, reading.wired_bytes)
    assert 0.55 <= budget_bytes(reading.backend, device_bytes, host) / reading.usable_bytes <= 0.95


def test_on_cpu_it_is_what_is_available() -> None:
    host = read_memory()
    assert 0 < budget_bytes("cpu", 0, host) <= host.available_bytes < host.total_bytes


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "memory_room_bytes", lambda _groups: GIB // 4)
    assert budget_bytes("cpu", 0, IDLE) == GIB // 4


@pytest.mark.usefixtures("data_limit")
def test_a_limit_of_the_shell_counts() -> None:
    assert budget_bytes("cpu", 0, IDLE) == 3 * GIB - GIB // 10


def test_an_own_limit_counts() -> None:
    assert within_data_limit(8 * GIB, None) == 8 * GIB
    assert within_data_limit(8 * GIB, own_limit_bytes(2.0)) == 2 * GIB - GIB // 10
    assert within_data_limit(GIB, 2 * GIB) == GIB
