"""Memory readings of the system: container limits, macOS values and reports, the footprint of a process.

Functions that read files take a folder or a text, so that recorded files can be read on any system.

A footprint is the memory that the system charges to a process. On macOS it differs from resident memory, which leaves
out compressed pages and Metal's buffers (mlx-lm#1807: 1.9 GB resident with 4.7 GB of weights in use); phys_footprint,
which Activity Monitor shows as "Memory", includes both.
"""

import ctypes
import json
import os
import re
import resource
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
REPORTS = Path("/Library/Logs/DiagnosticReports")
RETIRED = "Retired"  # the subfolder to which macOS moves older reports
PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"  # XNU kern_memorystatus_notify.c, readable by all users
FREE_PERCENT = "kern.memorystatus_level"  # free memory in percent, as `memory_pressure -Q` prints it
WARNING, CRITICAL = 2, 4  # pressure levels; 1 is normal, 0 is unknown
# Kill reasons that are not about memory (XNU kern_memorystatus.c, memorystatus_kill_cause_name).
NOT_FOR_MEMORY = ("vnode-limit", "idle-exit", "diagnostic", "disk-space-shortage", "jettisoned")
POLL_SECONDS = 0.1
STATUS = Path("/proc/self/status")
RUSAGE_INFO_V4 = 4  # the first version with a lifetime peak, macOS 10.12
RUSAGE_BYTES = 512  # larger than any version of the struct
# XNU bsd/sys/resource.h, struct rusage_info_v4: uint8_t ri_uuid[16], then uint64_t fields, in which
# ri_phys_footprint is the eighth and ri_lifetime_max_phys_footprint the 29th.
UUID_BYTES, FOOTPRINT_FIELD, MOST_FIELD = 16, 7, 28


def memory_groups(root: Path = ROOT, mine: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of this process's memory cgroups (version 2 or 1), innermost first; empty without cgroups."""
    if not mine.is_file():
        return []
    groups: list[Path] = []
    for line in mine.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root if not controllers else None
        if base is None:
            continue
        folder = base / name.lstrip("/")
        while folder != base.parent:  # in a container it may be the outer name: then only ``base`` exists
            if (folder / "memory.max").is_file() or (folder / "memory.limit_in_bytes").is_file():
                groups.append(folder)
            folder = folder.parent
    return groups


def memory_limit_bytes(groups: list[Path]) -> int | None:
    """The smallest limit of these groups; None without a limit."""
    limits = []
    for group in groups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(group / name)
            if text.isdigit() and int(text) < UNLIMITED:
                limits.append(int(text))
    return min(limits, default=None)


def memory_room_bytes(groups: list[Path]) -> int | None:
    """Memory that the groups still allow: the smallest limit minus use (file cache excluded); None without a limit."""
    rooms = []
    for group in groups:
        limit = memory_limit_bytes([group])
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        if limit is not None and used.isdigit():
            rooms.append(max(0, limit - int(used) + _file_cache_bytes(group)))
    return min(rooms, default=None)


def _file_cache_bytes(group: Path) -> int:
    """Size of the file cache, which the kernel can reclaim; files read twice are on its active list."""
    fields = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    for prefix in ("total_", ""):  # version 1 counts the groups inside only under total_
        sizes = [fields.get(f"{prefix}{name}", "") for name in ("inactive_file", "active_file")]
        if any(size.isdigit() for size in sizes):
            return sum(int(size) for size in sizes if size.isdigit())
    return 0


def oom_kills(groups: list[Path]) -> int:
    """Count the processes of the innermost group that the kernel has ever killed for lack of memory.

    Outer groups would count the same kills again, and those of other groups.
    """
    total = 0
    for group in groups[:1]:
        for name in ("memory.events", "memory.oom_control"):
            fields = dict(line.split(maxsplit=1) for line in _text(group / name).splitlines() if " " in line)
            total += int(fields.get("oom_kill", "0"))
    return total


def sysctl_number(name: str) -> int:
    """Read a 32-bit kernel value; 0 if the kernel does not know the name."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return 0
    return value.value


def sysctl_text(name: str) -> str:
    """Read a short kernel text; empty if the kernel does not know the name."""
    answer, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), answer, ctypes.byref(size), None, 0) != 0:
        return ""
    return answer.value.decode()


def reports_since(pattern: str, since_seconds: float, folder: Path = REPORTS) -> list[Path]:
    """Reports written since a wall-clock time, sorted by name; hidden files and unreadable folders are left out."""
    reports = [path for place in (folder, folder / RETIRED) for path in place.glob(pattern)]
    return sorted(path for path in reports if path.name[0] != "." and _written(path) >= since_seconds)


def killed_for_memory(
    pid: int, since_seconds: float, wait_seconds: float = 0.0, folder: Path = REPORTS
) -> tuple[str, ...]:
    """Find the reports that the system killed this process for lack of memory; a text with the reason for each.

    macOS writes the report seconds after the kill: ``wait_seconds`` is the time to wait for one.
    """
    deadline = time.monotonic() + wait_seconds
    while not (kills := tuple(_kills(pid, since_seconds, folder))) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return kills


def _kills(pid: int, since_seconds: float, folder: Path) -> Iterator[str]:
    for path in reports_since("JetsamEvent-*.ips", since_seconds, folder):
        reason = jetsam_reason(_text(path), pid)
        if reason and reason not in NOT_FOR_MEMORY:
            yield f"{path.name}: process {pid} was killed ({reason})"


def jetsam_reason(report: str, pid: int) -> str:
    """The kill reason that a JetsamEvent report gives for a process; empty if that process was not killed.

    A report is a line of JSON, then the body as JSON. It lists all processes; killed ones have a reason (Apple:
    "Identifying high-memory use with jetsam event reports").
    """
    try:
        processes = json.loads(report.partition("\n")[2])["processes"]
        return next((str(each["reason"]) for each in processes if each.get("pid") == pid and each.get("reason")), "")
    except (ValueError, KeyError, TypeError, AttributeError):  # truncated, or in another format
        return ""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # moved meanwhile
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def footprint_bytes(pid: int) -> int:
    """Current memory of a process: phys_footprint on macOS, else resident memory; 0 if the process has ended."""
    if sys.platform == "darwin":
        return _ask_macos(pid)[0]
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def most_footprint_bytes() -> int:
    """Peak memory of this process so far."""
    if sys.platform == "darwin":
        return _ask_macos(os.getpid())[1]
    match = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else None
    if match is not None:  # on Linux, ru_maxrss starts with the parent's peak
        return 1024 * int(match[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def parse_rusage(content: bytes) -> tuple[int, int]:
    """Read current and peak footprint, in bytes, from a struct rusage_info_v4 (or a later version)."""

    def field(number: int) -> int:
        return int(struct.unpack_from("<Q", content, UUID_BYTES + 8 * number)[0])

    return field(FOOTPRINT_FIELD), field(MOST_FIELD)


def _ask_macos(pid: int) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, RUSAGE_INFO_V4, buffer) != 0:
        return 0, 0
    return parse_rusage(buffer.raw)
