"""The supervising process hears everything, ends what hangs, hands signals on, and leaves no process behind.

The supervised ones are small Python programs here, started as the training is.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from safetrain.core.events import Begun, Event, Failed, Finished, Said
from safetrain.core.recorder import NO_WORK, Edge, FlightRecord, Phase
from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.paths import STACKS
from safetrain.guard.process import (
    HANG_FIRST_TIME,
    HANG_TIMES_LONGEST,
    TAIL_BYTES,
    Ending,
    Heartbeat,
    MemoryReadings,
    Sampler,
    WatchSettings,
)
from safetrain.guard.supervisor import STOPPING, supervise
from tests.guard.programs import IMPORTS
from tests.support.chaos.project import wait_for

START = IMPORTS + """
flight, pipe = Path(sys.argv[1]), EventPipe(int(sys.argv[2]))
set_up_child(int(sys.argv[3]), flight, None)
recorder = Recorder(flight / RECORDER)
def told_on(number, _frame):
    pipe.send(Said("told " + signal.Signals(number).name))
"""  # fmt: skip
SUPERVISOR = """
import dataclasses, json, sys
from pathlib import Path
from safetrain.core.events import Said
from safetrain.guard.process import WatchSettings
from safetrain.guard.supervisor import supervise
def show(event):
    print(event.text if isinstance(event, Said) else type(event).__name__, flush=True)
ending = supervise(WatchSettings((sys.executable, "-c", sys.argv[2]), Path(sys.argv[1]), None, 60.0, ()), show)
print(json.dumps(dataclasses.asdict(ending)), flush=True)
"""
STARTER = """
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
process.wait()
"""
WORKING = """
pipe.send(Said(str(os.getpid())))
for _ in range(600):
    time.sleep(0.05)
"""
TELLING = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, told_on)\n"
Supervising = Callable[[str], "subprocess.Popen[str]"]
RECORD = StepRecord(1, 0.5, 1.25, None, 1e-4, 0.75, 900, 50.5, 2**33, 2**34, 1.5)


@pytest.fixture
def flight(tmp_path: Path) -> Path:
    folder = tmp_path / "flight"
    folder.mkdir()
    return folder


def run(
    program: str, flight: Path, hang_seconds: float = 60.0, show: Callable[[Event], None] = print, *,
    limit: int | None = None, locks: tuple[int, ...] = (),
) -> Ending:  # fmt: skip
    """Supervise ``program`` in this process; no kernel holds it to its limit, as on macOS."""
    command = (sys.executable, "-c", START + program)
    return supervise(WatchSettings(command, flight, limit, hang_seconds, locks, capped_by_kernel=False), show)


@pytest.fixture
def supervising(flight: Path) -> Iterator[Supervising]:
    """Supervises a program in a process of its own, whose output are the events' texts and then the ending."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SUPERVISOR, str(flight), START + program]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_from(process: "subprocess.Popen[str]") -> str:
    """The next line of the child; the supervisor's own word on a signal may come before or after it."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    return process.stdout.readline().strip() if line == STOPPING else line


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_events_arrive_in_order_and_the_result_is_kept(flight: Path, tmp_path: Path) -> None:
    """And the device stays locked while the training process lives: locks are inherited."""
    sent: list[Event] = [Begun(15, 4, "18 rows\nof text"), *[RECORD] * 3, Said("≥ 3 MiB"), Finished(15)]
    seen: list[Event] = []
    with (tmp_path / "lock").open("w") as lock:
        program = f"os.fstat({lock.fileno()})\nfor event in {sent!r}: pipe.send(event)"
        ending = run(program, flight, show=seen.append, locks=(lock.fileno(),))
    assert seen == sent
    assert (ending.return_code, ending.finished, ending.failed, ending.began) == (0, sent[-1], None, True)
    assert (ending.ended_by_us, ending.signal_passed_on, ending.memory.oom_kills) == ("", 0, 0)
    ending = run('pipe.send(Failed("ConfigError", "a\\nb", 2)); sys.exit(2)', flight)
    assert ending.failed == Failed("ConfigError", "a\nb", 2)
    assert (ending.return_code, ending.began, ending.finished) == (2, False, None)


def test_last_words_are_kept_and_a_flood_blocks_nobody(flight: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """10 MB without the end of a line; the last of it is kept."""
    flood = 'text = "x" * 10_000\nfor _ in range(1000): sys.stderr.write(text)\nsys.stderr.flush()\n'
    words = 'os.write(2, b"\\nto stderr\\n"); os.write(1, b"to stdout\\n"); os.write(2, b"no \\xff newline")'
    ending = run(f"{flood}{words}; os.abort()", flight)
    assert ending.return_code == -signal.SIGABRT
    assert ending.stderr_tail.endswith("x\nto stderr\nto stdout\nno � newline")
    assert TAIL_BYTES // 2 <= len(ending.stderr_tail) <= TAIL_BYTES
    shown = capfdbinary.readouterr().err
    assert len(shown) >= 9_900_000
    assert b"to stderr\nto stdout\nno \xff newline" in shown


def test_a_process_beyond_its_limit_is_asked_to_end_then_killed(flight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets go of what it holds; killed at once it may leave wired GPU memory (omlx#2184)."""
    # A signal is answered between two pieces.
    limit, taking = 100 * 2**20, "\nkept = [bytearray(2**20) for _ in range(200)]\ntime.sleep(60)"
    for handler, code, seconds in (("lambda n, f: sys.exit(143)", 143, 60.0), ("signal.SIG_IGN", -signal.SIGKILL, 0.5)):
        monkeypatch.setattr("safetrain.guard.supervisor.LIMIT_SECONDS", seconds)
        ending = run(f"signal.signal(signal.SIGTERM, {handler}){taking}", flight, limit=limit)
        assert (ending.ended_by_us, ending.return_code) == ("limit", code)
        assert ending.memory.footprint_bytes > limit
        assert 0 < ending.memory.available_bytes <= psutil.virtual_memory().total
        assert ending.limit.size_bytes == limit


