"""Noise in the memory budget changes no plan."""

import dataclasses

from safetrain.core.records.reports import Machine
from safetrain.plan.machine import Probe, read_machine_now, settle

CPU = Probe("cpu", "", 0, 0, 0, 140 * 2**20, "OpenBLAS", True, "", 200.0)


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


def test_the_process_is_as_it_was_measured_with_room_to_grow() -> None:
    before = read_machine_now(CPU)
    assert before.process_memory_bytes == 224 * 2**20  # 140 and 64, up to a multiple of 32
    a_little_more = read_machine_now(dataclasses.replace(CPU, process_bytes=170 * 2**20))
    assert settle(a_little_more, before).process_memory_bytes == before.process_memory_bytes
    assert read_machine_now(dataclasses.replace(CPU, process_bytes=400 * 2**20)).process_memory_bytes > 450 * 2**20
