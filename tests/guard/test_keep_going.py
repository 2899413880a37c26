"""Out of memory, a training goes on with less at a time, rung by rung; after the GPU watchdog in shorter pieces."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import MachineError, RunDied
from safetrain.core.events import Event, Said
from safetrain.core.formatting import RUN
from safetrain.core.memory.system import MemoryBudget, Readings
from safetrain.core.postmortem import PostMortem
from safetrain.core.records.settings import (
    DryRun,
    LoraSettings,
    Recommendation,
    Rung,
    TrainJob,
    TrainSettings,
    gpu_environment,
    identity_of,
)
from safetrain.core.storage.files import read_or_none, read_record, write_record
from safetrain.core.storage.paths import ERROR, FLIGHT, JOB, LADDER, POSTMORTEM
from safetrain.guard import keep_going as ladder
from safetrain.guard.keep_going import (
    GPU_RUNGS,
    Ladder,
    available_memory,
    fit_to_available_memory,
    keep_going,
    next_settings,
    read_ladder,
)
from safetrain.guard.process import WatchSettings
from tests.conftest import EMBEDDED
from tests.guard.programs import IMPORTS
from tests.guard.test_verdict import OLD_WATCHDOG, VICTIM, WATCHDOG
from tests.stores import worst_update
from tests.support.settings import SETTINGS as USUAL
from tests.watch.made_run import PLAN

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
    largest = worst_update(ROW_TOKENS + 1, settings.rows_per_update)
    plan = dataclasses.replace(PLAN, backend=backend, largest_update=largest, longest_row=ROW_TOKENS + 1)
    watch = WatchSettings((sys.executable, "-c", *program), output / FLIGHT, None, 60.0, (), ranks=ranks)

    said = list[str]()

    def show(event: Event) -> None:
        if isinstance(event, Said):
            said.append(event.text)

    keep_going(job, watch, plan, show)
    return said


@pytest.mark.parametrize("longest", [512, 64])
def test_no_rung_is_passed_over_where_rows_are_shorter_than_they_may_be(tmp_path: Path, longest: int) -> None:
    """16 rows of 61 tokens died; 8 of them are half of that, whatever train.max_seq_length is."""
    assert train(tmp_path, 5, max_seq_length=longest) == ["16", "8", "4"]


def test_when_one_rank_runs_out_of_memory_all_go_on_with_less(tmp_path: Path) -> None:
    keep(tmp_path, (TWO, "5", str(ROW_TOKENS)), ranks=2)
    assert (tmp_path / "tried").read_text().split() == ["16", "8", "4"]
    found = read_or_none(tmp_path / POSTMORTEM, PostMortem)
    assert found is not None
    assert (found.rank, found.ranks, found.phase, found.went_on) == (1, 2, "gradient", True)


def test_what_mlx_said_is_kept_whole(tmp_path: Path) -> None:
    stale = tmp_path / FLIGHT / ERROR
    stale.parent.mkdir()
    stale.write_text("of a training before")
    with pytest.raises(RunDied, match="an error in mlx") as caught:
        keep(tmp_path, (FAILING, "mlx_fails"))
    assert f"because:  traceback: {stale}" in str(caught.value)
    assert "RuntimeError: [matmul] bad shape" in stale.read_text()
    train(tmp_path, 99)
    assert not stale.exists()


def test_after_a_bad_update_advice_comes_before_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, "safetrain run experiment=minimal train.num_epochs=9")
    with pytest.raises(RunDied, match="Update 3 was not applied") as caught:
        keep(tmp_path, (FAILING, "diverges"))
    found = read_or_none(tmp_path / POSTMORTEM, PostMortem)
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
    found = read_or_none(tmp_path / POSTMORTEM, PostMortem)
    assert found is not None
    assert (found.cause, found.is_memory) == ("gpu_watchdog", False)
    assert "continuing by itself with shorter pieces" in found.next_command
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
    assert any("the GPU watchdog ended this run earlier" in line for line in said)
    assert not any("out of memory" in line for line in said)


@pytest.mark.usefixtures("nothing_set")
def test_another_program_s_fault_is_no_reason_to_change_anything(tmp_path: Path) -> None:
    with pytest.raises(RunDied, match="another program"):
        on_metal(tmp_path, VICTIM, NOTHING_HELPS)
    assert tried(tmp_path) == ["- - -"]


LIMIT = 8 * 2**30
SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 12, 15)


def settings(batch_size: int = 4, length: int = 512) -> TrainSettings:
    return dataclasses.replace(USUAL, batch_size=batch_size, gradient_accumulation=2, max_seq_length=length)


def rungs(start: TrainSettings, *, quantized: bool) -> Iterator[TrainSettings]:
    """Every rung below ``start``."""
    now = next_settings(start, quantized=quantized)
    while now is not None:
        yield now
        now = next_settings(now, quantized=quantized)


def shape(s: TrainSettings) -> tuple[int, int, bool, bool, bool, int]:
    ways = s.gradient_checkpointing, s.dequantize_base, s.stream_base
    return s.batch_size, s.gradient_accumulation, *ways, s.max_seq_length


def test_the_rungs_come_in_order_down_to_the_bottom() -> None:
    assert [shape(s) for s in rungs(settings(), quantized=True)] == [
        (2, 4, False, True, False, 512),
        (1, 8, False, True, False, 512),
        (1, 8, True, True, False, 512),
        (1, 8, True, False, False, 512),
        (1, 8, True, False, True, 512),
    ]


def test_with_the_first_rung_the_logits_come_in_small_chunks() -> None:
    start = dataclasses.replace(settings(), labels_at_once=128)
    assert {s.labels_at_once for s in rungs(start, quantized=True)} == {32}
    assert identity_of(start) == identity_of(settings()), "results differ by rounding alone"
    loading = next_settings(start, quantized=True, loading=True)
    assert loading is not None
    assert loading.labels_at_once == 128
    bottom = dataclasses.replace(list(rungs(start, quantized=True))[-1], labels_at_once=128)
    (last,) = rungs(bottom, quantized=True)
    assert (last.labels_at_once, "logits" in str(bottom), "logits" in str(last)) == (32, True, False)


@pytest.mark.parametrize("quantized", [True, False])
def test_no_rung_changes_what_is_computed(quantized: bool) -> None:
    """Neither the rows of an update nor anything else that tells one run from another; each rung is a new one."""
    for start in map(settings, SIZES):
        found = list(rungs(start, quantized=quantized))
        assert {s.rows_per_update for s in found} == {start.rows_per_update}
        assert {identity_of(s) for s in found} == {identity_of(start)}
        assert len({str(s) for s in [start, *found]}) == len(found) + 1
        assert (found[-1].batch_size, found[-1].gradient_checkpointing) == (1, True)


def test_while_loading_only_the_base_itself_can_take_less() -> None:
    start = settings(8)
    quantized = next_settings(start, quantized=True, loading=True)
    assert quantized == dataclasses.replace(start, dequantize_base=False)
    on_disk = dataclasses.replace(quantized, stream_base=True)
    assert next_settings(quantized, quantized=True, loading=True) == on_disk
    assert next_settings(start, quantized=False, loading=True) == on_disk
    assert next_settings(on_disk, quantized=True, loading=True) is None
    assert next_settings(dataclasses.replace(start, method="full"), quantized=False, loading=True) is None


def written(output: Path) -> Ladder:
    first = settings()
    tried = next_settings(settings(), quantized=True)
    assert tried is not None
    ladder = Ladder(first, LIMIT, tried, (Rung(first, 7, "killed by the system: out of memory"),))
    write_record(output / LADDER, ladder)
    return ladder


def test_a_ladder_is_remembered_for_the_same_settings_and_no_more_memory(tmp_path: Path) -> None:
    ladder = written(tmp_path)
    assert read_ladder(tmp_path, settings(), LIMIT) == read_ladder(tmp_path, settings(), LIMIT // 2) == ladder
    anew = dataclasses.replace(settings(), labels_at_once=128, padding_tokens=512, threads=1)
    assert read_ladder(tmp_path, anew, LIMIT) == ladder, "the machine was measured anew"
    others = ((settings(), LIMIT + 1), (settings(2), LIMIT), (settings(length=256), LIMIT))
    assert [read_ladder(tmp_path, *other) for other in others] == [None, None, None]
    assert read_ladder(tmp_path / "elsewhere", settings(), LIMIT) is None
    content = (tmp_path / LADDER).read_bytes()
    for kept in (0, len(content) // 2, len(content) - 3):
        (tmp_path / LADDER).write_bytes(content[:kept])
        assert read_ladder(tmp_path, settings(), LIMIT) is None


GIB = 2**30
EIGHT = dataclasses.replace(
    USUAL, batch_size=8, gradient_accumulation=2, max_seq_length=128,
    lora=LoraSettings(8, 2.0, 0.0, 6, ("all-linear",)),
)  # fmt: skip
MEASURED = DryRun(3 * GIB, 3 * GIB, 1.0, "cpu", None)
PLANNED = dataclasses.replace(
    PLAN, settings=EIGHT, largest_update=worst_update(100, 16), longest_row=100, measured=MEASURED
)
MINE = TrainJob(str(EMBEDDED), EIGHT, True, MemoryBudget(8 * GIB), PLANNED)
IDLE = Readings(8 * GIB, 2 * GIB, wired_bytes=GIB, pressure_level=1, free_percent=54)


def start(
    monkeypatch: pytest.MonkeyPatch, left: int, job: TrainJob = MINE, plan: Recommendation = PLANNED
) -> tuple[TrainJob, str]:
    monkeypatch.setattr(ladder, "read_memory", lambda: Readings(16 * GIB, left))
    said: list[str] = []
    return fit_to_available_memory(job, plan, said.append), "".join(said)


def test_with_room_nothing_changes_and_with_nothing_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, 4 * GIB) == (MINE, "")
    assert start(monkeypatch, 1, plan=dataclasses.replace(PLANNED, backend="cuda")) == (MINE, ""), "a GPU has its own"
    with pytest.raises(MachineError, match="Not enough free memory"):
        start(monkeypatch, GIB // 8)


def test_on_a_mac_free_memory_says_nothing_until_it_is_critically_short() -> None:
    """8 GB M1 that trained a 7B: 2.05 GiB `available` (giampaolo/psutil #1503), 54 to 69 % free by memory_pressure."""
    job = dataclasses.replace(MINE, memory_budget=MemoryBudget(int(4.8 * GIB)))
    assert available_memory(job, "metal", IDLE)[0] == int(4.8 * GIB)
    for reading in ({"pressure_level": 4}, {"free_percent": 7}):
        left, words, _ = available_memory(job, "metal", dataclasses.replace(IDLE, **reading))
        assert left == 0
        assert "critical memory pressure" in words
    assert available_memory(job, "metal", dataclasses.replace(IDLE, pressure_level=2))[0] > 0


def test_with_less_it_starts_on_a_lower_rung_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job, said = start(monkeypatch, 5 * GIB // 2)
    assert (job.settings.batch_size, job.settings.gradient_accumulation) == (4, 4)
    assert job.rungs[0].failed.batch_size == 8
    assert said.startswith("warning: only 2.50 GiB are free now and 3.20 GiB are needed, so training starts with 4 x 4")
