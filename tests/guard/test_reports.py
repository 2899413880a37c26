"""macOS's reports of kills for lack of memory."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from safetrain.guard.postmortem import jetsam_reason, killed_for_memory, reports_since

HEADER = {"bug_type": "298", "timestamp": "2026-09-29 12:10:10.00 +0200", "os_version": "macOS 26.6 (25G72)"}
LIMIT = "per-process-limit"
MACOS_26 = [
    {"name": "corebrightnessd", "pid": 398, "rpages": 361, "states": ["daemon", "idle"]},
    {"name": "spotlightknowledged", "pid": 73341, "rpages": 20480, "reason": LIMIT},
]
KSCRASH_278 = {
    "uuid": "14350be0-e8a2-3419-b7fa-42ae204997e5", "states": ["frontmost"], "killDelta": 13593, "lifetimeMax": 795,
    "age": 1001079202730, "purgeable": 0, "fds": 200, "genCount": 0, "coalition": 633, "rpages": 960,
    "reason": LIMIT, "pid": 4624, "idleDelta": 4, "name": "RebornTunnel", "cpuTime": 1223.541349,
}  # fmt: skip


def report(processes: Any, indent: int | None = 2) -> str:
    """A line of JSON, then the report over many lines, as the system writes it."""
    body = {"pageSize": 16384, "largestProcess": "Python", "memoryStatus": {"pageSize": 16384}, "processes": processes}
    return json.dumps(HEADER) + "\n" + json.dumps(body, indent=indent)


def test_only_the_one_with_a_reason_was_killed() -> None:
    assert jetsam_reason(report(MACOS_26), 73341) == LIMIT
    assert jetsam_reason(report(MACOS_26), 398) == ""  # listed, as every process is
    assert jetsam_reason(report(MACOS_26), 7334) == ""  # the beginning of another one's number
    assert jetsam_reason(report([*MACOS_26, KSCRASH_278], indent=None), 4624) == LIMIT
    for text in ("", "{}", json.dumps(HEADER), report(MACOS_26)[:-40], report("x"), json.dumps(HEADER) + "\n[]"):
        assert jetsam_reason(text, 73341) == "", "cut off, or of another form"


def test_reports_are_found_where_older_ones_are_moved_to_as_well(tmp_path: Path) -> None:
    (tmp_path / "Retired").mkdir()
    (tmp_path / "JetsamEvent-2.ips").write_text(report([{"name": "Python", "pid": 5, "reason": "disk-space-shortage"}]))
    for place in ("", "Retired"):
        path = tmp_path / place / "JetsamEvent-1.ips"
        path.write_text(report(MACOS_26))
        assert killed_for_memory(73341, 0.0, folder=tmp_path) == (f"{path.name}: process 73341 was killed ({LIMIT})",)
        assert killed_for_memory(398, 0.0, folder=tmp_path) == ()
        assert killed_for_memory(5, 0.0, folder=tmp_path) == ()  # not for memory
        assert killed_for_memory(73341, time.time() + 60, folder=tmp_path) == ()  # an earlier process of this number
        path.unlink()
    for name, hours in (("panic-full-2026-09-01-010203.0002.panic", 1), (".contents.panic", 1), ("old.panic", 80)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - 3600 * hours,) * 2)
    (panic,) = reports_since("*.panic", time.time() - 3600 * 72, tmp_path)
    assert panic.name == "panic-full-2026-09-01-010203.0002.panic"


def test_a_report_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    path, done = tmp_path / "JetsamEvent-2.ips", time.monotonic() + 0.3

    def write() -> None:
        time.sleep(max(0.0, done - time.monotonic()))
        path.write_text(report([{"name": "Python", "pid": 5, "reason": "vm-compressor-space-shortage"}]))

    writer = threading.Thread(target=write)
    writer.start()
    assert killed_for_memory(5, 0.0, wait_seconds=5.0, folder=tmp_path)
    assert 0 <= time.monotonic() - done < 2  # and no longer
    writer.join()
    began = time.monotonic()
    assert killed_for_memory(6, 0.0, wait_seconds=0.2, folder=tmp_path) == ()
    assert time.monotonic() - began < 1
