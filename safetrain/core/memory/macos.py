"""What macOS says of the machine: numbers of its kernel, and the reports that it writes about kills and panics.

All but the two sysctl functions take a folder or a text, so that recorded reports can be read on any system.
"""

import ctypes
import json
import time
from collections.abc import Iterator
from pathlib import Path

REPORTS = Path("/Library/Logs/DiagnosticReports")
RETIRED = "Retired"  # a folder in there that older reports are moved to
PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"  # XNU kern_memorystatus_notify.c, readable by everybody
FREE_PERCENT = "kern.memorystatus_level"  # of memory, as `memory_pressure -Q` prints it
WARNING, CRITICAL = 2, 4  # pressure levels; 1 is normal, 0 is unknown
# Reasons of a kill that say nothing of memory (XNU kern_memorystatus.c, memorystatus_kill_cause_name).
NOT_FOR_MEMORY = ("vnode-limit", "idle-exit", "diagnostic", "disk-space-shortage", "jettisoned")
POLL_SECONDS = 0.1


def sysctl_number(name: str) -> int:
    """A 32-bit number of the kernel; 0 where it does not know the name."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return 0
    return value.value


def sysctl_text(name: str) -> str:
    """A short text of the kernel; empty where it does not know the name."""
    answer, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), answer, ctypes.byref(size), None, 0) != 0:
        return ""
    return answer.value.decode()


def reports_since(pattern: str, since_seconds: float, folder: Path = REPORTS) -> list[Path]:
    """Reports written since a time of the wall clock, by name; hidden files and unreadable folders are left out."""
    reports = [path for place in (folder, folder / RETIRED) for path in place.glob(pattern)]
    return sorted(path for path in reports if path.name[0] != "." and _written(path) >= since_seconds)


def killed_for_memory(
    pid: int, since_seconds: float, wait_seconds: float = 0.0, folder: Path = REPORTS
) -> tuple[str, ...]:
    """Which reports say that the system killed this process for lack of memory, and why, in words.

    The report is written seconds after the kill: ``wait_seconds`` is how long one is waited for.
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
    """Why a JetsamEvent report says that a process was killed; empty when it lists it as a bystander, or not at all.

    A line of JSON, then the report as JSON. It lists all processes; those that were killed have a reason (Apple:
    "Identifying high-memory use with jetsam event reports").
    """
    try:
        processes = json.loads(report.partition("\n")[2])["processes"]
        return next((str(each["reason"]) for each in processes if each.get("pid") == pid and each.get("reason")), "")
    except (ValueError, KeyError, TypeError, AttributeError):  # cut off, or of another form
        return ""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # moved meanwhile
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
