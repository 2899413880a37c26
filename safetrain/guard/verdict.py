"""Turns the evidence of a training run's end into one verdict: what happened, why, and how sure it is. Pure functions.

The rules are tried in order, the strongest evidence first.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM, Signals

from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.system import CRITICAL, OWN_LIMIT, WARNING
from safetrain.core.recorder import Edge, Phase
from safetrain.core.storage.paths import FLIGHT, STACKS, rank_folder
from safetrain.guard.process import Ending

NEAR_LIMIT = 0.95  # a process killed with this share of its limit ran out of memory (Ray's monitor warns there)
NEAR_CAP = 0.75  # the same for RLIMIT_DATA: the failed allocation itself is not in the readings
LITTLE_LEFT = 0.03  # share of the machine's memory; with less, it counts as full
LAST_LINES = 20  # lines of stderr that are evidence; earlier ones were not the reason
CHECK_DISK = "copy your files to another disk, and check this one: it may be failing"
SSH_FAILED = 255  # ssh(1), exit status
JOIN_TIMEOUT = re.compile(r"Timeout \(\d+:\d\d:\d\d\)!")  # faulthandler, armed where ranks join (engine/ranks.py)
CONFIRMED, LIKELY, UNSURE = "confirmed", "likely", "unsure"


@dataclass(frozen=True)
class Cause:
    """Why a training run ended."""

    name: str  # short and stable, for programs
    title: str
    confidence: str = CONFIRMED
    evidence: tuple[str, ...] = ()
    is_memory: bool = False
    advice: str = ""  # in addition to running the same command again


OUT_OF_MEMORY = "killed by the system: out of memory"
WATCHDOG = (
    "memory was not the cause: macOS ended GPU work that kept the screen waiting. Let the display sleep or "
    "work over SSH, and close other programs that use the GPU; a smaller train.batch_size makes each piece shorter"
)
SHORTER = "a smaller train.batch_size or train.max_seq_length makes each piece of GPU work shorter"
OTHER_PROGRAM = "run the same command again; if it happens again, close the program that used the GPU"
LARGER = "use fewer, larger buffers: a larger train.batch_size, or fewer adapted layers (lora.targets)"
BY_WATCHDOG, TOO_LONG = "the GPU watchdog ended it", "the GPU took too long for one piece of work"
MESSAGES = {  # pattern of a message from mlx, the driver or the C library: its cause, without evidence
    # The first four are Metal's names for how a command buffer failed (mlx raises or aborts with them).
    r"ImpactingInteractivity|Impacting Interactivity": Cause("gpu_watchdog", BY_WATCHDOG, advice=WATCHDOG),
    r"kIOGPUCommandBufferCallbackError(Timeout|Hang|SubmissionsIgnored)|GPU Timeout": Cause(
        "gpu_timeout", TOO_LONG, advice=SHORTER
    ),
    r"kIOGPUCommandBufferCallbackErrorInnocentVictim|victim of GPU error": Cause(
        "gpu_victim", "another program's GPU fault ended it too", advice=OTHER_PROGRAM
    ),
    # The watchdog's code before macOS 26 (mlx#1335, mlx-examples#664, #866)
    r"0000000e:Internal Error": Cause("gpu_watchdog", BY_WATCHDOG, LIKELY, advice=WATCHDOG),
    r"Resource limit \(\d+\)": Cause("resource_limit", "mlx ran out of buffer handles, not memory", advice=LARGER),
    # Messages of the allocators themselves, in an exception or an abort
    r"ErrorOutOfMemory|Insufficient Memory|\[malloc|\[metal::malloc\]|maximum allowed buffer size|cuda\w+\(.*"
    r"out of memory|std::bad_alloc|^[\w.]*MemoryError|Memory allocation (?:still )?failed": Cause(
        "out_of_memory", "out of memory", is_memory=True
    ),
    r"No space left on device|Disk quota exceeded": Cause(
        "disk_full", "the disk is full", advice="free some space first"
    ),
}
# Any program may print these for other reasons: they count only if memory readings agree.
MENTIONS_MEMORY = r"(?i:out of memory|unable to allocate|cannot allocate memory)"
# A thread or a library could not be loaded: under a limit on private memory, for lack of memory.
NO_ROOM = r"Resource temporarily unavailable|failed to map segment from shared object"


def judge(ending: Ending) -> Cause:
    """Return the verdict of the first rule that applies; if none does, the cause is unknown."""
    for rule in (_ended_by_us, _reported, _text_says, _killed, _crashed, _ssh_failed, _python_error):
        cause = rule(ending)
        if cause is not None:
            return cause
    code = ending.return_code
    return Cause("unknown", f"ended with exit code {code} and no result", UNSURE, ("nothing explains it",))


def _ended_by_us(ending: Ending) -> Cause | None:
    """Explain an end that the supervisor itself caused."""
    match ending.ended_by_us:
        case "hang":
            stacks = rank_folder(Path(FLIGHT), ending.rank or 0) / STACKS
            stacks_text = f"its stacks: {stacks}" if ending.stack.strip() else "it could not even write its stacks"
            waited = f"nothing was recorded for {ending.overdue_seconds:.0f} s"
            return Cause("hang", "it hung, and safetrain ended it", CONFIRMED, (waited, stacks_text, *_where(ending)))
        case "limit":
            passed = f"its memory exceeded {ending.limit.name}, {size_text(ending.limit.size_bytes)}"
            return Cause("memory_limit", "it used too much memory, and safetrain ended it", CONFIRMED, (passed,), True)
        case "orphan":
            return Cause("orphaned", "the program that started it was killed", CONFIRMED, ("its parent is gone",))
        case "second signal":
            return Cause("stopped", "a second signal (or Ctrl-C) stopped it at once", CONFIRMED, ("two signals came",))
    return None


def _reported(ending: Ending) -> Cause | None:
    """Use the reason that the training process reported."""
    failed = ending.failed
    if failed is None or failed.kind == "EngineError":
        return None
    first = (failed.message.splitlines()[0],)
    match failed.kind:
        case "InterruptedRun":
            by_hand = failed.exit_code == 128 + SIGINT
            by_whom = "the terminal was closed" if ending.signal_passed_on == SIGHUP else "SIGTERM stopped it"
            return Cause("stopped", "you stopped it with Ctrl-C" if by_hand else by_whom, CONFIRMED, first)
        case "BadUpdateError":
            return Cause("bad_update", "an update had bad numbers and was not applied", CONFIRMED, first)
        case "DiskFullError":
            return Cause("disk_full", "the disk is full", CONFIRMED, first, advice="free some space first")
        case "DiskError":
            where = tuple(failed.message.splitlines()[:2])
            return Cause("disk_error", "a file could not be read or written", CONFIRMED, where, advice=CHECK_DISK)
    return Cause("refused", "training cannot use this model, data or settings", CONFIRMED, first)


def _text_says(ending: Ending) -> Cause | None:
    """Search the last output of mlx or the driver: an exception, or on Metal the lines before an abort."""
    if ending.return_code == -SIGKILL:  # comes from outside, so the output says nothing about it
        return None
    failed = ending.failed
    last_lines = "\n".join(ending.stderr_tail.splitlines()[-LAST_LINES:])
    text = (failed.message if failed is not None else "") + "\n" + last_lines
    for pattern, cause in MESSAGES.items():
        if line := _line_with(pattern, text):
            return replace(cause, evidence=(line,))
    own = _line_with(MENTIONS_MEMORY, failed.message) if failed is not None else ""  # mlx's own exception
    line = own or (_line_with(MENTIONS_MEMORY, text) if _was_short_of_memory(ending) else "")
    line = line or (_line_with(NO_ROOM, text) if ending.limit.name == OWN_LIMIT else "")
    if line:
        evidence = (line, *_memory_readings(ending))
        return Cause("out_of_memory", "out of memory", CONFIRMED if own else LIKELY, evidence, True)
    if failed is not None:
        first, *rest = failed.message.splitlines()
        traceback = [line.strip() for line in rest if line.strip().startswith("traceback:")]
        return Cause("engine_error", "an error in mlx", CONFIRMED, (first, *traceback))
    return None


def _killed(ending: Ending) -> Cause | None:
    """Explain SIGKILL, which leaves no message, by the system's counters and reports, then by the memory in use."""
    last = ending.record
    if ending.return_code != -SIGKILL:
        return None
    readings, reports = _memory_readings(ending), ending.reports
    if ending.memory.oom_kills > 0:
        kills = counted(ending.memory.oom_kills, "kill")
        count = f"the kernel counted {kills} for lack of memory in this cgroup in the last seconds"
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, (count, *readings), True)
    if reports:
        return Cause("oom_kill", OUT_OF_MEMORY, CONFIRMED, (*reports, *readings), True)
    footprint = max(ending.memory.footprint_bytes, last.footprint_bytes if last else 0)
    critical = ending.memory.pressure_level >= CRITICAL
    if footprint >= NEAR_LIMIT * ending.limit.size_bytes or critical or _machine_was_empty(ending):
        had = f"it used {100 * footprint / ending.limit.size_bytes:.0f} % of {ending.limit.name}"
        return Cause("oom_kill", OUT_OF_MEMORY, LIKELY, (had, *readings), True)
    return Cause("killed", "killed from outside (SIGKILL); memory was not the cause", LIKELY, readings)


