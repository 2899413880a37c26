"""Writes down why a training ended, for people and for the next run; also when nobody was left to watch it end."""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from safetrain.core.errors import EngineError
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory import macos
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.protocol.events import Finished
from safetrain.core.protocol.flight import NOTHING, Edge, FlightRecord, Phase, boot_id, read_flight
from safetrain.core.protocol.marker import RunMarker
from safetrain.core.records.postmortem import PostMortem, Replay
from safetrain.core.records.record_files import read_record, write_record
from safetrain.core.storage import paths
from safetrain.core.storage.checkpoint_files import Checkpoint, newest_whole
from safetrain.core.storage.files import write_text
from safetrain.core.storage.run_files import (
    DIED_JOB,
    FLIGHT,
    JOB,
    MARKER,
    POINTER,
    POSTMORTEM,
    RECORDER,
    STACKS,
    rank_folder,
)
from safetrain.guard.ending import Ending
from safetrain.guard.sampling import MACHINE, Limit
from safetrain.guard.verdict import CONFIRMED, LIKELY, OUT_OF_MEMORY, Cause, Evidence, judge

RESERVE, RESERVE_BYTES = "reserve", 128 * 1024  # on the disk, for a post-mortem when it is full
OF_ALL_RANKS = ("stopped", "bad_update", "orphaned")  # no single one is the cause
REPORT_SECONDS = 5.0  # that macOS takes to write down a kill


def open_marker(output: Path, again: str, hang_seconds: float = 0.0, limit: Limit | None = None) -> None:
    """Note that a training runs, and by which command. A marker that a later training finds means a sudden end."""
    (output / FLIGHT).mkdir(parents=True, exist_ok=True)
    (output / FLIGHT / RESERVE).write_bytes(b"\1" * RESERVE_BYTES)
    most = (limit.size_bytes, limit.name) if limit is not None else (0, "")
    marker = RunMarker(boot_id(), again, time.time(), time.monotonic(), os.getpid(), hang_seconds, *most)
    write_record(output / FLIGHT / MARKER, marker)


def close_marker(output: Path) -> None:
    """Note that the training has ended and is explained."""
    for name in (MARKER, RESERVE):
        (output / FLIGHT / name).unlink(missing_ok=True)


def explain(output: Path, ending: Ending, again: str, *, starts_over: bool = False) -> PostMortem:
    """The verdict on a training that ended badly, written to postmortem.json unless it was refused before it began.

    ``starts_over``: the next attempt begins anew, so no checkpoint counts.
    """
    evidence = evidence_of(rank_folder(output / FLIGHT, ending.rank or 0), ending)
    cause, last = judge(evidence), evidence.last
    footprint = max(ending.recent.peak_footprint_bytes, last.footprint_bytes if last else 0)
    if ending.limit.name == OWN_LIMIT:  # which counts private memory, resident or not
        footprint = max(ending.recent.peak_data_bytes, last.data_bytes if last else 0) or footprint
    found = _assemble(output, cause, last, footprint, ending.limit, again, exit_code_of(ending, cause))
    rank = None if cause.name in OF_ALL_RANKS else ending.rank
    found = dataclasses.replace(found, rank=rank, ranks=ending.ranks, host=ending.host)
    if starts_over:
        found = dataclasses.replace(found, resumes_from_step=0)
    if cause.name == "refused" and not ending.began:  # nothing has died: the last post-mortem is kept
        return found
    _keep_job(output)
    return _written(output, found)


def evidence_of(folder: Path, ending: Ending) -> Evidence:
    """What the process and the system have left behind, beside how it ended."""
    flight = read_flight(folder / RECORDER)
    last = flight[1][-1] if flight and flight[1] and flight[0].pid == ending.pid else None
    stacks = folder / STACKS
    stack = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    killed = ending.return_code == -signal.SIGKILL and not ending.ended_by_us
    wait = REPORT_SECONDS if killed else 0.0
    log = kernel_log(ending.pid, ending.started_seconds, ending.started_monotonic_seconds, wait)
    return Evidence(ending, last, psutil.virtual_memory().total, log, stack)


def explain_unclosed(output: Path, usual: str) -> PostMortem | None:
    """The verdict on a training that died together with its supervisor (reboot, panic, kill); None if there is none.

    The next command is the one that it was started with, or ``usual`` where that is not known.
    """
    marker = output / FLIGHT / MARKER
    if not marker.is_file():
        return None
    flight = read_flight(output / FLIGHT / RECORDER)
    last = flight[1][-1] if flight and flight[1] else None
    if is_finished(output) and last is not None and last.phase is Phase.FINISH:
        close_marker(output)  # everything was written, only the marker was left
        return None
    cause = _sudden_end(marker, _pids_of(output / FLIGHT))
    limit = Limit(psutil.virtual_memory().total, MACHINE)
    _keep_job(output)
    found = _assemble(
        output, cause, last, last.footprint_bytes if last else 0, limit, _started_by(marker) or usual, 137
    )
    close_marker(output)
    return _written(output, found)


