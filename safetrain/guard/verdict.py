"""From the evidence of a training's end to one verdict: what, why, and how sure. A pure function.

The rules are tried in order, the strongest evidence first; their docstrings name facts and sources.
"""

import dataclasses
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.budget import OWN_LIMIT
from safetrain.core.memory.macos import CRITICAL, WARNING
from safetrain.core.protocol.flight import Edge, FlightRecord, Phase
from safetrain.core.storage.run_files import FLIGHT, STACKS, rank_folder
from safetrain.guard.ending import Ending

NEAR_LIMIT = 0.95  # a process that was killed with this share of its limit ran out of memory (as Ray's monitor warns)
NEAR_CAP = 0.75  # the same for RLIMIT_DATA: the failed allocation itself is not in what was seen
MUCH_STALLED = 10.0  # percent
LITTLE_LEFT = 0.03  # of the machine's memory
OWN_WORDS = (
    "BadUpdateError",
    "DiskFullError",
    "TrainingError",
    "MachineError",
)  # others may quote a row
LAST_LINES = 20  # of stderr are evidence: earlier ones were not the reason
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
CONFIRMED, LIKELY, UNSURE = "confirmed", "likely", "unsure"


@dataclass(frozen=True)
class Cause:
    """Why a training ended."""

    name: str  # short and stable, for programs
    title: str
    confidence: str
    evidence: tuple[str, ...]
    is_memory: bool = False
    advice: str = ""  # beyond running the same command again
    quoted: tuple[str, ...] = ()  # those lines of the evidence that are not our own words: they may quote anything


@dataclass(frozen=True)
class Evidence:
    """Everything a verdict is made from."""

    ending: Ending
    last: FlightRecord | None
    total_memory_bytes: int
    kernel_log: tuple[str, ...]  # lines of the kernel's or the system's log that name the process
    stack: str  # where Python was, as faulthandler wrote it


SSH_FAILED = 255  # ssh(1), exit status
NOBODY_CAME = re.compile(r"Timeout \(\d+:\d\d:\d\d\)!")  # faulthandler, armed where ranks join (engine/ranks.py)


@dataclass(frozen=True)
class TextRule:
    """A text of mlx, the driver or the C library, and its meaning."""

    pattern: re.Pattern[str]
    cause: Callable[[str], Cause]


def judge(evidence: Evidence) -> Cause:
    """The verdict of the first rule that applies; if none does, the cause is unknown."""
    for rule in (_ended_by_us, _said_so, _text_says, _killed, _crashed, _ssh_failed, _python_error):
        cause = rule(evidence)
        if cause is not None:
            return cause
    code = evidence.ending.return_code
    return Cause("unknown", f"ended with exit code {code} and no result", UNSURE, ("nothing explains it",))


def _ended_by_us(evidence: Evidence) -> Cause | None:
    """The supervisor knows why it ended the process."""
    ending = evidence.ending
    if ending.ended_by_us == "hang":
        waited = f"nothing was recorded for {ending.overdue_seconds:.0f} s"
        stacks = rank_folder(Path(FLIGHT), ending.rank or 0) / STACKS
        told = f"its stacks: {stacks}" if evidence.stack.strip() else "it could not even write its stacks"
        stack = (told, *_where(evidence))
        return Cause("hang", "it hung and was ended", CONFIRMED, (waited, *stack))
    if ending.ended_by_us == "limit":
        evidence_text = f"its memory passed {ending.limit.name}, {size_text(ending.limit.size_bytes)}"
        return Cause(
            "memory_limit", "it took more memory than allowed and was ended", CONFIRMED, (evidence_text,), True
        )
    if ending.ended_by_us == "orphan":
        return Cause(
            "orphaned", "the program that ran it (dvc) was killed, so it ended", CONFIRMED, ("its parent is gone",)
        )
    if ending.ended_by_us == "second signal":
        return Cause("stopped", "it was ended at once by a second signal", CONFIRMED, ("two signals came",))
    return None


