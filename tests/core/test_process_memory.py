"""A process's memory is what the system charges to it; on macOS read from a struct whose layout is the header's."""

import ctypes
import os
import subprocess
import sys

import psutil
import pytest

from safetrain.core.memory.system import (
    RUSAGE_BYTES,
    footprint_bytes,
    most_footprint_bytes,
    parse_rusage,
)

# XNU bsd/sys/resource.h, struct rusage_info_v4, behind uint8_t ri_uuid[16]: uint64_t fields in this order.
RUSAGE_V4 = """user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size resident_size phys_footprint
proc_start_abstime proc_exit_abstime child_user_time child_system_time child_pkg_idle_wkups child_interrupt_wkups
child_pageins child_elapsed_abstime diskio_bytesread diskio_byteswritten cpu_time_qos_default cpu_time_qos_maintenance
cpu_time_qos_background cpu_time_qos_utility cpu_time_qos_legacy cpu_time_qos_user_initiated
cpu_time_qos_user_interactive billed_system_time serviced_system_time logical_writes lifetime_max_phys_footprint
instructions cycles billed_energy serviced_energy interval_max_phys_footprint runnable_time"""
GIB = 2**30


class RusageV4(ctypes.LittleEndianStructure):
    """As the header has it."""

    _fields_ = (("ri_uuid", ctypes.c_uint8 * 16), *((f"ri_{name}", ctypes.c_uint64) for name in RUSAGE_V4.split()))


def test_both_footprints_are_read_from_their_places() -> None:
    """Resident memory of 1.9 GB with 4.7 GB of weights in use was seen on an 8 GB M1."""
    filled = RusageV4(**{f"ri_{name}": number for number, name in enumerate(RUSAGE_V4.split())})
    filled.ri_resident_size, filled.ri_phys_footprint = int(1.9 * GIB), int(4.9 * GIB)
    filled.ri_lifetime_max_phys_footprint = 5 * GIB
    content = bytes(filled).ljust(RUSAGE_BYTES, b"\0")
    assert ctypes.sizeof(RusageV4) == 296 <= RUSAGE_BYTES
    assert parse_rusage(content) == (int(4.9 * GIB), 5 * GIB)


def test_another_process_s_memory_is_read_and_a_gone_one_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "kept = bytearray(2**26); print(1, flush=True); input()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    assert footprint_bytes(process.pid) > 2**26
    if sys.platform != "darwin":
        assert footprint_bytes(process.pid) == pytest.approx(psutil.Process(process.pid).memory_info().rss, rel=0.05)
    process.communicate()
    assert footprint_bytes(process.pid) == 0
    assert most_footprint_bytes() >= footprint_bytes(os.getpid()) > 0
