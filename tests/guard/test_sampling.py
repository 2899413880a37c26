"""What is asked of nvidia-smi, and what its answers mean."""

import os
from dataclasses import replace

from safetrain.guard.sampling import (
    RECENT_SECONDS,
    LastSeconds,
    MemorySample,
    Recent,
    Sampler,
    nvidia_query,
    vram_used_bytes,
)

UUID = "GPU-4a53a9f2-7e4c-4a3b-9d0e-2b6f2f1c9a10"
MIB = 2**20


def test_the_device_in_use_is_asked_for_by_its_uuid() -> None:
    """nvidia-smi does not know CUDA_VISIBLE_DEVICES."""
    asked = nvidia_query("/usr/bin/nvidia-smi", UUID)
    assert asked[:2] == ["/usr/bin/nvidia-smi", f"--id={UUID}"]
    assert not any(word.startswith("--id") for word in nvidia_query("nvidia-smi", ""))


def test_its_answer_is_the_largest_number_in_mib() -> None:
    """One line for a device; what it cannot tell is written out."""
    assert vram_used_bytes("10543\n") == 10543 * MIB
    assert vram_used_bytes("4\n22917\n4\n") == 22917 * MIB
    assert vram_used_bytes("[N/A]\n") == vram_used_bytes("No devices were found\n") == vram_used_bytes("") == 0


def test_a_sample_keeps_share_of_time_and_level_apart() -> None:
    sample = Sampler(os.getpid(), None).sample(UUID)
    assert sample is not None
    assert 0.0 <= sample.stalled_percent <= 100.0
    assert sample.pressure_level in (0, 1, 2, 4)
    assert sample.footprint_bytes > 2**20


def test_what_was_seen_hours_ago_is_no_evidence() -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    seen, usual = LastSeconds(), MemorySample(2 * MIB, 3 * MIB, 900 * MIB, 0, 0.0, 1, 5 * MIB)
    assert seen.summary() == Recent()
    seen.add(0.0, usual, 0)
    seen.add(1.0, MemorySample(80 * MIB, 90 * MIB, MIB, 0, 70.0, 4, 8 * MIB), 1)
    dip = Recent(80 * MIB, 90 * MIB, MIB, 70.0, 4, 8 * MIB, 0)
    assert seen.summary() == dip
    seen.add(1.0 + RECENT_SECONDS, usual, 1)
    assert seen.summary() == replace(dip, oom_kills_before=1)
    seen.add(3600.0, usual, 1)
    assert seen.summary() == Recent(2 * MIB, 3 * MIB, 900 * MIB, 0.0, 1, 5 * MIB, 1)
