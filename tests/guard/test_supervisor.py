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
from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.paths import STACKS
from safetrain.guard.process import TAIL_BYTES, Ending, WatchSettings
from safetrain.guard.supervisor import STOPPING, supervise
from tests.guard.programs import IMPORTS

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


def ending_of(process: "subprocess.Popen[str]") -> dict[str, object]:
    """The last line that a supervising process writes."""
    output, _ = process.communicate(timeout=20)
    return json.loads(output.splitlines()[-1])


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


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


def test_last_words_are_kept_and_shown_and_a_flood_blocks_nobody(
    flight: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
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


def test_a_process_beyond_its_limit_is_asked_to_end_and_then_killed(
    flight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of what it holds; killed at once it may leave wired GPU memory (omlx#2184)."""
    monkeypatch.setattr("safetrain.guard.supervisor.LIMIT_SECONDS", 0.5)
    limit, taking = 100 * 2**20, "\nkept = bytearray(200 * 2**20)\ntime.sleep(60)"
    for handler, code in (("lambda n, f: sys.exit(143)", 143), ("signal.SIG_IGN", -signal.SIGKILL)):
        ending = run(f"signal.signal(signal.SIGTERM, {handler}){taking}", flight, limit=limit)
        assert (ending.ended_by_us, ending.return_code) == ("limit", code)
        assert ending.memory.footprint_bytes > limit
        assert 0 < ending.memory.available_bytes <= psutil.virtual_memory().total
        assert ending.limit.size_bytes == limit


def test_a_mac_is_kept_awake_for_the_training_process(
    flight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
FLOOR = 0.3  # seconds; fifteen times that until the first record


def test_a_hang_is_ended_with_its_stacks_written_and_killed_if_it_does_not_listen(
    flight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
subprocess.Popen(["sh", "-c", f"while sleep 1; do kill -CONT {os.getpid()} || exit; done"])
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


def test_going_on_for_many_times_the_floor_or_waiting_for_room_on_the_disk_is_no_hang(flight: Path) -> None:
    """The second also where an earlier wait was short."""
    program = "for step in range(1, 10):\n    with recorder.phase(Phase.GRADIENT, Work(step)): time.sleep(0.1)\n"
    program += "for seconds in (0.01, 0.6):\n    with recorder.phase(Phase.WAIT, Work(3)): time.sleep(seconds)"
    ending = run(program, flight, FLOOR)
    assert (ending.ended_by_us, ending.return_code) == ("", 0)


def test_ctrl_z_stops_the_training_too_and_nohup_keeps_it_from_a_closed_terminal(supervising: Supervising) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    try:
        process = supervising(WORKING.replace("600", "8"))
    finally:
        signal.signal(signal.SIGHUP, before)
    both = [psutil.Process(process.pid), psutil.Process(int(line_from(process)))]
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: all(each.status() == psutil.STATUS_STOPPED for each in both))
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGHUP)
    ending = ending_of(process)
    assert (ending["return_code"], ending["ended_by_us"], ending["signal_passed_on"]) == (0, "", 0)


def test_a_closing_terminal_that_hangs_up_twice_still_lets_the_run_save(supervising: Supervising) -> None:
    process = supervising(TELLING + WORKING)
    child = int(line_from(process))
    process.send_signal(signal.SIGHUP)
    assert line_from(process) == "told SIGTERM"
    time.sleep(0.7)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert not is_gone(child)


def test_the_first_signal_is_passed_on_once_and_the_second_kills(supervising: Supervising) -> None:
    process = supervising(TELLING + WORKING)
    child = int(line_from(process))
    process.send_signal(signal.SIGINT)
    assert line_from(process) == "told SIGINT"
    process.send_signal(signal.SIGINT)  # at once: the same one, passed on by somebody else
    time.sleep(0.7)
    assert not is_gone(child)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    *said, line = output.splitlines()
    assert "told SIGINT" not in said  # the second is not passed on
    ending = json.loads(line)
    assert (ending["ended_by_us"], ending["return_code"]) == ("second signal", -signal.SIGKILL)
    assert ending["signal_passed_on"] == signal.SIGINT
    assert is_gone(child)


def test_a_process_that_is_asked_to_end_is_waited_for(supervising: Supervising) -> None:
    """It saves, says so, and has its own exit code."""
    program = """
def end(number, frame):
    told_on(number, frame)
    time.sleep(0.2)
    pipe.send(Failed("InterruptedRun", "Stopped at step 3", 143))
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
"""
    process = supervising(program + WORKING)
    assert int(line_from(process))
    process.send_signal(signal.SIGTERM)
    assert line_from(process) == "told SIGTERM"
    ending = ending_of(process)
    assert (ending["ended_by_us"], ending["return_code"]) == ("", 143)
    assert ending["failed"] == {"kind": "InterruptedRun", "message": "Stopped at step 3", "exit_code": 143}


def test_a_killed_supervisor_leaves_no_process_behind(supervising: Supervising) -> None:
    process = supervising(WORKING)
    child = int(line_from(process))
    process.kill()
    wait_for(lambda: is_gone(child), 2.0)


def test_a_process_whose_supervisor_was_gone_before_it_looked_ends_at_once(flight: Path) -> None:
    nobody = subprocess.Popen([sys.executable, "-c", ""])
    nobody.wait()
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", START + WORKING, str(flight), str(write_end), str(nobody.pid)]
    try:
        process = subprocess.run(command, pass_fds=(write_end,), timeout=10, check=False)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert process.returncode == -signal.SIGKILL


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
    wait_for(lambda: is_gone(child), 2.0)
    starter.stdout.close()


def test_nothing_is_left_after_an_ending(flight: Path) -> None:
    """No process, thread or open file: a long run may have many endings, one for each rung of the memory ladder."""
    threads = threading.active_count()
    assert is_gone(run("print(1)", flight).pid)
    wait_for(lambda: threading.active_count() == threads, 2.0)
    command = [sys.executable, "-W", "error", "-c", SUPERVISOR, str(flight), START + "sys.exit(3)"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert json.loads(told.stdout.splitlines()[-1])["return_code"] == 3
    assert "ResourceWarning" not in told.stderr
