"""The memory that the system charges to a process.

On macOS that is not the resident memory, which leaves out compressed pages and Metal's buffers (mlx-lm#1807: 1.9 GB
resident with 4.7 GB of weights in use); phys_footprint, which Activity Monitor shows as "Memory", has both.
"""

import ctypes
import os
import re
import resource
import struct
import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")
RUSAGE_INFO_V4 = 4  # the first version with a lifetime peak, macOS 10.12
RUSAGE_BYTES = 512  # more than any version has
# XNU bsd/sys/resource.h, struct rusage_info_v4: uint8_t ri_uuid[16], then uint64_t fields, of which ri_phys_footprint
# is the eighth and ri_lifetime_max_phys_footprint the 29th.
UUID_BYTES, FOOTPRINT_FIELD, MOST_FIELD = 16, 7, 28


def footprint_bytes(pid: int) -> int:
    """Memory of a process now: phys_footprint on macOS, elsewhere what is resident; 0 when it is gone."""
    if sys.platform == "darwin":
        return _ask_macos(pid)[0]
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def most_footprint_bytes() -> int:
    """The most memory that this process has had so far."""
    if sys.platform == "darwin":
        return _ask_macos(os.getpid())[1]
    match = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else None
    if match is not None:  # ru_maxrss starts with the parent's there
        return 1024 * int(match[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def parse_rusage(content: bytes) -> tuple[int, int]:
    """Bytes charged now, and the most since the start, by a struct rusage_info_v4 (or a later one)."""

    def field(number: int) -> int:
        return int(struct.unpack_from("<Q", content, UUID_BYTES + 8 * number)[0])

    return field(FOOTPRINT_FIELD), field(MOST_FIELD)


def _ask_macos(pid: int) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, RUSAGE_INFO_V4, buffer) != 0:
        return 0, 0
    return parse_rusage(buffer.raw)
