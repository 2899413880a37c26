"""Gathers evidence of how a training run ended, and writes the verdict to postmortem.json.

A training run that ended together with its supervisor leaves flight/run.json (the marker); the next run explains it.
"""

import contextlib
import dataclasses
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from safetrain.core.errors import EngineError
from safetrain.core.memory.system import OWN_LIMIT
from safetrain.core.postmortem import PostMortem
from safetrain.core.recorder import NO_WORK, FlightRecord, Phase, RunMarker, boot_id, read_flight
from safetrain.core.records.run_state import is_finished, newest_whole
from safetrain.core.storage.files import read_or_none, write_record
from safetrain.core.storage.paths import FLIGHT, MARKER, POSTMORTEM, RECORDER, STACKS, rank_folder
from safetrain.guard.process import MACHINE, Ending, Limit
from safetrain.guard.verdict import CONFIRMED, LIKELY, OUT_OF_MEMORY, Cause, judge

REPORTS = Path("/Library/Logs/DiagnosticReports")
# Kill reasons that are not about memory (XNU kern_memorystatus.c, memorystatus_kill_cause_name).
NOT_FOR_MEMORY = ("", "vnode-limit", "idle-exit", "diagnostic", "disk-space-shortage", "jettisoned")
POLL_SECONDS = 0.1

CAUSES_OF_ALL_RANKS = ("stopped", "bad_update", "orphaned")  # not caused by a single rank
REPORT_SECONDS = 5.0  # time that macOS needs to report a kill
REBOOTED = ("the system's boot id has changed since the training started",)
UNCLOSED = ("no process recorded how the run ended", "the system has not restarted since")


def open_marker(output: Path, command: str, limit: Limit) -> None:
    """Record that training is running, and its command; a marker left behind tells the next run of a sudden end."""
    (output / FLIGHT).mkdir(parents=True, exist_ok=True)
    marker = RunMarker(boot_id(), command, time.time(), limit.size_bytes, limit.name)
    write_record(output / FLIGHT / MARKER, marker)


def close_marker(output: Path) -> None:
    """Remove the marker, because the training's end is explained."""
    (output / FLIGHT / MARKER).unlink(missing_ok=True)


def explain(output: Path, ending: Ending, command: str) -> PostMortem:
    """Judge a training run that ended badly, and write postmortem.json unless the training was refused at the start."""
    ending = _with_traces(ending, rank_folder(output / FLIGHT, ending.rank or 0))
    cause, last = judge(ending), ending.record
    footprint = max(ending.memory.footprint_bytes, last.footprint_bytes if last else 0)
    if ending.limit.name == OWN_LIMIT:  # this limit counts private memory, resident or not
        footprint = max(ending.memory.data_bytes, last.data_bytes if last else 0) or footprint
    verdict = _assemble(
        output, cause, last, footprint, ending.limit, command, exit_code=exit_code_of(ending, cause),
        rank=None if cause.name in CAUSES_OF_ALL_RANKS else ending.rank, ranks=ending.ranks, host=ending.host,
    )  # fmt: skip
    if cause.name == "refused" and not ending.began:  # no process died: the last post-mortem stays
        return verdict
    return write_postmortem(output, verdict)


def explain_unclosed(output: Path, default_command: str) -> PostMortem | None:
    """Judge a training run that died together with its supervisor (reboot, panic, kill); None if there is none.

    The next command is the one that started the training, or ``default_command`` if unknown.
    """
    if not (output / FLIGHT / MARKER).is_file():
        return None
    last = read_flight(output / FLIGHT / RECORDER).last
    if is_finished(output) and last is not None and last.phase is Phase.FINISH:
        close_marker(output)  # the run is complete, only the marker is left
        return None
    marker = read_or_none(output / FLIGHT / MARKER, RunMarker)
    limit, footprint = Limit(psutil.virtual_memory().total, MACHINE), last.footprint_bytes if last else 0
    command = marker.command if marker is not None and marker.command else default_command
    cause, code = _sudden_end(output / FLIGHT, marker), 128 + signal.SIGKILL
    verdict = _assemble(output, cause, last, footprint, limit, command, exit_code=code)
    close_marker(output)
    return write_postmortem(output, verdict)


def write_postmortem(output: Path, verdict: PostMortem) -> PostMortem:
    """Write the verdict; if that fails, as on a full disk, it is only printed."""
    with contextlib.suppress(OSError):
        write_record(output / POSTMORTEM, verdict)
    return verdict


