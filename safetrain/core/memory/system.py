"""The memory budget of a training run, and readings: container limits, macOS values, a process's footprint.

A footprint is the memory that the system charges to a process. On macOS it differs from resident memory, which leaves
out compressed pages and Metal's buffers (mlx-lm#1807: 1.9 GB resident with 4.7 GB of weights in use); phys_footprint,
which Activity Monitor shows as "Memory", includes both.
"""

import ctypes
import os
import re
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

OWN_LIMIT = "train.memory_limit_gb"  # the name of a limit that the user has set
GIB = 2**30
LEAST_FREE_PERCENT = 10  # by kern.memorystatus_level: below this, macOS has no memory left to give
PROCESS_BYTES = 200 * 2**20  # Python, mlx and its libraries, unless measured (measured, Linux CPU: 140 MiB)
DATA_BESIDE_BYTES = GIB // 10  # private memory outside mlx and PROCESS_BYTES (measured on Linux CPU: 0.3 GiB in sum)
ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
LIMIT, USED = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")  # cgroup v2, v1
KILLS = ("memory.events", "memory.oom_control")
PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"  # XNU kern_memorystatus_notify.c, readable by all users
FREE_PERCENT = "kern.memorystatus_level"  # free memory in percent, as `memory_pressure -Q` prints it
WARNING, CRITICAL = 2, 4  # pressure levels; 1 is normal, 0 is unknown
STATUS = Path("/proc/self/status")
RUSAGE_INFO_V4 = 4  # the first version with a lifetime peak, macOS 10.12
RUSAGE_BYTES = 512  # larger than any version of the struct
# XNU bsd/sys/resource.h, struct rusage_info_v4: uint8_t ri_uuid[16], then uint64_t fields, in which
# ri_phys_footprint is the eighth and ri_lifetime_max_phys_footprint the 29th.
UUID_BYTES, FOOTPRINT, MOST_FOOTPRINT = 16, 7, 28


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budget of a training process, and the part that Python and libraries use outside mlx's allocator."""

    total_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def mlx_bytes(self) -> int:
        """The part of the budget for mlx's allocator."""
        return max(0, self.total_bytes - self.process_bytes)


@dataclass(frozen=True)
class Readings:
    """The host's memory at one moment, in bytes. The last three fields exist only on macOS; 0 if unknown."""

    total_bytes: int
    available_bytes: int
    wired_bytes: int = 0
    pressure_level: int = 0
    free_percent: int = 0

    @property
    def is_critical(self) -> bool:
        """Whether macOS has no memory left to give; it compresses and swaps long before that."""
        return self.pressure_level >= CRITICAL or 0 < self.free_percent < LEAST_FREE_PERCENT


def read_memory() -> Readings:
    import psutil  # not for a command's help

    memory = psutil.virtual_memory()
    if sys.platform != "darwin":
        return Readings(memory.total, memory.available)
    level, free = sysctl_number(PRESSURE_LEVEL), sysctl_number(FREE_PERCENT)
    return Readings(memory.total, memory.available, memory.wired, level, free)


def host_room_bytes(host: Readings) -> int:
    """Available memory, within the limits of container and shell (ulimit -d)."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return within_data_limit(machine_room_bytes(host), None if limit == resource.RLIM_INFINITY else limit)


def machine_room_bytes(host: Readings) -> int:
    """Available memory, within the limit of the container."""
    container = memory_room_bytes(memory_groups())
    return host.available_bytes if container is None else min(host.available_bytes, container)


def within_data_limit(budget: int, limit_bytes: int | None) -> int:
    """The budget within a limit on the process's private memory (ulimit -d); None: no limit."""
    return budget if limit_bytes is None else min(budget, max(0, limit_bytes - DATA_BESIDE_BYTES))


def own_limit_bytes(memory_limit_gb: float | None) -> int | None:
    """train.memory_limit_gb in bytes."""
    return None if memory_limit_gb is None else int(memory_limit_gb * GIB)


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
    """Memory that the groups still allow: the smallest limit minus use; None without a limit.

    The file cache does not count, not even its active part (files read twice), because the kernel can reclaim it.
    """
    rooms = []
    for group in groups:
        limit, used = memory_limit_bytes([group]), _first(group, USED)
        if limit is not None and used.isdigit():
            stat = _fields(_text(group / "memory.stat"))
            prefix = "total_" if "total_active_file" in stat else ""  # in version 1, only these count inner groups
            cache = sum(int(stat.get(f"{prefix}{name}", "0")) for name in ("inactive_file", "active_file"))
            rooms.append(max(0, limit - int(used) + cache))
    return min(rooms, default=None)


def oom_kills(groups: list[Path]) -> int:
    """Count the processes that the kernel has ever killed for lack of memory in the innermost group.

    Outer groups would count the same kills again, and the kills of other groups.
    """
    return int(_fields(_first(groups[0], KILLS)).get("oom_kill", "0")) if groups else 0


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)


def _first(group: Path, names: tuple[str, ...]) -> str:
    """The text of a group's file; ``names``: what cgroup versions 2 and 1 call it."""
    return next((text for name in names if (text := _text(group / name))), "")


def sysctl_number(name: str) -> int:
    """Read a 32-bit kernel value; 0 if the kernel does not know the name."""
    return int.from_bytes(_sysctl(name, 4), sys.byteorder)


def sysctl_text(name: str) -> str:
    """Read a short kernel text; empty if the kernel does not know the name."""
    return _sysctl(name, 64).rstrip(b"\0").decode()


def _sysctl(name: str, most_bytes: int) -> bytes:
    answer, size = ctypes.create_string_buffer(most_bytes), ctypes.c_size_t(most_bytes)
    known = ctypes.CDLL(None).sysctlbyname(name.encode(), answer, ctypes.byref(size), None, 0) == 0
    return answer.raw[: size.value] if known else b""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def footprint_bytes(pid: int) -> int:
    """Current memory of a process: phys_footprint on macOS, else resident memory; 0 if the process has ended."""
    if sys.platform == "darwin":
        return _ask_macos(pid)[0]
    import psutil

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
