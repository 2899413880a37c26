"""After the GPU watchdog a training goes on by itself: in shorter pieces, then with a patient driver; and says so."""

import json
import os
import sys
from pathlib import Path

import pytest

from safetrain.core.errors import RunDied
from safetrain.core.events import Event, Said
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.records.run_state import read_postmortem
from safetrain.core.records.settings import TrainJob
from safetrain.core.storage.files import read_record
from safetrain.core.storage.paths import FLIGHT, JOB, LADDER
from safetrain.guard.keep_going import keep_going
from safetrain.guard.ladder import GPU_RUNGS, PlannedUpdate, gpu_environment
from safetrain.guard.process import WatchSettings
from tests.guard.test_verdict import OLD_WATCHDOG, VICTIM, WATCHDOG
from tests.support.settings import SETTINGS
from tests.updates import worst_update

# Dies as Metal does (an abort with its words), unless a variable of its environment is set as it needs it.
CHILD = """
import os, sys
from pathlib import Path
from safetrain.engine.child_process import set_up_child
from safetrain.core.events import Begun, EventPipe, Finished
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.storage.paths import RECORDER
text, needed, flight = sys.argv[1], sys.argv[2], Path(sys.argv[3])
pipe = EventPipe(int(sys.argv[4]))
set_up_child(int(sys.argv[5]), flight, None)
pipe.send(Begun(15, 0, "training"))
Recorder(flight / RECORDER).write(Phase.GRADIENT, Edge.BEFORE, Work(3))
names = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT")
with (flight.parent / "tried").open("a") as file:
    print(*[os.environ.get(name, "-") for name in names], file=file)
if needed not in os.environ:
    print(text, file=sys.stderr, flush=True)
    os.abort()
pipe.send(Finished(15))
"""
NOTHING_HELPS = "SAFETRAIN_TEST_NO_SUCH_VARIABLE"


def train(output: Path, text: str, needed: str, said: list[str]) -> None:
    """Train with that child."""
    job = TrainJob("a model", SETTINGS, True, MemoryBudget(2**33), None)
    planned = PlannedUpdate("cuda", worst_update(64, 16))  # train does not look how much of its memory is free
    watch = WatchSettings((sys.executable, "-c", CHILD, text, needed), output / FLIGHT, None, 60.0, ())

    def show(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.text)

    keep_going(job, watch, planned, show)


def tried(output: Path) -> list[str]:
    """What each process was started with."""
    return (output / "tried").read_text().splitlines()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPU_RUNGS[-1][1]:
        monkeypatch.delenv(name, raising=False)


def test_what_a_person_has_set_stays() -> None:
    assert gpu_environment(1, {"MLX_MAX_OPS_PER_BUFFER": "2"}) == {"MLX_MAX_MB_PER_BUFFER": "20"}


@pytest.mark.parametrize("text", [WATCHDOG, OLD_WATCHDOG])
def test_a_run_goes_on_in_shorter_pieces(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    train(tmp_path, text, "MLX_MAX_OPS_PER_BUFFER", said)
    assert tried(tmp_path) == ["- - -", "4 20 -"]
    assert any("the GPU watchdog ended it" in line for line in said)
    assert any("continuing by itself with shorter pieces of GPU work" in line for line in said)
    (rung,) = read_record(tmp_path / FLIGHT / JOB, TrainJob).gpu_rungs  # from here the summary has it
    assert rung.startswith("step 3: the GPU watchdog ended it: shorter pieces")
    found = read_postmortem(tmp_path)
    assert found is not None
    assert (found.cause, found.is_memory) == ("gpu_watchdog", False)
    assert "the run continued by itself with shorter pieces" in found.next_command
    assert not (tmp_path / LADDER).exists()


def test_then_the_driver_waits_longer_and_then_it_is_for_a_person(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RunDied, match="GPU watchdog"):
        train(tmp_path, WATCHDOG, NOTHING_HELPS, said)
    assert tried(tmp_path) == ["- - -", "4 20 -", "4 20 1"]
    assert any("AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in line and "the screen" in line for line in said)
    assert len(json.loads((tmp_path / LADDER).read_text())["gpu_rungs"]) == 2


def test_an_unfinished_run_goes_on_as_it_was_last_tried(tmp_path: Path) -> None:
    with pytest.raises(RunDied):
        train(tmp_path, WATCHDOG, NOTHING_HELPS, [])
    (tmp_path / "tried").unlink()
    said: list[str] = []
    train(tmp_path, WATCHDOG, "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", said)
    assert tried(tmp_path) == ["4 20 1"]
    assert any("the GPU watchdog ended this run before" in line for line in said)
    assert not any("out of memory" in line for line in said)


def test_another_program_s_fault_is_no_reason_to_change_anything(tmp_path: Path) -> None:
    with pytest.raises(RunDied, match="another program"):
        train(tmp_path, VICTIM, NOTHING_HELPS, [])
    assert tried(tmp_path) == ["- - -"]
    assert os.environ.get("MLX_MAX_OPS_PER_BUFFER") is None