def test_a_mac_is_kept_awake_for_the_training(flight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On mains power too."""
    caffeinate, asked = tmp_path / "caffeinate", tmp_path / "asked"
    caffeinate.write_text(f'#!/bin/sh\necho "$*" > "{asked}"\nexec sleep 60\n')
    caffeinate.chmod(0o755)
    monkeypatch.setattr("safetrain.guard.supervisor.CAFFEINATE", caffeinate)
    ending = run("time.sleep(0.5)", flight)
    assert ending.return_code == 0
    assert asked.read_text().split() == ["-i", "-w", str(ending.pid)]


def test_whoever_started_us_is_found_past_any_shell(tmp_path: Path) -> None:
    """dvc runs a stage with the person's own $SHELL."""
    (tmp_path / "fish").symlink_to("/bin/sh")
    program = "from safetrain.guard.supervisor import who_started_us; print(who_started_us().pid)"
    command = [str(tmp_path / "fish"), "-c", f"{shlex.join([sys.executable, '-c', program])}; true"]
    told = subprocess.check_output(command, env={**os.environ, "DVC_STAGE": "train"}, text=True)
    assert int(told) == os.getpid()


QUICK = """
for step in (1, 2):
    with recorder.phase(Phase.GRADIENT, Work(step)):
        time.sleep(0.01)
"""
HANG = """
def inner_place():
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(3))
    time.sleep(60)
inner_place()
"""
FLOOR = 1.0  # seconds without a record, which a quick phase may take on a busy machine


def test_a_hang_is_ended_with_its_stacks_or_killed(flight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.guard.supervisor.STACKS_SECONDS", 0.4)
    monkeypatch.setattr("safetrain.guard.supervisor.TERM_SECONDS", 0.5)
    ending = run(QUICK + HANG, flight, FLOOR)
    assert (ending.ended_by_us, ending.return_code) == ("hang", -signal.SIGTERM)
    assert ending.overdue_seconds >= FLOOR
    assert "inner_place" in (flight / STACKS).read_text()
    ending = run("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + QUICK + HANG, flight, FLOOR)
    assert (ending.ended_by_us, ending.return_code) == ("hang", -signal.SIGKILL)


def test_a_process_that_somebody_stops_and_lets_go_on_is_no_hang(flight: Path) -> None:
    """kill -STOP of the training process alone, and kill -CONT: the supervisor goes on looking."""
    ending = run(
        """
import subprocess
subprocess.Popen(["sh", "-c", f"while sleep 2; do kill -CONT {os.getpid()} || exit; done"])
for _ in range(3):
    with recorder.phase(Phase.GRADIENT, Work(1)):
        pass
began = time.monotonic()
os.kill(os.getpid(), signal.SIGSTOP)
pipe.send(Said(f"stopped for {time.monotonic() - began}"))
recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(2))
""",
        flight,
        FLOOR,
    )
    assert (ending.ended_by_us, ending.return_code) == ("", 0)


def test_ctrl_z_stops_the_training_too_and_nohup_keeps_it_from_a_closed_terminal(supervising: Supervising) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    try:
        process = supervising(WORKING.replace("600", "8"))
    finally:
        signal.signal(signal.SIGHUP, before)
    both = [psutil.Process(process.pid), psutil.Process(int(line_from(process)))]
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(each.status() == psutil.STATUS_STOPPED for each in both), "both stop")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGHUP)
    ending = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
    assert (ending["return_code"], ending["ended_by_us"], ending["signal_passed_on"]) == (0, "", 0)


def test_the_first_signal_is_passed_on_once_and_the_second_kills(supervising: Supervising) -> None:
    process = supervising(TELLING + WORKING)
    child = int(line_from(process))
    process.send_signal(signal.SIGINT)
    assert line_from(process) == "told SIGINT"
    process.send_signal(signal.SIGINT)  # at once: the same one, passed on by somebody else
    time.sleep(0.7)
    assert not is_gone(child)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    *said, line = output.splitlines()
    assert "told SIGINT" not in said  # the second is not passed on
    ending = json.loads(line)
    assert (ending["ended_by_us"], ending["return_code"]) == ("second signal", -signal.SIGKILL)
    assert ending["signal_passed_on"] == signal.SIGINT
    assert is_gone(child)


def test_a_killed_supervisor_leaves_no_process_behind(supervising: Supervising) -> None:
    process = supervising(WORKING)
    child = int(line_from(process))
    process.kill()
    wait_for(lambda: is_gone(child), "it ends")


def test_when_dvc_is_killed_the_training_is_asked_to_save_and_end(flight: Path) -> None:
    """Nobody would wait for its result; the supervising process still tells why."""
    program = "signal.signal(signal.SIGTERM, lambda n, f: (told_on(n, f), sys.exit(143)))\n" + WORKING
    command = [sys.executable, "-c", STARTER, SUPERVISOR, str(flight), START + program]
    environment = {**os.environ, "DVC_STAGE": "train"}
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert starter.stdout is not None
    child = int(line_from(starter))
    starter.kill()
    starter.wait()
    assert line_from(starter) == "told SIGTERM"
    ending = json.loads(line_from(starter))
    assert (ending["ended_by_us"], ending["return_code"]) == ("orphan", 143)
    wait_for(lambda: is_gone(child), "it ends")
    starter.stdout.close()


def test_nothing_is_left_after_an_ending(flight: Path) -> None:
    """No process, thread or open file: a long run may have many endings, one for each rung of the memory ladder."""
    threads = threading.active_count()
    assert is_gone(run("print(1)", flight).pid)
    wait_for(lambda: threading.active_count() == threads, "they end")
    command = [sys.executable, "-W", "error", "-c", SUPERVISOR, str(flight), START + "sys.exit(3)"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert json.loads(told.stdout.splitlines()[-1])["return_code"] == 3
    assert "ResourceWarning" not in told.stderr


LEAST, LONG = 10.0, 10.0**5
BEFORE, AFTER, GRADIENT, EVALUATE = Edge.BEFORE, Edge.AFTER, Phase.GRADIENT, Phase.EVALUATE
At = tuple[Phase, Edge, float]  # seconds ago
SLOW = [  # of 30 s and 2 s: the longest counts; of 40 s
    (GRADIENT, BEFORE, 100.0), (GRADIENT, AFTER, 70.0), (GRADIENT, BEFORE, 69.0), (GRADIENT, AFTER, 67.0),
    (EVALUATE, BEFORE, 66.0), (EVALUATE, AFTER, 26.0),
]  # fmt: skip
FAST = [(GRADIENT, BEFORE, 30.0), (GRADIENT, AFTER, 29.9)]


@pytest.mark.parametrize(("records", "forgiven", "after", "allowed", "overdue"), [
    ([*SLOW, (GRADIENT, BEFORE, 25)], [], [], 30 * HANG_TIMES_LONGEST, 0),
    ([*SLOW, (EVALUATE, BEFORE, 24)], [], [], 40 * HANG_TIMES_LONGEST, 0),
    ([*SLOW, (Phase.SAVE, BEFORE, 23)], [], [], HANG_FIRST_TIME * LEAST, 0),  # never seen
    ([*FAST, (GRADIENT, BEFORE, 0.9 * LEAST)], [], [], LEAST, 0),  # what is usually quick is given the floor
    ([*FAST, (GRADIENT, BEFORE, 1.1 * LEAST)], [], [], LEAST, 1.1 * LEAST),
    ([(Phase.SAVE, BEFORE, 10 * LONG), (Phase.WAIT, BEFORE, 9 * LONG)], [], [], None, 0),  # for room on the disk
    ([(Phase.WAIT, BEFORE, 9 * LONG)], [], [(Phase.WAIT, AFTER, LONG)], HANG_FIRST_TIME * LEAST, LONG),  # then nothing
    ([(GRADIENT, BEFORE, 9000)], [(6000, 3000), (4000, 2000)], [], HANG_FIRST_TIME * LEAST, 4000),
    # What the process records as Ctrl-Z comes is still in the ring when both go on.
    ([(GRADIENT, BEFORE, 9000), (GRADIENT, AFTER, 8999)], [(8998, 0)], [(GRADIENT, BEFORE, 8998.5)], LEAST, 0),
    # Ctrl-Z over lunch must not make a long phase look quick.
    ([(GRADIENT, BEFORE, 3600)], [(3600, 0)], [(GRADIENT, AFTER, -1), (GRADIENT, BEFORE, -2)],
     HANG_FIRST_TIME * LEAST, 0),
])  # fmt: skip
def test_deadlines_are_learnt_of_each_phase_apart_and_pauses_are_forgiven(
    records: list[At], forgiven: list[tuple[float, float]], after: list[At], allowed: float | None, overdue: float
) -> None:
    now, heartbeat = time.monotonic(), Heartbeat(LEAST)

    def feed(found: list[At]) -> None:
        heartbeat.feed(
            [FlightRecord(1, 0.0, now - ago, phase, edge, NO_WORK, 0, 0, 0, 0, 0, 0, 0.0) for phase, edge, ago in found]
        )

    feed(records)
    for start, stop in forgiven:
        heartbeat.forgive(now - start, now - stop)
    feed(after)
    assert heartbeat.allowed_seconds() == (None if allowed is None else pytest.approx(allowed))
    assert heartbeat.overdue_seconds() == pytest.approx(overdue, abs=5.0)


def test_what_was_seen_hours_ago_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    kills = iter((0, 0, 1, 1, 1))
    monkeypatch.setattr("safetrain.guard.process.oom_kills", lambda _groups: next(kills))
    seen, usual = Sampler(None), MemoryReadings(2, 3, 900, 1)
    assert seen.recent() == MemoryReadings()
    seen.keep(0.0, usual)
    seen.keep(1.0, MemoryReadings(80, 90, 1, 4))
    assert seen.recent() == MemoryReadings(80, 90, 1, 4, 1)
    seen.keep(3600.0, MemoryReadings(2, 3, 900, 1, 1))
    assert seen.recent() == MemoryReadings(2, 3, 900, 1, 0)
