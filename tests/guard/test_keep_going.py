"""After running out of memory a training goes on with less at a time, after the GPU watchdog in shorter pieces."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import RunDied
from safetrain.core.events import Event, Said
from safetrain.core.formatting import RUN
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.records.run_state import read_postmortem
from safetrain.core.records.settings import LoraSettings, TrainJob
from safetrain.core.storage.files import read_record
from safetrain.core.storage.paths import ERROR, FLIGHT, JOB, LADDER
from safetrain.guard.keep_going import GPU_RUNGS, PlannedUpdate, gpu_environment, keep_going
from safetrain.guard.process import WatchSettings
from tests.conftest import EMBEDDED
from tests.guard.programs import IMPORTS
from tests.guard.test_verdict import OLD_WATCHDOG, VICTIM, WATCHDOG
from tests.support.settings import SETTINGS as USUAL
from tests.updates import worst_update

pytestmark = pytest.mark.usefixtures("own_cache")

ROW_TOKENS = 60  # that each row feeds
SETTINGS = dataclasses.replace(
    USUAL, batch_size=16, gradient_accumulation=1, max_seq_length=512,
    lora=LoraSettings(8, 2.0, 0.0, 6, ("all-linear",)),
)  # fmt: skip
START = IMPORTS + """
most_rows, row_tokens, flight = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rank, output = int(os.environ.get("MLX_RANK", 0)), flight.parent.parent if "rank_" in flight.name else flight.parent
pipe, settings = EventPipe(int(sys.argv[4])), read_record(output / "flight" / JOB, TrainJob).settings
set_up_child(int(sys.argv[5]), flight, None)
rows = settings.batch_size * 64 // row_tokens
recorder = Recorder(flight / RECORDER)
recorder.predicted_peak_bytes, recorder.read_allocator = 2**20 * rows, lambda: (20 * 2**20, 0, 0)
def compute():
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(3, 0, rows, rows * row_tokens))
    if rows > most_rows:
        print("std::bad_alloc", file=sys.stderr, flush=True)
        os.abort()
def begin():
    pipe.send(Begun(15, 0, "training"))
    (output / "tried").open("a").write(f"{settings.batch_size}\\n")
"""  # fmt: skip
# Fills a micro-batch as the engine does, by a bound on tokens; dies of an allocation beyond so many rows.
CHILD = START + "begin()\ncompute()\npipe.send(Finished(15))"
# Of two ranks the second runs out of memory; the first waits for it.
TWO = f"""{START}
if rank:
    compute()
else:
    begin()
    recorder.write(Phase.EXCHANGE, Edge.BEFORE, Work(3))
    time.sleep(60 if rows > most_rows else 0)
    pipe.send(Finished(15))
"""
# The real training process, whose training ends so.
FAILING = """
import sys
from safetrain.core.errors import BadUpdateError, EngineError
from safetrain.engine import worker
def mlx_fails(*_):
    try:
        raise RuntimeError("[matmul] bad shape")
    except RuntimeError as error:
        raise EngineError("mlx failed at step 3") from error
def diverges(*_):
    raise BadUpdateError("Update 3 was not applied: the loss is not a number.")
