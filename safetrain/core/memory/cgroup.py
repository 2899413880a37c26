"""The memory limit that a container or a service puts on this process, and how often the kernel killed for it."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60


def memory_groups(root: Path = ROOT, mine: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of this process's memory groups, its own first, then those around it; version 2 or 1, or none."""
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
    """The smallest limit of these groups, None without one."""
    limits = []
    for group in groups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(group / name)
            if text.isdigit() and int(text) < UNLIMITED:
                limits.append(int(text))
    return min(limits, default=None)


def memory_room_bytes(groups: list[Path]) -> int | None:
    """Memory that the groups still allow: the smallest of limit minus use, without file cache; None without a limit."""
    rooms = []
    for group in groups:
        limit = memory_limit_bytes([group])
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if limit is not None and used.isdigit():
            rooms.append(max(0, limit - int(used) + _file_cache_bytes(group)))
    return min(rooms, default=None)


def _file_cache_bytes(group: Path) -> int:
    """Pages of files, which the kernel gives back: a file read twice is on its active list."""
    fields = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    for prefix in ("total_", ""):  # version 1 counts the groups inside only under total_
        sizes = [fields.get(f"{prefix}{name}", "") for name in ("inactive_file", "active_file")]
        if any(size.isdigit() for size in sizes):
            return sum(int(size) for size in sizes if size.isdigit())
    return 0


def oom_kills(groups: list[Path]) -> int:
    """How many processes of the innermost group the kernel has killed for lack of memory, ever.

    The groups around it would count the same kills again, and those of neighbours.
    """
    total = 0
    for group in groups[:1]:
        for name in ("memory.events", "memory.oom_control"):
            fields = dict(line.split(maxsplit=1) for line in _read(group / name).splitlines() if " " in line)
            total += int(fields.get("oom_kill", "0"))
    return total


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