def _said_so(evidence: Evidence) -> Cause | None:
    """The training ended itself and told the reason."""
    failed = evidence.ending.failed
    if failed is None or failed.kind == "EngineError":
        return None
    first = failed.message.splitlines()[0]
    if failed.kind == "InterruptedRun":
        name = _name_of(failed.exit_code - 128)
        return Cause("stopped", f"it was asked to stop ({name})", CONFIRMED, (first,))
    if failed.kind == "BadUpdateError":
        return Cause("bad_update", "an update's numbers were wrong and were not applied", CONFIRMED, (first,))
    if failed.kind == "DiskFullError":
        return Cause("disk_full", "the disk is full", CONFIRMED, (first,), advice="free some space first")
    quoted = () if failed.kind in OWN_WORDS else (first,)
    return Cause("refused", "it could not train with what it was given", CONFIRMED, (first,), quoted=quoted)


def _text_says(evidence: Evidence) -> Cause | None:
    """What mlx or the driver wrote before the end; it can be an exception or, on Metal, the last words of an abort."""
    failed = evidence.ending.failed
    if evidence.ending.return_code == -signal.SIGKILL:  # a SIGKILL has nothing to do with what it said
        return None
    last = "\n".join(evidence.ending.stderr_tail.splitlines()[-LAST_LINES:])
    said = (failed.message if failed is not None else "") + "\n" + last
    for rule in TEXT_RULES:
        found = rule.pattern.search(said)
        if found is not None:
            line = _line_around(said, found.start())
            return dataclasses.replace(rule.cause(line), quoted=(line,))
    for text, what in NO_ROOM if evidence.ending.limit.name == OWN_LIMIT else ():
        place = said.find(text)
        if place >= 0:
            line = _line_around(said, place)
            told = (line, *_memory_seen(evidence))
            return Cause("allocation_failed", f"out of memory: {what}", LIKELY, told, True, quoted=(line,))
    if failed is not None:
        first, *rest = failed.message.splitlines()
        kept = [line.strip() for line in rest if line.strip().startswith("traceback:")]
        return Cause("engine_error", "mlx gave up", CONFIRMED, (first, *kept), quoted=(first,))
    return None


def _killed(evidence: Evidence) -> Cause | None:
    """SIGKILL leaves no words: the kernel's counters and logs, then how much memory there was."""
    ending, last = evidence.ending, evidence.last
    if ending.return_code != -signal.SIGKILL:
        return None
    if ending.oom_kills > 0:
        kills = counted(ending.oom_kills, "kill")
        told = f"the kernel counted {kills} for lack of memory in this memory group in its last seconds"
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, (told, *_memory_seen(evidence)), True)
    if evidence.kernel_log:
        told_by_kernel = (*evidence.kernel_log, *_memory_seen(evidence))
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, told_by_kernel, True, quoted=evidence.kernel_log)
    footprint = max(ending.last.footprint_bytes if ending.last else 0, last.footprint_bytes if last else 0)
    critical = ending.recent.most_pressure_level >= CRITICAL
    if footprint >= NEAR_LIMIT * ending.limit.size_bytes or critical or _machine_was_empty(evidence):
        had = f"it had {100 * footprint / ending.limit.size_bytes:.0f} % of {ending.limit.name}"
        return Cause("oom_kill", OUT_OF_MEMORY, LIKELY, (had, *_memory_seen(evidence)), True)
    return Cause("killed", "somebody or something killed it (SIGKILL); not for memory", LIKELY, _memory_seen(evidence))


