"""Several ranks live and die together, and the one that ended the training is named.

The ranks are small Python programs here, which wait for each other with files where real ones exchange numbers.
"""

import signal
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.events import Event, Failed, Said
from safetrain.core.records.postmortem import PostMortem, describe
from safetrain.core.storage.paths import STACKS, rank_folder
from safetrain.guard.postmortem import explain
from safetrain.guard.process import Ending, WatchSettings
from safetrain.guard.ranks import free_ports
from safetrain.guard.supervisor import supervise

START = """
import json, os, signal, sys, time
from pathlib import Path
from safetrain.engine.child_process import set_up_child
from safetrain.core.events import Begun, EventPipe, Failed, Finished, Said
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.storage.paths import RECORDER
flight, pipe, rank = Path(sys.argv[1]), EventPipe(int(sys.argv[2])), int(os.environ["MLX_RANK"])
set_up_child(int(sys.argv[3]), flight, None)
recorder = Recorder(flight / RECORDER)
FINISHED = Finished(15)
GONE = Failed("EngineError", "Rank 1 is gone: the ranks cannot exchange numbers any more", 9)
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
def lost():
    recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(3))
    time.sleep(0.15)
    fail(GONE)
if rank == 0:
    pipe.send(Begun(15, 0, "training"))
"""
FLOOR = 0.4  # seconds; fifteen times that until the first record
ENDED_SECONDS = 5.0


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "flight").mkdir()
    return tmp_path


def run(output: Path, rank_0: str, rank_1: str, hang_seconds: float = 60.0, seen: list[Event] | None = None) -> Ending:
    """Supervise two ranks that run these programs."""
    program = f"{START}\nif rank == 0:\n{_indented(rank_0)}\nelse:\n{_indented(rank_1)}\n"
    guarding = WatchSettings(output / "flight", None, hang_seconds, (), ranks=2)
    events: list[Event] = [] if seen is None else seen
    return supervise([sys.executable, "-c", program], guarding, events.append)


def _indented(program: str) -> str:
    return "\n".join(f"    {line}" for line in program.strip().splitlines())


def told(output: Path, ending: Ending) -> PostMortem:
    return explain(output, ending, "dvc repro")


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


@pytest.mark.parametrize(("died", "number"), [(0, signal.SIGKILL), (1, signal.SIGSEGV)])
def test_the_death_of_one_ends_all_and_is_named(output: Path, died: int, number: signal.Signals) -> None:
    dies = f"gradient(0.1)\nrecorder.write(Phase.OPTIMIZER, Edge.BEFORE, Work(5))\nos.kill(os.getpid(), {number})"
    others = "recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(5))\ntime.sleep(60)"
    began = time.monotonic()
    ending = run(output, *((dies, others) if died == 0 else (others, dies)))
    assert time.monotonic() - began < ENDED_SECONDS
    assert (ending.rank, ending.return_code, ending.began) == (died, -number, True)
    found = told(output, ending)
    assert (found.rank, found.ranks, found.phase, found.step) == (died, 2, "optimizer", 5)
    assert f"rank {died} of 2, on this machine" in describe(found)
    assert found.cause == ("killed" if number == signal.SIGKILL else "crash")


def test_a_rank_that_ends_because_its_peer_has_gone_is_not_the_cause(output: Path) -> None:
    """Although it ends first: mlx closes connections before the process of the other is gone."""
    slow = "recorder.write(Phase.LOSS, Edge.BEFORE, Work(3))\ntime.sleep(0.5)\nos.abort()"
    ending = run(output, "lost()", slow)
    assert (ending.rank, ending.return_code) == (1, -signal.SIGABRT)
    assert told(output, ending).cause == "crash"


def test_what_one_rank_says_of_itself_is_kept(output: Path) -> None:
    full = 'fail(Failed("DiskFullError", "The disk is full.", 8))'
    ending = run(output, "lost()", full)
    assert (ending.rank, ending.return_code) == (1, 8)
    assert told(output, ending).cause == "disk_full"


def test_what_all_ranks_say_is_nobodys_fault(output: Path) -> None:
    """Rank 0 may take its time to write, and is let."""
    stop = 'fail(Failed("InterruptedRun", "Stopped at step 3", 130))'
    ending = run(output, f"time.sleep(2.5)\n{stop}", stop)
    assert (ending.rank, ending.return_code) == (None, 130)
    assert ending.failed == Failed("InterruptedRun", "Stopped at step 3", 130)


def test_a_rank_that_waits_for_a_hung_one_is_not_the_one_that_hangs(output: Path) -> None:
    hung = "for _ in range(3): gradient(0.01)\ndef here():\n    gradient(60)\nhere()"
    waits = "for _ in range(3): exchange(0.01)\nexchange(60)"
    for number, (rank_0, rank_1) in enumerate(((waits, hung), (hung, waits)), start=1):
        ending = run(output, rank_0, rank_1, FLOOR)
        assert (ending.ended_by_us, ending.rank) == ("hang", 2 - number)
        found = told(output, ending)
        assert (found.cause, found.phase, found.exit_code) == ("hang", "gradient", 124)
        assert "here" in (rank_folder(output / "flight", 2 - number) / STACKS).read_text()


def test_a_rank_may_wait_as_long_as_another_works(output: Path) -> None:
    work = "for step in range(20): gradient(0.1)\ngradient(0.01)\npipe.send(FINISHED)"
    ending = run(output, work, "for _ in range(3): exchange(0.01)\nexchange(2.0)", FLOOR)
    assert (ending.ended_by_us, ending.return_code, ending.finished is None) == ("", 0, False)


def test_an_exchange_that_never_ends_is_a_hang(output: Path) -> None:
    both = "for _ in range(3): exchange(0.01)\nexchange(60)"
    ending = run(output, both, both, FLOOR)
    assert (ending.ended_by_us, told(output, ending).phase) == ("hang", "exchange")


def test_a_signal_reaches_all_ranks(output: Path) -> None:
    both = """
signal.signal(signal.SIGTERM, told_on)
if rank == 1:
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(1.0)
"""
    seen: list[Event] = []
    ending = run(output, both, both, seen=seen)
    assert ending.signal_passed_on == signal.SIGTERM
    texts = {event.text for event in seen if isinstance(event, Said)}
    assert {"rank 0 told SIGTERM", "rank 1 told SIGTERM"} < texts
    assert any("stopping after this update" in text for text in texts)


def test_ports_are_free_and_different() -> None:
    assert len(set(free_ports(8))) == 8