worker._train = globals()[sys.argv.pop(1)]
sys.exit(worker.main(sys.argv[1:]))
"""
# Dies as Metal does (an abort with its words), unless a variable of its environment is set as it needs it.
ON_METAL = IMPORTS + """
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
"""  # fmt: skip
NOTHING_HELPS = "SAFETRAIN_TEST_NO_SUCH_VARIABLE"


def train(output: Path, most_rows: int, **changed: Any) -> list[str]:
    """Train with that child; the sizes of the micro-batches that were tried."""
    (output / "tried").unlink(missing_ok=True)
    keep(output, (CHILD, str(most_rows), str(ROW_TOKENS)), 1, **changed)
    return (output / "tried").read_text().split()


def keep(output: Path, program: tuple[str, ...], ranks: int = 1, *, backend: str = "cpu", **changed: Any) -> list[str]:
    """Keep a program going; what was said meanwhile."""
    settings = dataclasses.replace(SETTINGS, **changed)
    job = TrainJob(str(EMBEDDED), settings, True, MemoryBudget(2**33), None, ranks=ranks)
    planned = PlannedUpdate(backend, worst_update(ROW_TOKENS + 1, settings.rows_per_update), is_quantized=True)
    watch = WatchSettings((sys.executable, "-c", *program), output / FLIGHT, None, 60.0, (), ranks=ranks)

    said = list[str]()

    def show(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.text)

    keep_going(job, watch, planned, show)
    return said


@pytest.mark.parametrize("longest", [512, 64])
def test_no_rung_is_passed_over_where_rows_are_shorter_than_they_may_be(tmp_path: Path, longest: int) -> None:
    """16 rows of 61 tokens died; 8 of them are half of that, whatever train.max_seq_length is."""
    assert train(tmp_path, 5, max_seq_length=longest) == ["16", "8", "4"]


def test_when_one_rank_runs_out_of_memory_all_go_on_with_less(tmp_path: Path) -> None:
    keep(tmp_path, (TWO, "5", str(ROW_TOKENS)), ranks=2)
    assert (tmp_path / "tried").read_text().split() == ["16", "8", "4"]
    found = read_postmortem(tmp_path)
    assert found is not None
    assert (found.rank, found.ranks, found.phase, found.went_on) == (1, 2, "gradient", True)


def test_what_mlx_said_is_kept_whole(tmp_path: Path) -> None:
    stale = tmp_path / FLIGHT / ERROR
    stale.parent.mkdir()
    stale.write_text("of a training before")
    with pytest.raises(RunDied, match="mlx gave up") as caught:
        keep(tmp_path, (FAILING, "mlx_fails"))
    assert f"because:  traceback: {stale}" in str(caught.value)
    assert "RuntimeError: [matmul] bad shape" in stale.read_text()
    train(tmp_path, 99)
    assert not stale.exists()


def test_after_a_bad_update_the_advice_comes_before_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN, "safetrain run experiment=minimal train.num_epochs=9")
    with pytest.raises(RunDied, match="Update 3 was not applied") as caught:
        keep(tmp_path, (FAILING, "diverges"))
    found = read_postmortem(tmp_path)
    assert found is not None
    assert found.next_command == "safetrain run experiment=minimal train.num_epochs=9"
    assert "the same command stops here again" in found.advice
    assert (found.cause, caught.value.exit_code) == ("bad_update", 7)


def on_metal(output: Path, text: str, needed: str) -> list[str]:
    """Train with that child; of what backend is no matter, but that the host's free memory is not asked."""
    return keep(output, (ON_METAL, text, needed), backend="cuda")


def tried(output: Path) -> list[str]:
    """What each process was started with."""
    return (output / "tried").read_text().splitlines()


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPU_RUNGS[-1][1]:
        monkeypatch.delenv(name, raising=False)


def test_what_a_person_has_set_stays() -> None:
    assert gpu_environment(1, {"MLX_MAX_OPS_PER_BUFFER": "2"}) == {"MLX_MAX_MB_PER_BUFFER": "20"}


@pytest.mark.usefixtures("nothing_set")
def test_after_the_gpu_watchdog_a_run_goes_on_in_shorter_pieces(tmp_path: Path) -> None:
    said = on_metal(tmp_path, OLD_WATCHDOG, "MLX_MAX_OPS_PER_BUFFER")
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


@pytest.mark.usefixtures("nothing_set")
def test_then_the_driver_waits_longer_and_then_it_is_for_a_person(tmp_path: Path) -> None:
    """The same command goes on as the run was last tried."""
    with pytest.raises(RunDied, match="GPU watchdog"):
        on_metal(tmp_path, WATCHDOG, NOTHING_HELPS)
    assert tried(tmp_path) == ["- - -", "4 20 -", "4 20 1"]
    assert len(json.loads((tmp_path / LADDER).read_text())["gpu_rungs"]) == 2
    (tmp_path / "tried").unlink()
    said = on_metal(tmp_path, WATCHDOG, "AGX_RELAX_CDM_CTXSTORE_TIMEOUT")
    assert tried(tmp_path) == ["4 20 1"]
    assert any("the GPU watchdog ended this run before" in line for line in said)
    assert not any("out of memory" in line for line in said)


@pytest.mark.usefixtures("nothing_set")
def test_another_program_s_fault_is_no_reason_to_change_anything(tmp_path: Path) -> None:
    with pytest.raises(RunDied, match="another program"):
        on_metal(tmp_path, VICTIM, NOTHING_HELPS)
    assert tried(tmp_path) == ["- - -"]
