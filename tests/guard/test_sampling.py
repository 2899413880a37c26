"""What is seen of a process and the machine, for how long it counts, and what it says of swapping."""

from dataclasses import replace

import pytest

from safetrain.core.records.metrics import StepRecord
from safetrain.guard.sampling import RECENT_SECONDS, MemorySample, RecentMemory, Sampler, Thrashing

MIB = 2**20


def test_what_was_seen_hours_ago_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    kills = iter((0, 0, 0, 1, 1, 1, 1, 1, 1))
    monkeypatch.setattr("safetrain.guard.sampling.oom_kills", lambda _groups: next(kills))
    seen, usual = Sampler(None), MemorySample(2 * MIB, 3 * MIB, 900 * MIB, 0, 0.0, 1)
    assert seen.recent() == RecentMemory()
    seen.remember(0.0, usual)
    seen.remember(1.0, MemorySample(80 * MIB, 90 * MIB, MIB, 0, 70.0, 4))
    dip = RecentMemory(80 * MIB, 90 * MIB, MIB, 70.0, 4, 1)
    assert seen.recent() == dip
    seen.remember(1.0 + RECENT_SECONDS, usual)
    assert seen.recent() == replace(dip, oom_kills=0)
    seen.remember(3600.0, usual)
    assert seen.recent() == RecentMemory(2 * MIB, 3 * MIB, 900 * MIB, 0.0, 1, 0)


def test_half_the_speed_and_more_swap_is_thrashing_and_either_alone_is_not() -> None:
    watch = Thrashing()

    def warning(step: int, speed: float | None, swap: int) -> str:
        return watch.warning(StepRecord(step, 0.0, 1.0, None, 1e-4, 1.0, 10, speed, 0, 0, 1.0), swap * MIB)

    assert warning(0, None, 0) == ""
    for step in range(1, 6):
        assert warning(step, 100.0, 10) == ""
    assert warning(6, 40.0, 10) == ""  # slow: another program computes
    assert warning(7, 100.0, 500) == ""  # swap of another program
    told = warning(8, 40.0, 900)
    assert "at step 8 the speed is 40 % of normal, and swap has grown by 400.0 MiB" in told
    assert "Ctrl-C saves" in told
