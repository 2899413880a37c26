"""Memory readings of the system: container limits, macOS values and reports, the footprint of a process.

Functions that read files take a folder or a text, so that recorded files can be read on any system.

A footprint is the memory that the system charges to a process. On macOS it differs from resident memory, which leaves
out compressed pages and Metal's buffers (mlx-lm#1807: 1.9 GB resident with 4.7 GB of weights in use); phys_footprint,
which Activity Monitor shows as "Memory", includes both.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import struct
import sys
import time
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
LIMIT, USED = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")  # versions 2 and 1
KILLS = ("memory.events", "memory.oom_control")
REPORTS = Path("/Library/Logs/DiagnosticReports")
PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"  # XNU kern_memorystatus_notify.c, readable by all users
FREE_PERCENT = "kern.memorystatus_level"  # free memory in percent, as `memory_pressure -Q` prints it
WARNING, CRITICAL = 2, 4  # pressure levels; 1 is normal, 0 is unknown
# Kill reasons that are not about memory (XNU kern_memorystatus.c, memorystatus_kill_cause_name).
NOT_FOR_MEMORY = ("", "vnode-limit", "idle-exit", "diagnostic", "disk-space-shortage", "jettisoned")
POLL_SECONDS = 0.1
STATUS = Path("/proc/self/status")
RUSAGE_INFO_V4 = 4  # the first version with a lifetime peak, macOS 10.12
RUSAGE_BYTES = 512  # larger than any version of the struct
# XNU bsd/sys/resource.h, struct rusage_info_v4: uint8_t ri_uuid[16], then uint64_t fields, in which
# ri_phys_footprint is the eighth and ri_lifetime_max_phys_footprint the 29th.
UUID_BYTES, FOOTPRINT, MOST_FOOTPRINT = 16, 7, 28


def memory_groups(root: Path = ROOT, mine: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of this process's memory cgroups (version 2 or 1), innermost first; empty without cgroups."""
    groups: list[Path] = []
    for line in _text(mine).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            base = root / "memory" if controllers else root
            folders = [base / name.lstrip("/"), *(base / name.lstrip("/")).parents]
            groups += [each for each in folders if each.is_relative_to(base) and _first(each, LIMIT)]
    return groups


def memory_limit_bytes(groups: list[Path]) -> int | None:
    """The smallest limit of these groups; None without a limit."""
    texts = [_first(group, LIMIT) for group in groups]
    return min((int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED), default=None)


def memory_room_bytes(groups: list[Path]) -> int | None:
    """Memory that the groups still allow: the smallest limit minus use (file cache excluded); None without a limit."""
    rooms = []
    for group in groups:
        limit, used = memory_limit_bytes([group]), _first(group, USED)
        if limit is not None and used.isdigit():
            rooms.append(max(0, limit - int(used) + _file_cache_bytes(group)))
    return min(rooms, default=None)


def _file_cache_bytes(group: Path) -> int:
    """Size of the file cache, which the kernel can reclaim; files read twice are on its active list."""
    fields = _fields(_text(group / "memory.stat"))
    prefix = "total_" if "total_active_file" in fields else ""  # version 1 counts the groups inside only under total_
    return sum(int(fields.get(f"{prefix}{name}", "0")) for name in ("inactive_file", "active_file"))


def oom_kills(groups: list[Path]) -> int:
    """Count the processes of the innermost group that the kernel has ever killed for lack of memory.

    Outer groups would count the same kills again, and those of other groups.
    """
    return int(_fields(_first(groups[0], KILLS)).get("oom_kill", "0")) if groups else 0


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)


def _first(group: Path, names: tuple[str, ...]) -> str:
    """The text of a group's file, by its name in version 2 or 1."""
    return next((text for name in names if (text := _text(group / name))), "")


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
    """Reports written since a wall-clock time, sorted by name, also those that macOS has moved to a folder inside."""
    found = []
    for path in folder.rglob(pattern):
        with contextlib.suppress(OSError):  # moved meanwhile
            if path.name[0] != "." and path.stat().st_mtime >= since_seconds:
                found.append(path)
    return sorted(found)


def killed_for_memory(
    pid: int, since_seconds: float, wait_seconds: float = 0.0, folder: Path = REPORTS
) -> tuple[str, ...]:
    """Find the reports that the system killed this process for lack of memory; a text with the reason for each.

    macOS writes the report seconds after the kill: ``wait_seconds`` is the time to wait for one.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        reports = reports_since("JetsamEvent-*.ips", since_seconds, folder)
        kills = [(path.name, jetsam_reason(_text(path), pid)) for path in reports]
        told = [f"{name}: process {pid} was killed ({why})" for name, why in kills if why not in NOT_FOR_MEMORY]
        if told or time.monotonic() >= deadline:
            return tuple(told)
        time.sleep(POLL_SECONDS)


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
    now, most = (struct.unpack_from("<Q", content, UUID_BYTES + 8 * field)[0] for field in (FOOTPRINT, MOST_FOOTPRINT))
    return int(now), int(most)


def _ask_macos(pid: int) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
    if ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(pid, RUSAGE_INFO_V4, buffer) != 0:
        return 0, 0
    return parse_rusage(buffer.raw)