def exit_code_of(ending: Ending, cause: Cause) -> int:
    """Choose the stage's exit code, never 0: the child's own, 128 plus a signal, 124 (hang) or 137 (memory limit).

    Python ends with 1 for every uncaught exception: if memory was the cause, EngineError's code replaces it.
    """
    if ending.ended_by_us == "hang":
        return 124
    if ending.ended_by_us == "limit":
        return 128 + signal.SIGKILL
    if ending.return_code < 0:
        return 128 - ending.return_code
    if cause.is_memory and ending.return_code == 1:
        return EngineError.exit_code
    return ending.return_code or 1


def _with_traces(ending: Ending, folder: Path) -> Ending:
    """Add the flight record, the stacks and macOS's reports about the process."""
    flight = read_flight(folder / RECORDER)
    last = flight.last if flight.header is not None and flight.header.pid == ending.pid else None
    stacks = folder / STACKS
    stack = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    reports: tuple[str, ...] = ()
    if sys.platform == "darwin" and ending.return_code == -signal.SIGKILL and not ending.ended_by_us:
        reports = killed_for_memory(ending.pid, ending.started_seconds, REPORT_SECONDS, REPORTS)
    total = psutil.virtual_memory().total
    return dataclasses.replace(ending, record=last, reports=reports, stack=stack, total_memory_bytes=total)


def _sudden_end(flight: Path, marker: RunMarker | None) -> Cause:
    """Find out why a training run ended together with its supervisor."""
    started = marker.started_seconds if marker is not None else (flight / MARKER).stat().st_mtime
    panics = tuple(f"{path.name} is newer than its start" for path in reports_since("*.panic", started, REPORTS))
    if panics:
        return Cause("panic", "the machine's kernel panicked", CONFIRMED, panics)
    if marker is not None and marker.boot_id != boot_id():
        return Cause("reboot", "the machine restarted or lost power during the training", CONFIRMED, REBOOTED)
    headers = [read_flight(folder / RECORDER).header for folder in (flight, *sorted(flight.glob("rank_*")))]
    found = (killed_for_memory(each.pid, started, 0.0, REPORTS) for each in headers if each is not None)
    if reports := next(filter(None, found), ()):
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, (*reports, "its supervisor died too"), True)
    return Cause("supervisor_killed", "it was killed together with its supervisor", LIKELY, UNCLOSED)


def _assemble(
    output: Path, cause: Cause, last: FlightRecord | None, footprint: int, limit: Limit, command: str, **known: Any
) -> PostMortem:
    """Return the verdict as a record; ``known`` are its fields about exit code and ranks."""
    checkpoint = None if is_finished(output) else newest_whole(output)
    return PostMortem(
        cause=cause.name,
        **{name: getattr(cause, name) for name in ("evidence", "title", "confidence", "is_memory", "advice")},
        phase=last.phase_label if last is not None else Phase.START.label,
        **vars(last.work if last is not None else NO_WORK),
        footprint_bytes=footprint,
        limit_bytes=limit.size_bytes,
        limit_name=limit.name,
        predicted_peak_bytes=last.predicted_peak_bytes if last else 0,
        mlx_active_bytes=last.active_bytes if last else 0,
        mlx_peak_bytes=last.peak_bytes if last else 0,
        loss=last.loss if last and math.isfinite(last.loss) else None,
        resumes_from_step=checkpoint.step if checkpoint else 0,
        next_command=command,
        ended_seconds=time.time(),
        **known,
    )


def reports_since(pattern: str, since_seconds: float, folder: Path) -> list[Path]:
    """macOS's reports since a wall-clock time, sorted by name, including those that it has moved to a subfolder."""
    found = []
    for path in folder.rglob(pattern):
        with contextlib.suppress(OSError):  # moved meanwhile
            if path.name[0] != "." and path.stat().st_mtime >= since_seconds:
                found.append(path)
    return sorted(found)


def killed_for_memory(
    pid: int, since_seconds: float, wait_seconds: float = 0.0, folder: Path = REPORTS
) -> tuple[str, ...]:
    """Describe each of macOS's reports of killing process ``pid`` for lack of memory.

    macOS writes the report seconds after the kill: ``wait_seconds`` is the time to wait for one.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        kills = []
        for path in reports_since("JetsamEvent-*.ips", since_seconds, folder):
            with contextlib.suppress(OSError):
                kills.append((path.name, jetsam_reason(path.read_text(encoding="utf-8", errors="replace"), pid)))
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