def _crashed(ending: Ending) -> Cause | None:
    """Explain a crash. mlx's CPU backend does not check allocations: a failed one ends in a segmentation fault."""
    readings = _memory_readings(ending)
    if ending.return_code >= 0:
        return None
    name, passed_on = _name_of(-ending.return_code), ending.signal_passed_on
    if -ending.return_code not in (SIGSEGV, SIGBUS, SIGABRT):
        number = passed_on if passed_on in (0, SIGINT) else SIGTERM
        if not ending.began and ending.return_code == -number:  # it came before the process could handle it
            early = f"{_name_of(passed_on)} came before the training began"
            return Cause("stopped", "it was stopped before it had anything to save", CONFIRMED, (early,))
        return Cause("killed", f"{name} ended it", CONFIRMED, readings)
    where = _where(ending)
    if _was_short_of_memory(ending):
        title = f"out of memory: an allocation failed ({name})"
        return Cause("allocation_failed", title, LIKELY, (*readings, *where), True)
    return Cause("crash", f"mlx or a library crashed ({name}); memory was not the cause", LIKELY, (*readings, *where))


def _ssh_failed(ending: Ending) -> Cause | None:
    """Explain an end with ssh's own exit code: mlx.launch hides ssh's message (LogLevel=QUIET)."""
    if not ending.host or ending.return_code != SSH_FAILED or ending.failed is not None:
        return None
    advice = f"run 'ssh {ending.host} true' to see why"
    return Cause("ssh", f"ssh to {ending.host} failed", LIKELY, (f"exit code {SSH_FAILED}",), advice=advice)


