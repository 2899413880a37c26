"""Several ranks live and die together, here or started by mlx.launch, and the one that ended the training is named.

The ranks are small Python programs here, which wait where real ones exchange numbers.
"""

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
from safetrain.core.postmortem import PostMortem, describe
from safetrain.core.storage.paths import STACKS, rank_folder
from safetrain.guard.postmortem import explain
from safetrain.guard.process import Ending, WatchSettings
from safetrain.guard.supervisor import supervise
from stages.train import LAUNCHER
from tests.guard.programs import IMPORTS

START = IMPORTS + """
flight, rank, launched = Path(sys.argv[1]), int(os.environ["MLX_RANK"]), not sys.argv[2].isdecimal()
if launched:
    flight = rank_folder(flight, rank)
    flight.mkdir(exist_ok=True)
pipe = open_events(sys.argv[2], required=rank == 0 or not launched)
set_up_child(os.getppid() if launched else int(sys.argv[3]), flight, None)
recorder = Recorder(flight / RECORDER)
FINISHED = Finished(15)
def told_on(number, _frame):
    pipe.send(Said(f"rank {rank} told " + signal.Signals(number).name))
def exchange(seconds, step=3):
    with recorder.phase(Phase.EXCHANGE, Work(step)):
        time.sleep(seconds)
def gradient(seconds, step=3):
    with recorder.phase(Phase.GRADIENT, Work(step)):
        time.sleep(seconds)
def fail(failed):
    pipe.send(failed)
    os._exit(failed.exit_code)
def meet():
    folder = flight.parent if rank else flight
    (folder / f"met_{rank}").touch()
    while len(list(folder.glob("met_*"))) < 2:
        time.sleep(0.02)
def lost():
    meet()
    recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(3))
    time.sleep(0.15)
    fail(Failed("EngineError", "Rank 1 is gone: the ranks cannot exchange numbers any more", 9))
if rank == 0:
    pipe.send(Begun(15, 0, "training"))
"""  # fmt: skip
SUPERVISOR = """
import sys
from pathlib import Path
from safetrain.guard.process import WatchSettings
from safetrain.guard.supervisor import supervise
from stages.train import LAUNCHER
output = Path(sys.argv[1])
command, hosts = (sys.executable, "-c", sys.argv[2]), output / "hosts.json"
settings = WatchSettings(command, output / "flight", None, 60.0, (), ranks=2, hostfile=hosts, launcher=LAUNCHER)
supervise(settings, lambda event: print(event, flush=True))
"""
STOPPED = Failed("InterruptedRun", "Stopped at step 3", 143)
FLOOR = 1.0  # seconds without a record, which a quick phase may take on a busy machine
ENDED_SECONDS = 30.0


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "flight").mkdir()
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    return tmp_path


def run(
    output: Path, rank_0: str, rank_1: str, hang_seconds: float = 60.0, seen: list[Event] | None = None, *,
    launched: bool = False,
) -> Ending:  # fmt: skip
    """Supervise two ranks that run these programs."""
    for met in (output / "flight").glob("met_*"):
        met.unlink()
    parts = ("\n".join(f"    {line}" for line in program.strip().splitlines()) for program in (rank_0, rank_1))
    program = f"{START}\nif rank == 0:\n{next(parts)}\nelse:\n{next(parts)}\n"
    settings = WatchSettings(
        (sys.executable, "-c", program), output / "flight", None, hang_seconds, (),
        capped_by_kernel=not launched and sys.platform == "linux", ranks=2,
        hostfile=output / "hosts.json" if launched else None, launcher=LAUNCHER,
    )  # fmt: skip
    return supervise(settings, ([] if seen is None else seen).append)


def told(output: Path, ending: Ending) -> PostMortem:
    return explain(output, ending, "dvc repro")


def left(output: Path) -> list[int]:
    """Ranks and launchers of this test that still run."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline", "status"]))
    alive = (each for each in found if each["status"] != psutil.STATUS_ZOMBIE)
    return [each["pid"] for each in alive if any(str(output) in word for word in each["cmdline"] or ())]


def test_ranks_that_finish_are_one_training(output: Path) -> None:
    """Each knows the others' addresses, and its own place."""
    program = """
hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
pipe.send(Said(f"{rank} {len(hosts)} {len({place for host in hosts for place in host})} {flight.name}"))
"""
    seen: list[Event] = []
    ending = run(output, program + "time.sleep(0.3)\npipe.send(FINISHED)", program, seen=seen)
    assert ending.finished is not None
    assert (ending.return_code, ending.rank, ending.ranks, ending.ended_by_us) == (0, None, 2, "")
    assert {event.text for event in seen if isinstance(event, Said)} == {"0 2 2 flight", "1 2 2 rank_1"}
    seen.clear()
    ending = run(output, "pipe.send(Said(sys.argv[3]))\npipe.send(FINISHED)", "pass", seen=seen, launched=True)
    assert (ending.return_code, ending.rank, ending.ranks, ending.finished is None) == (0, None, 2, False)
    assert Said("0") in seen, "over a FIFO"
    assert not (output / "flight" / "events").exists()


