"""Ranks that mlx.launch starts, here all on this machine: what is seen of them, and none outlives its supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from safetrain.core.events import Event, Failed, Said
from safetrain.core.records.postmortem import describe
from safetrain.guard.postmortem import explain
from safetrain.guard.process import Ending, WatchSettings
from safetrain.guard.supervisor import supervise
from stages.train import LAUNCHER

START = """
import json, os, signal, sys, time
from pathlib import Path
from safetrain.engine.child_process import set_up_child
from safetrain.core.events import Begun, Failed, Finished, Said, open_events
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.storage.paths import RECORDER, rank_folder
rank = int(os.environ["MLX_RANK"])
flight, pipe = rank_folder(Path(sys.argv[1]), rank), open_events(sys.argv[2], required=rank == 0)
flight.mkdir(exist_ok=True)
set_up_child(os.getppid(), flight, None)
recorder = Recorder(flight / RECORDER)
FINISHED = Finished(15)
def told_on(number, _frame):
    pipe.send(Said(f"rank {rank} told " + signal.Signals(number).name))
if rank == 0:
    pipe.send(Begun(15, 0, "training"))
"""
SUPERVISOR = """
import sys
from pathlib import Path
from safetrain.guard.process import WatchSettings
from safetrain.guard.supervisor import supervise
from stages.train import LAUNCHER
output = Path(sys.argv[1])
settings = WatchSettings(
    output / "flight", None, 60.0, (), ranks=2, hostfile=output / "hosts.json", launcher=LAUNCHER
)
supervise([sys.executable, "-c", sys.argv[2]], settings, lambda event: print(event, flush=True))
"""
WAITS = "recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(5))\ntime.sleep(60)"
ENDED_SECONDS = 6.0


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "flight").mkdir()
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    return tmp_path


def run(output: Path, rank_0: str, rank_1: str, seen: list[Event] | None = None) -> Ending:
    """Supervise two ranks that run these programs."""
    program = f"{START}\nif rank == 0:\n{_indented(rank_0)}\nelse:\n{_indented(rank_1)}\n"
    settings = WatchSettings(
        output / "flight", None, 60.0, (), capped_by_kernel=False, ranks=2, hostfile=output / "hosts.json",
        launcher=LAUNCHER,
    )  # fmt: skip
    events: list[Event] = [] if seen is None else seen
    return supervise([sys.executable, "-c", program], settings, events.append)


def _indented(program: str) -> str:
    return "\n".join(f"    {line}" for line in program.strip().splitlines())


def left(output: Path) -> list[int]:
    """Ranks and launchers of this test that still run."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline", "status"]))
    alive = (each for each in found if each["status"] != psutil.STATUS_ZOMBIE)
    return [each["pid"] for each in alive if any(str(output) in word for word in each["cmdline"] or ())]


def test_events_come_over_a_fifo_and_the_end_is_seen(output: Path) -> None:
    seen: list[Event] = []
    ending = run(output, "pipe.send(Said(sys.argv[3]))\npipe.send(FINISHED)", "pass", seen)
    assert (ending.return_code, ending.rank, ending.ranks) == (0, None, 2)
    assert ending.finished is not None
    assert Said("0") in seen
    assert not (output / "flight" / "events").exists()


@pytest.mark.parametrize("died", [0, 1])
def test_the_rank_that_died_is_named_and_none_is_left(output: Path, died: int) -> None:
    dies = "recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(5))\ntime.sleep(0.3)\nos.kill(os.getpid(), 9)"
    began = time.monotonic()
    ending = run(output, *((dies, WAITS) if died == 0 else (WAITS, dies)))
    assert time.monotonic() - began < ENDED_SECONDS
    assert (ending.rank, ending.return_code) == (died, -signal.SIGKILL)
    found = explain(output, ending, "dvc repro")
    assert (found.cause, found.phase) == ("killed", "gradient")
    assert f"rank {died} of 2, on {'this machine' if died == 0 else '127.0.0.1'}" in describe(found)
    assert left(output) == []


def test_a_stop_reaches_rank_0_which_may_take_its_time(output: Path) -> None:
    """mlx.launch tells the others as soon as one has ended."""
    stop = 'pipe.send(Failed("InterruptedRun", "Stopped at step 3", 143))\nos._exit(143)'
    rank_0 = f"""
def end(*_):
    time.sleep(2.5)
    pipe.send(Failed("InterruptedRun", "Stopped at step 3", 143))
    os._exit(143)
signal.signal(signal.SIGTERM, end)
os.kill({os.getpid()}, signal.SIGTERM)
time.sleep(60)
"""
    ending = run(output, rank_0, f"time.sleep(0.5)\n{stop}")
    assert (ending.signal_passed_on, ending.rank, ending.return_code) == (signal.SIGTERM, None, 143)
    assert ending.failed == Failed("InterruptedRun", "Stopped at step 3", 143)


def test_what_ends_a_rank_elsewhere_is_told_here(output: Path) -> None:
    """On its own machine it has no FIFO to the supervisor. Rank 0 waits for it in mlx, where no signal is looked at."""
    said = "from safetrain.core.events import EventPipe\ntime.sleep(0.5)\n"
    said += "EventPipe(2, failures_only=True).send(Failed('EngineError', 'mac2 cannot be reached', 7))\nos._exit(7)"
    began = time.monotonic()
    ending = run(output, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAITS}", said)
    assert time.monotonic() - began < ENDED_SECONDS
    assert (ending.rank, ending.return_code) == (1, 7)
    assert ending.failed == Failed("EngineError", "mac2 cannot be reached", 7)


def test_a_killed_supervisor_leaves_nothing(output: Path) -> None:
    program = f"{START}\npipe.send(Said('up'))\n{WAITS}"
    command = [sys.executable, "-c", SUPERVISOR, str(output), program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        up = 0
        while up < 2:
            up += "up" in process.stdout.readline()
        process.kill()
    deadline = time.monotonic() + ENDED_SECONDS
    while left(output):
        assert time.monotonic() < deadline, f"still there: {left(output)}"
        time.sleep(0.05)