def _python_error(ending: Ending) -> Cause | None:
    lines = tuple(ending.stderr_tail.strip().splitlines())
    if ending.return_code <= 0 or not lines:
        return None
    if (timeout := next((line for line in lines if JOIN_TIMEOUT.match(line)), None)) is not None:
        advice = "check the addresses in hosts.json and the firewalls"
        return Cause("ranks_apart", "the ranks could not reach each other", LIKELY, (timeout,), advice=advice)
    return Cause("python_error", "an error in the program", CONFIRMED, lines[-1:], advice="the traceback is above")


def _expected_data_bytes(ending: Ending) -> int:
    """Estimate peak private memory: as measured or, if higher, at the phase's start plus mlx's predicted growth."""
    last = ending.record
    expected = 0
    if last is not None and last.edge is Edge.BEFORE and last.phase in (Phase.GRADIENT, Phase.BACKWARD, Phase.FORWARD):
        expected = last.data_bytes + max(0, last.predicted_peak_bytes - last.active_bytes)
    return max(ending.memory.data_bytes, last.data_bytes if last else 0, expected)


def _was_short_of_memory(ending: Ending) -> bool:
    """Whether readings explain a failed allocation: near our own limit, or almost no free memory on the machine."""
    limit = ending.limit
    near = limit.name == OWN_LIMIT and _expected_data_bytes(ending) >= NEAR_CAP * limit.size_bytes
    return near or _machine_was_empty(ending)


def _machine_was_empty(ending: Ending) -> bool:
    return 0 < ending.memory.available_bytes < LITTLE_LEFT * ending.total_memory_bytes


def _memory_readings(ending: Ending) -> tuple[str, ...]:
    memory = ending.memory
    readings = list[str]()
    if ending.limit.name == OWN_LIMIT:
        data = _expected_data_bytes(ending)
        readings.append(f"private memory {size_text(memory.data_bytes)}, {size_text(data)} expected in this phase")
    if memory.footprint_bytes:
        readings.append(f"lowest free memory of the machine in the last seconds: {size_text(memory.available_bytes)}")
    if memory.pressure_level >= WARNING:
        level = "critical" if memory.pressure_level >= CRITICAL else "warning"
        readings.append(f"macOS reported memory pressure ({level})")
    return tuple(readings)


def _where(ending: Ending) -> tuple[str, ...]:
    """Quote the innermost Python line of the stack."""
    places = [line.strip() for line in ending.stack.splitlines() if line.strip().startswith("File ")]
    return (f"Python was at {places[0].removeprefix('File ')}",) if places else ()


def _name_of(number: int) -> str:
    """Name a signal, e.g. SIGKILL; one without a name by its number."""
    return next((each.name for each in Signals if each == number), f"signal {number}")


def _line_with(pattern: str, text: str) -> str:
    """Return the first line that matches the pattern; empty if none does."""
    found = re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
    return found[0].strip()[:300] if found else ""
