"""The budget is what a training may really take: on each backend, in a container, under a limit of the shell."""

import resource
from collections.abc import Iterator

import psutil
import pytest

from safetrain.core import memory_budget
from safetrain.core.memory_budget import (
    Device,
    budget_bytes,
    cuda_budget_bytes,
    metal_budget_bytes,
    within_own_limit,
)

GIB = 2**30


@pytest.fixture
def data_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def test_each_backend_has_its_rule() -> None:
    working_set = int(5.3 * GIB)
    assert metal_budget_bytes(working_set, 8 * GIB, 64 * GIB) == int(0.9 * working_set)
    assert metal_budget_bytes(working_set, 8 * GIB, 5 * GIB) == 3 * GIB
    assert metal_budget_bytes(20 * GIB, 32 * GIB, 20 * GIB) == 16 * GIB
    assert metal_budget_bytes(working_set, 8 * GIB, 1 * GIB) == GIB // 2
    assert cuda_budget_bytes(15 * GIB) == 15 * GIB - 3 * GIB // 4
    assert budget_bytes(Device("cuda", free_bytes=GIB // 2)) == 0


def test_on_cpu_it_is_what_is_available() -> None:
    assert 0 < budget_bytes(Device("cpu")) <= psutil.virtual_memory().available + GIB


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "container_room_bytes", lambda: GIB // 4)
    assert budget_bytes(Device("cpu")) == GIB // 4


@pytest.mark.usefixtures("data_limit")
def test_a_limit_of_the_shell_counts() -> None:
    assert budget_bytes(Device("cpu")) == 3 * GIB - GIB // 10


def test_an_own_limit_counts() -> None:
    assert within_own_limit(8 * GIB, None) == 8 * GIB
    assert within_own_limit(8 * GIB, 2.0) == 2 * GIB - GIB // 10
    assert within_own_limit(GIB, 2.0) == GIB