def _crashed(evidence: Evidence) -> Cause | None:
    """mlx's CPU backend does not look whether an allocation succeeded: out of memory is then a segfault (measured)."""
    ending = evidence.ending
    if -ending.return_code not in CRASHES:
        if not ending.began and ending.return_code == -_as_passed_on(
            ending.signal_passed_on
        ):  # it came before the process could handle it
            asked = f"{_name_of(ending.signal_passed_on)} came before the training had begun"
            return Cause("stopped", "it was asked to stop, with nothing to save yet", CONFIRMED, (asked,))
        if ending.return_code < 0:
            name = _name_of(-ending.return_code)
            return Cause("killed", f"it was ended by {name}", CONFIRMED, _memory_seen(evidence))
        return None
    name = signal.Signals(-ending.return_code).name
    where = _where(evidence)
    near_cap = _expected_data_bytes(evidence) >= NEAR_CAP * ending.limit.size_bytes
    if (near_cap and ending.limit.name == OWN_LIMIT) or _machine_was_empty(evidence):
        title = f"out of memory: an allocation failed ({name})"
        return Cause("allocation_failed", title, LIKELY, (*_memory_seen(evidence), *where), True)
    title = f"mlx or a library crashed ({name}), with memory to spare"
    advice = "safetrain diagnose --auto says whether the same batch crashes again"
    return Cause("crash", title, LIKELY, (*_memory_seen(evidence), *where), advice=advice)


def _ssh_failed(evidence: Evidence) -> Cause | None:
    """ssh's own exit code; what it says is kept back by mlx.launch (LogLevel=QUIET)."""
    ending = evidence.ending
    if not ending.host or ending.return_code != SSH_FAILED or ending.failed is not None:
        return None
    advice = f"ssh {ending.host} true says why; safetrain preflight asks every machine of train.hostfile"
    told = (f"ssh ended with exit code {SSH_FAILED}",)
    title = f"{ending.host} cannot be reached by ssh, or the connection was lost"
    return Cause("ssh", title, LIKELY, told, advice=advice)


def _python_error(evidence: Evidence) -> Cause | None:
    lines = tuple(evidence.ending.stderr_tail.strip().splitlines())
    if evidence.ending.return_code <= 0 or not lines:
        return None
    if (told := next((line for line in lines if NOBODY_CAME.match(line)), None)) is not None:
        advice = "see the addresses in train.hostfile and the firewalls; safetrain preflight asks every machine"
        return Cause("ranks_apart", "the ranks did not reach each other", LIKELY, (told,), advice=advice)
    advice = "the traceback is above"
    return Cause("python_error", "an error in the program", CONFIRMED, lines[-1:], advice=advice, quoted=lines[-1:])


def _expected_data_bytes(evidence: Evidence) -> int:
    """The most private memory: as seen, or as at the phase's beginning plus what mlx was predicted to add."""
    ending, last = evidence.ending, evidence.last
    expected = 0
    if last is not None and last.edge is Edge.BEFORE and last.phase in (Phase.GRADIENT, Phase.BACKWARD, Phase.FORWARD):
        expected = last.data_bytes + max(0, last.predicted_peak_bytes - last.allocator.active_bytes)
    return max(ending.recent.peak_data_bytes, last.data_bytes if last else 0, expected)


def _machine_was_empty(evidence: Evidence) -> bool:
    return 0 < evidence.ending.recent.least_available_bytes < LITTLE_LEFT * evidence.total_memory_bytes


def _memory_seen(evidence: Evidence) -> tuple[str, ...]:
    ending, recent = evidence.ending, evidence.ending.recent
    seen = list[str]()
    if ending.limit.name == OWN_LIMIT:
        data = _expected_data_bytes(evidence)
        seen.append(f"private memory {size_text(recent.peak_data_bytes)}, {size_text(data)} expected in this phase")
    if ending.last is not None:
        seen.append(f"the machine had {size_text(recent.least_available_bytes)} left at the least in its last seconds")
    if recent.most_stalled_percent >= MUCH_STALLED:
        seen.append(f"processes waited for memory {recent.most_stalled_percent:.0f} % of ten seconds")
    if recent.most_pressure_level >= WARNING:
        level = "critical" if recent.most_pressure_level >= CRITICAL else "warning"
        seen.append(f"macOS reported memory pressure ({level})")
    if recent.peak_vram_bytes:
        seen.append(f"GPU memory in use: {size_text(recent.peak_vram_bytes)} at the most")
    return tuple(seen)