def _started_by(marker: Path) -> str:
    try:
        return str(json.loads(marker.read_text(encoding="utf-8"))["command"])
    except (ValueError, KeyError, TypeError):
        return ""


def _pids_of(flight: Path) -> tuple[int, ...]:
    """Of the last training's ranks."""
    found = [read_flight(folder / RECORDER) for folder in (flight, *sorted(flight.glob("rank_*")))]
    return tuple(each[0].pid for each in found if each is not None)


def _sudden_end(marker: Path, pids: tuple[int, ...]) -> Cause:
    """Why a training (processes ``pids``) ended together with its supervisor, as far as the system tells."""
    try:
        value = json.loads(marker.read_text(encoding="utf-8"))
        booted, started = value["boot_id"] != boot_id(), float(value["started_seconds"])
        started_monotonic = float(value["started_monotonic_seconds"])
    except (ValueError, KeyError, TypeError):
        booted, started, started_monotonic = False, marker.stat().st_mtime, time.monotonic()
    panics = tuple(f"{path.name} was written since" for path in macos.reports_since("*.panic", started, macos.REPORTS))
    if panics:
        return Cause("panic", "the machine's kernel panicked", CONFIRMED, panics, quoted=panics)
    if booted:
        return Cause("reboot", "the machine was started anew, or lost power, in the middle of it", CONFIRMED, REBOOTED)
    if log := next((log for pid in pids if (log := kernel_log(pid, started, started_monotonic))), ()):
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, (*log, "its supervisor went with it"), True, quoted=log)
    return Cause("supervisor_killed", "its supervising process was killed, and it with it", LIKELY, UNCLOSED)


REBOOTED = ("the system's boot id is another one than when the training started",)
UNCLOSED = ("nobody has written down an end", "the system has not been started anew since")


def exit_code_of(ending: Ending, cause: Cause) -> int:
    """What the stage ends with: the child's own code, 128 plus a signal, 124 for a hang, 137 beyond a limit; never 0.

    Python ends with 1 for whatever it does not catch, a failed allocation too.
    """
    if ending.ended_by_us == "hang":
        return 124
    if ending.ended_by_us == "limit":  # whether it listened or not
        return 128 + signal.SIGKILL
    if ending.return_code < 0:
        return 128 - ending.return_code
    if cause.is_memory and ending.return_code == 1:
        return EngineError.exit_code
    return ending.return_code or 1


def read_postmortem(output: Path) -> PostMortem | None:
    """The last one; None if no training has ended badly here."""
    try:
        return read_record(output / POSTMORTEM, PostMortem)
    except (FileNotFoundError, ValueError, TypeError):
        return None


def add_replay(output: Path, found: PostMortem, replay: Replay) -> PostMortem:
    """Write the replay's result beside the verdict."""
    return _written(output, dataclasses.replace(found, replay=replay))


def advise(output: Path, found: PostMortem, advice: str, next_command: str | None) -> PostMortem:
    """Add advice to the verdict, and the next command; None keeps the one it has."""
    return _written(output, dataclasses.replace(found, advice=advice, next_command=next_command or found.next_command))


def goes_on(output: Path, found: PostMortem, change: str) -> PostMortem:
    """Add to the verdict that nobody has to do anything: the run goes on with this ``change``."""
    told = f"nothing: it went on by itself with {change}"
    return _written(output, dataclasses.replace(found, advice="", next_command=told, went_on=True))


def describe(found: PostMortem, *, with_next: bool = True) -> str:
    """The paragraph that people read."""
    lines = [("what", f"{found.title} ({found.confidence})"), ("where", _place(found))]
    if found.footprint_bytes:
        kind = "private memory" if found.limit_name == OWN_LIMIT else _processes(found)
        memory = f"{kind} {size_text(found.footprint_bytes)} of {size_text(found.limit_bytes)} ({found.limit_name})"
        if found.predicted_peak_bytes:
            predicted = size_text(found.predicted_peak_bytes)
            memory += f"; mlx {size_text(found.mlx_active_bytes)}, its predicted peak {predicted}"
        lines.append(("memory", memory))
    lines += [("because", text) for text in found.evidence]
    if found.replay is not None:
        lines.append(("replay", _replayed(found.replay)))
    kept = f"everything up to step {found.resumes_from_step}" if found.resumes_from_step else "no checkpoint yet"
    lines.append(("kept", kept))
    if found.advice:
        lines.append(("advice", found.advice))
    lines += [("next", found.next_command)] if with_next else []
    return "\n".join(f"  {label + ':':<10}{text}" for label, text in lines)


def kernel_log(
    pid: int, started_seconds: float, started_monotonic_seconds: float, wait_seconds: float = 0.0
) -> tuple[str, ...]:
    """Lines of the kernel's log, or macOS's reports, that say the system killed this process for memory.

    A report comes later than the end; ``wait_seconds`` is how long one is waited for.
    """
    if sys.platform == "darwin":
        return macos.killed_for_memory(pid, started_seconds, wait_seconds, macos.REPORTS)
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=False, errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    named = [line.strip() for line in log.splitlines() if f"Killed process {pid} " in line]
    return tuple(line for line in named if _seconds_of(line) >= started_monotonic_seconds - 1)[-1:]


