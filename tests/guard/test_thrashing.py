"""A machine that swaps instead of training is told so while everything is still alive."""

from safetrain.core.records.metrics import StepRecord
from safetrain.guard.sampling import Thrashing

MIB = 2**20


def record(step: int, speed: float | None) -> StepRecord:
    return StepRecord(step, 0.0, 1.0, None, 1e-4, 1.0, 10, speed, 0, 0, 1.0)


def test_half_the_speed_and_more_swap_is_thrashing_and_either_alone_is_not() -> None:
    watch = Thrashing()
    for step in range(5):
        assert watch.warning(record(step, 100.0), 10 * MIB) == ""
    assert watch.warning(record(6, 40.0), 10 * MIB) == ""  # slow: another program computes
    assert watch.warning(record(7, 100.0), 500 * MIB) == ""  # swap of another program
    told = watch.warning(record(8, 40.0), 900 * MIB)
    assert "at step 8 the speed is 40 % of the usual, and swap has grown by 400.0 MiB" in told
    assert "Ctrl-C saves" in told


def test_the_first_records_are_compared_with_nothing() -> None:
    watch = Thrashing()
    assert watch.warning(record(0, None), 0) == ""
    assert watch.warning(record(1, 100.0), 0) == ""
    assert watch.warning(record(2, 10.0), 900 * MIB) == ""
