"""What is seen of a process and the machine, and for how long it counts."""

import os
from dataclasses import replace

from safetrain.guard.sampling import (
    RECENT_SECONDS,
    MemorySample,
    RecentMemory,
    RecentSamples,
    Sampler,
)

MIB = 2**20


def test_a_sample_keeps_share_of_time_and_level_apart() -> None:
    sample = Sampler(None).sample(os.getpid())
    assert sample is not None
    assert 0.0 <= sample.stalled_percent <= 100.0
    assert sample.pressure_level in (0, 1, 2, 4)
    assert sample.footprint_bytes > 2**20


def test_what_was_seen_hours_ago_is_no_evidence() -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    seen, usual = RecentSamples(), MemorySample(2 * MIB, 3 * MIB, 900 * MIB, 0, 0.0, 1)
    assert seen.summary() == RecentMemory()
    seen.add(0.0, usual, 0)
    seen.add(1.0, MemorySample(80 * MIB, 90 * MIB, MIB, 0, 70.0, 4), 1)
    dip = RecentMemory(80 * MIB, 90 * MIB, MIB, 70.0, 4, 0)
    assert seen.summary() == dip
    seen.add(1.0 + RECENT_SECONDS, usual, 1)
    assert seen.summary() == replace(dip, oom_kills_before=1)
    seen.add(3600.0, usual, 1)
    assert seen.summary() == RecentMemory(2 * MIB, 3 * MIB, 900 * MIB, 0.0, 1, 1)