@pytest.mark.parametrize(("died", "launched"), [(0, False), (1, False), (1, True)])
def test_the_death_of_one_ends_all_and_is_named(output: Path, died: int, launched: bool) -> None:
    dies = "gradient(0.1)\nrecorder.write(Phase.OPTIMIZER, Edge.BEFORE, Work(5))\nos.kill(os.getpid(), 9)"
    others = "recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(5))\ntime.sleep(60)"
    began = time.monotonic()
    ending = run(output, *((dies, others) if died == 0 else (others, dies)), launched=launched)
    assert time.monotonic() - began < ENDED_SECONDS
    assert (ending.rank, ending.return_code, ending.began) == (died, -signal.SIGKILL, True)
    found = told(output, ending)
    assert (found.cause, found.rank, found.ranks, found.phase) == ("killed", died, 2, "optimizer")
    machine = "127.0.0.1" if launched and died else "this machine"
    assert f"rank {died} of 2, on {machine}" in describe(found)
    assert left(output) == []


def test_a_rank_that_ends_because_its_peer_has_gone_is_not_the_cause(output: Path) -> None:
    """Although it ends first: mlx closes connections before the process of the other is gone."""
    slow = "meet()\nrecorder.write(Phase.LOSS, Edge.BEFORE, Work(3))\ntime.sleep(0.5)\nos.abort()"
    ending = run(output, "lost()", slow)
    assert (ending.rank, ending.return_code) == (1, -signal.SIGABRT)
    assert told(output, ending).cause == "crash"
    ending = run(output, "lost()", 'meet()\nfail(Failed("DiskFullError", "The disk is full.", 8))')
    assert (ending.rank, ending.return_code, told(output, ending).cause) == (1, 8, "disk_full")


def test_a_stop_reaches_a_launched_rank_0_which_may_take_its_time(output: Path) -> None:
    """mlx.launch tells the others as soon as one has ended. What all ranks say is nobody's fault."""
    rank_0 = f"""
def end(*_):
    time.sleep(2.5)
    fail({STOPPED!r})
signal.signal(signal.SIGTERM, end)
time.sleep(0.5)  # the supervisor reads twenty times a second who rank 0 is
os.kill({os.getpid()}, signal.SIGTERM)
time.sleep(60)
"""
    ending = run(output, rank_0, f"time.sleep(1.5)\nfail({STOPPED!r})", launched=True)
    assert (ending.signal_passed_on, ending.rank, ending.return_code) == (signal.SIGTERM, None, 143)
    assert ending.failed == STOPPED


def test_what_ends_a_rank_elsewhere_is_told_here(output: Path) -> None:
    """On its own machine it has no FIFO to the supervisor. Rank 0 waits for it in mlx, where no signal is looked at."""
    said = "meet()\nEventPipe(2, failures_only=True).send(Failed('EngineError', 'mac2 cannot be reached', 7))"
    began = time.monotonic()
    waits = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmeet()\nexchange(60)"
    ending = run(output, waits, f"{said}\nos._exit(7)", launched=True)
    assert time.monotonic() - began < ENDED_SECONDS
    assert (ending.rank, ending.return_code) == (1, 7)
    assert ending.failed == Failed("EngineError", "mac2 cannot be reached", 7)


def test_a_rank_may_wait_while_another_works_and_not_for_ever(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.guard.supervisor.STACKS_SECONDS", 0.4)
    hangs = "for _ in range(3): gradient(0.01)\ndef here():\n    gradient(60)\nhere()"
    ending = run(output, "for _ in range(3): exchange(0.01)\nexchange(60)", hangs, FLOOR)
    found = told(output, ending)
    assert (ending.ended_by_us, ending.rank) == ("hang", 1), "not the one that waits for it"
    assert (found.cause, found.phase, found.exit_code) == ("hang", "gradient", 124)
    assert "here" in (rank_folder(output / "flight", 1) / STACKS).read_text()
    work = "for step in range(15): gradient(0.1)\npipe.send(FINISHED)"
    ending = run(output, work, "for _ in range(3): exchange(0.01)\nexchange(1.5)", FLOOR)
    assert (ending.ended_by_us, ending.return_code, ending.finished is None) == ("", 0, False)
    both = "for _ in range(3): exchange(0.01)\nexchange(60)"
    ending = run(output, both, both, FLOOR)
    assert (ending.ended_by_us, told(output, ending).phase) == ("hang", "exchange")


def test_a_signal_reaches_all_ranks(output: Path) -> None:
    both = """
heard = []
signal.signal(signal.SIGTERM, lambda *signalled: (told_on(*signalled), heard.append(rank)))
meet()
if rank == 1:
    os.kill(os.getppid(), signal.SIGTERM)
while not heard:
    time.sleep(0.05)
time.sleep(0.5)  # the supervisor says what it does now
"""
    seen: list[Event] = []
    ending = run(output, both, both, seen=seen)
    assert ending.signal_passed_on == signal.SIGTERM
    texts = {event.text for event in seen if isinstance(event, Said)}
    assert {"rank 0 told SIGTERM", "rank 1 told SIGTERM"} < texts
    assert any("stopping after this update" in text for text in texts)


def test_a_killed_supervisor_leaves_nothing_launched(output: Path) -> None:
    program = f"{START}\npipe.send(Said('up'))\nexchange(60)"
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