def _as_passed_on(number: int) -> int:
    """The signal that the supervisor sends for one that it received."""
    return number if number in (0, signal.SIGINT) else signal.SIGTERM


def _where(evidence: Evidence) -> tuple[str, ...]:
    """The innermost line of Python."""
    places = [line.strip() for line in evidence.stack.splitlines() if line.strip().startswith("File ")]
    return (f"Python was at {places[0].removeprefix('File ')}",) if places else ()


def _name_of(number: int) -> str:
    """SIGKILL, or its number where it has no name."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def _line_around(text: str, place: int) -> str:
    start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
    return text[start : end if end >= 0 else len(text)].strip()[:300]


NO_ROOM = (  # what is said under a limit of private memory, and may mean something else without one
    ("Resource temporarily unavailable", "a thread could not be started"),  # its stack is private memory too
    ("failed to map segment from shared object", "a library could not be loaded"),
)
OUT_OF_MEMORY = "killed by the system: out of memory"
WATCHDOG = (
    "this is not memory: macOS ended GPU work that kept the screen waiting. Let the display sleep or use another "
    "machine's screen, and close programs that draw; a smaller train.batch_size makes each piece shorter"
)
TEXT_RULES = (  # the first five are Metal's names for how a command buffer failed (mlx raises or aborts with them)
    TextRule(
        re.compile(r"ImpactingInteractivity|Impacting Interactivity"),
        lambda line: Cause("gpu_watchdog", "the GPU watchdog ended it", CONFIRMED, (line,), advice=WATCHDOG),
    ),
    TextRule(
        re.compile(r"kIOGPUCommandBufferCallbackErrorTimeout|GPU Timeout|kIOGPUCommandBufferCallbackErrorHang"),
        lambda line: Cause(
            "gpu_timeout", "the GPU took too long for one piece of work", CONFIRMED, (line,),
            advice="a smaller train.batch_size or train.max_seq_length makes each piece shorter",
        ),
    ),
    TextRule(
        re.compile(r"kIOGPUCommandBufferCallbackErrorInnocentVictim|victim of GPU error"),
        lambda line: Cause(
            "gpu_victim", "another program's fault on the GPU ended it too", CONFIRMED, (line,),
            advice="run the same command again; close the program that used the GPU if that happens once more",
        ),
    ),
    TextRule(  # what macOS before 26 calls the watchdog's code (mlx#1335, mlx-examples#664, #866)
        re.compile(r"0000000e:Internal Error"),
        lambda line: Cause("gpu_watchdog", "the GPU watchdog ended it", LIKELY, (line,), advice=WATCHDOG),
    ),
    TextRule(
        re.compile(r"Resource limit \(\d+\)"),
        lambda line: Cause(
            "resource_limit", "mlx ran out of buffer handles, not of bytes", CONFIRMED, (line,),
            advice="fewer, larger pieces: a larger train.batch_size, or fewer adapted layers (lora.targets)",
        ),
    ),
    TextRule(
        re.compile(
            r"ErrorOutOfMemory|Insufficient Memory|out of memory|Unable to allocate|maximum allowed buffer size"
            r"|std::bad_alloc|MemoryError|Cannot allocate memory|Memory allocation (still )?failed",
            re.IGNORECASE,
        ),
        lambda line: Cause("out_of_memory", "out of memory", CONFIRMED, (line,), True),
    ),
    TextRule(
        re.compile(r"No space left on device|Disk quota exceeded"),
        lambda line: Cause("disk_full", "the disk is full", CONFIRMED, (line,), advice="free some space first"),
    ),
)  # fmt: skip
