"""Noise in the memory budget changes no plan."""

import dataclasses

from safetrain.core.reports import Machine
from safetrain.plan.machine import Probe, read_machine_now, settle

CPU = Probe("cpu", "", 0, 0, 0, "OpenBLAS", True, "", 200.0)


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