def _seconds_of(line: str) -> float:
    """When a line of the kernel's log was written, in seconds since boot; -1 where it does not say.

    Process ids are reused: a line from before the training is about another process.
    """
    found = re.match(r"(?:<\d+>)?\[\s*([\d.]+)\]", line)
    return float(found[1]) if found else -1.0


def _assemble(
    output: Path, cause: Cause, last: FlightRecord | None, footprint: int, limit: Limit, again: str, exit_code: int
) -> PostMortem:
    whole, unread = (None, ()) if is_finished(output) else _newest(output)
    work = last.work if last is not None else NOTHING
    return PostMortem(
        cause=cause.name,
        title=cause.title,
        confidence=cause.confidence,
        is_memory=cause.is_memory,
        evidence=(*cause.evidence, *unread),
        advice=cause.advice,
        phase=_phase(last),
        **vars(work),
        footprint_bytes=footprint,
        limit_bytes=limit.size_bytes,
        limit_name=limit.name,
        predicted_peak_bytes=last.predicted_peak_bytes if last else 0,
        mlx_active_bytes=last.allocator.active_bytes if last else 0,
        mlx_peak_bytes=last.allocator.peak_bytes if last else 0,
        loss=last.loss if last and math.isfinite(last.loss) else None,
        resumes_from_step=whole.step if whole else 0,
        next_command=again,
        exit_code=exit_code,
        ended_seconds=time.time(),
        quoted=cause.quoted,
    )


def _newest(output: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint to continue from, or why the disk does not say: a failing disk must not prevent the verdict."""
    try:
        return newest_whole(output), ()
    except OSError as error:
        return None, (f"the checkpoints cannot be read: {error.strerror}",)


def is_finished(output: Path) -> bool:
    """Whether training_state.json says that its run is complete: nothing is continued then."""
    try:
        return bool(json.loads((output / POINTER).read_text(encoding="utf-8"))["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def completed(output: Path, ending: Ending) -> Finished | None:
    """What the process said at its end; if it died after marking its run as complete, what it would have said."""
    if ending.finished is not None or not ending.began or not is_finished(output):
        return ending.finished
    try:  # written before the mark, and removed when the run began
        value = json.loads((output / paths.SUMMARY.name).read_text(encoding="utf-8"))
        names = ("best_valid_loss", "best_step", "steps", "skipped_updates", "stopped_early", "base_valid_loss")
        return Finished(total_steps=value["steps"], **{name: value[name] for name in names})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_job(output: Path) -> None:
    """Keep the dead process's job for a replay: the next attempt overwrites it with its own."""
    job = output / FLIGHT / JOB
    with contextlib.suppress(OSError):  # none, or a disk that is full or fails
        (output / FLIGHT / DIED_JOB).unlink(missing_ok=True)  # of another death
        write_text(output / FLIGHT / DIED_JOB, job.read_text(encoding="utf-8"))


def _written(output: Path, found: PostMortem) -> PostMortem:
    """Write it down, on a full disk in the room kept for it; where even that fails, it is only printed."""
    with contextlib.suppress(OSError):
        (output / FLIGHT / RESERVE).unlink(missing_ok=True)
        write_record(output / POSTMORTEM, found)
    return found


def _phase(last: FlightRecord | None) -> str:
    if last is None:
        return "start"
    return last.phase.label if last.edge is Edge.BEFORE else f"after {last.phase.label}"


def _processes(found: PostMortem) -> str:
    return "process" if found.ranks == 1 else f"all {found.ranks} ranks"


def _place(found: PostMortem) -> str:
    text = found.phase + (f" of step {found.step}" if found.step else "")
    if found.rows:
        size = f"{counted(found.rows, 'row')}, {counted(found.tokens, 'token')}"
        text += f", micro-batch {found.micro_batch}: {size}"
    if found.row_ids:
        ids = ", ".join(map(str, found.row_ids)) + (", …" if found.rows > len(found.row_ids) else "")
        text += f" (train.jsonl {'line' if found.rows == 1 else 'lines'} {ids})"
    return text if found.rank is None else f"{rank_in_words(found)}; {text}"


def rank_in_words(found: PostMortem) -> str:
    """Which rank ended the training, and where it was."""
    return f"rank {found.rank} of {found.ranks}, on {found.host or 'this machine'}"


def _replayed(replay: Replay) -> str:
    if not replay.died_in:
        return "the same batch passes when it is computed alone"
    if not replay.largest_rows:
        return f"dies in {replay.died_in} ({replay.cause}); nothing smaller passes either"
    fits = f"{counted(replay.largest_rows, 'row')} of at most {counted(replay.largest_tokens, 'token')}"
    return f"dies in {replay.died_in} ({replay.cause}); the largest that passes: {fits}"
