"""A run goes on from its newest whole checkpoint, bit for bit; what was lost is said; another run is never continued.

The rounding of other micro-batches and of recomputed blocks is all that going on with less memory may change.
"""

import dataclasses
import errno
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from safetrain.core.errors import DiskFullError, InterruptedRun, TrainingError
from safetrain.core.recorder import Phase, Recorder, read_flight
from safetrain.core.records.metrics import parse_csv
from safetrain.core.records.run_state import MANIFEST, TEXT_BYTES, RunIdentity, RunState, checkpoints_in, write_manifest
from safetrain.core.records.settings import identity_of
from safetrain.core.storage.files import read_or_none, write_record
from safetrain.core.storage.paths import POINTER
from safetrain.engine import run as run_module
from safetrain.engine import state
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.job import Job
from safetrain.engine.optimizer import optimizer_of
from safetrain.engine.run import Watcher, open_run
from safetrain.engine.training import Result
from safetrain.engine.update import prepare
from safetrain.engine.weight_files import save_arrays
from tests.engine.exact import SETTINGS, STILL, distance, flat, rows_of
from tests.engine.test_training import final_state, job_in, require_same_run, run, same
from tests.support.jobs import with_rows
from tests.support.random_models import TINY, build_model

STEPS, LONGER, STOPPED_AT, SAVED_BEFORE = 9, 12, 5, 4  # 12 rows, 4 per update, 3 epochs or 4
ROWS = rows_of(*range(36, 60, 2))  # so long that each window of 4 makes other micro-batches
ROUNDING = 1e-4  # of the movement of all trained weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model."""
    return build_model(tmp_path_factory.mktemp("base") / "tiny", bits=4, **TINY)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The folder of a run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(job_of(folder, base))
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The folder of a run that was asked to stop in the middle; not to be changed."""
    folder = tmp_path_factory.mktemp("interrupted")
    stop(job_of(folder, base))
    return folder


@pytest.fixture
def broken(tmp_path: Path, interrupted: Path) -> Path:
    """A copy of it."""
    shutil.copytree(interrupted, tmp_path / "broken")
    return tmp_path / "broken"


def job_of(folder: Path, base: Path, **changed: Any) -> Job:
    """A job with the identity that the training process gives it."""
    settings = dataclasses.replace(SETTINGS, **changed)
    identity = RunIdentity("base", "train", "valid", identity_of(settings))
    return dataclasses.replace(with_rows(job_in(folder, base, settings), train=ROWS), identity=identity)


def stop(job: Job) -> None:
    with pytest.raises(InterruptedRun):
        run(job, stop_at=STOPPED_AT)


def telling(job: Job) -> tuple[Result, list[str]]:
    """The result, and what was said meanwhile."""
    said: list[str] = []
    return run(job, say=said.append), said


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def unreadable(file: Path) -> None:
    """A read of it fails, as on a disk that cannot read its sectors."""
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "weights with a flipped bit": ("adapters.safetensors", flip),
    "no best weights": ("best.safetensors", Path.unlink),
    "half of the state": ("state.json", cut),
    "no manifest": (MANIFEST, Path.unlink),
    "weights that cannot be read": ("adapters.safetensors", unreadable),
}


@pytest.mark.parametrize(("name", "damage"), list(DAMAGES.values()), ids=list(DAMAGES))
def test_a_damaged_checkpoint_is_told_and_the_one_before_gives_the_same_bits(
    base: Path, unbroken: Path, broken: Path, name: str, damage: Callable[[Path], None]
) -> None:
    newest, before = checkpoints_in(broken)[:2]
    assert (newest.step, before.step) == (STOPPED_AT, SAVED_BEFORE)
    damage(newest.folder / name)
    result, said = telling(job_of(broken, base))
    assert result.state.resumed_from_step == SAVED_BEFORE
    (told,) = said
    assert told.startswith(f"{newest.folder.name} is damaged ({name}")
    assert (broken / f"damaged_{newest.folder.name}").is_dir()
    require_same_run(broken, unbroken)


def test_without_a_whole_checkpoint_the_run_says_so_and_starts_over(base: Path, unbroken: Path, broken: Path) -> None:
    for checkpoint in checkpoints_in(broken):
        flip(checkpoint.folder / "optimizer.safetensors")
    result, said = telling(job_of(broken, base))
    assert result.state.resumed_from_step == 0
    assert sum("is damaged" in text for text in said) == 2
    assert "no undamaged checkpoint is left: training starts from the beginning" in said
    assert same(final_state(broken), final_state(unbroken))


def test_a_checkpoint_has_all_records_before_it(base: Path, tmp_path: Path) -> None:
    """They become the run's metrics again if DVC removed these."""
    job = job_of(tmp_path / "long", base, num_epochs=10, log_steps=1, save_steps=1, eval_steps=100)
    with pytest.raises(InterruptedRun):
        run(job, stop_at=20)
    (job.output / "metrics.csv").unlink()
    run(job)
    newest = checkpoints_in(job.output)[0].folder
    records = (newest / state.RECORDS_FILE).read_text()
    assert records == (job.output / "metrics.csv").read_text()
    assert [record.step for record in parse_csv(records)] == list(range(31))
    assert (newest / "state.json").stat().st_size < 4000
    assert max(len(line) for line in records.splitlines()) < state.RECORD_BYTES
    model, _ = prepare(base, job.settings)
    optimizer = optimizer_of(job.settings)
    optimizer.init(model.module.trainable_parameters())
    written = sum(file.stat().st_size for file in newest.iterdir())
    text = TEXT_BYTES + 31 * state.RECORD_BYTES
    assert 0 <= state.size_of(model, optimizer, 31) - written < text


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_lost_pointer_loses_nothing(base: Path, unbroken: Path, broken: Path, damage: Callable[[Path], None]) -> None:
    damage(broken / POINTER)
    result = run(job_of(broken, base))
    assert result.state.resumed_from_step == STOPPED_AT
    assert same(final_state(broken), final_state(unbroken))


def finished(job: Job) -> None:
    """Call the run finished, as replacing the last results does."""
    state = read_or_none(job.output / POINTER, RunState)
    assert state is not None
    write_record(job.output / POINTER, dataclasses.replace(state, finished=True))


def test_a_longer_run_goes_on_from_a_finished_one(base: Path, tmp_path: Path) -> None:
    """With another warm-up and other times to validate, as a longer run is recommended to have."""
    job = job_of(tmp_path, base)
    first = run(job)
    finished(job)
    longer = job_of(tmp_path, base, num_epochs=4, warmup_steps=3, eval_steps=4)
    result, said = telling(longer)
    assert (result.state.resumed_from_step, result.metrics.steps) == (STEPS, LONGER)
    assert any("num_epochs is larger" in text and f"from step {STEPS}" in text for text in said)
    assert result.state.labels > first.state.labels
    assert result.metrics.best_valid_loss <= first.metrics.best_valid_loss


def test_a_checkpoint_of_another_version_is_refused(base: Path, broken: Path) -> None:
    folder = checkpoints_in(broken)[0].folder
    state = json.loads((folder / "state.json").read_text())
    del state["grad_norm"]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / MANIFEST).unlink()
    write_manifest(folder)
    with pytest.raises(TrainingError, match="was written by a different version"):
        run(job_of(broken, base))


def test_another_run_is_refused_by_name_and_the_first_is_not_lost(base: Path, unbroken: Path, broken: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_epochs": 2}, r"num_epochs \(3 before, 2 now\)"),
        ({"learning_rate": 1e-3}, r"learning_rate \(0\.005 before, 0\.001 now\)"),
        ({"num_epochs": 4, "seed": 8}, r"num_epochs \(3 before, 4 now\), seed \(7 before, 8 now\)"),
        ({"batch_size": 4}, r"rows_per_update \(4 before, 8 now\)"),
        ({"max_seq_length": 32}, r"max_seq_length \(64 before, 32 now\)"),
    ]
    jobs = [(job_of(broken, base, **changed), named) for changed, named in changes]
    job = job_of(broken, base)
    identity = dataclasses.replace(job.identity, draws="order another")  # numpy may draw otherwise in another version
    jobs.append((dataclasses.replace(job, identity=identity), "differs in: numpy's random order of rows"))
    for other, named in jobs:
        with pytest.raises(TrainingError, match=named) as caught:
            run(other)
        assert f"stopped at step {STOPPED_AT}" in str(caught.value)
    newest, before = checkpoints_in(broken)[:2]
    shutil.copytree(newest.folder, broken.with_name("kept"))
    flip(newest.folder / "optimizer.safetensors")
    with pytest.raises(TrainingError, match=f"stopped at step {before.step}.*learning_rate"):
        run(jobs[1][0])
    assert not newest.folder.exists()  # damaged, and renamed
    shutil.copytree(broken.with_name("kept"), newest.folder)
    assert run(job).state.resumed_from_step == STOPPED_AT
    require_same_run(broken, unbroken)


@pytest.mark.parametrize("changed", [{"num_epochs": 1}, {"num_epochs": 4, "seed": 8}, {}])
def test_a_finished_run_is_not_in_the_way(base: Path, unbroken: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    shutil.copytree(unbroken, tmp_path / "done")
    job = job_of(tmp_path / "done", base)
    run(job)
    finished(job)
    again = job_of(job.output, base, **changed)
    short = dataclasses.replace(again.settings, max_steps=2)
    assert run(dataclasses.replace(again, settings=short)).metrics.steps == 2


def test_the_best_adapter_comes_back_from_the_checkpoint(base: Path, broken: Path) -> None:
    """DVC removes it before the stage runs again; a kill leaves one that is newer than the checkpoint."""
    best = checkpoints_in(broken)[0].folder / "best.safetensors"
    adapter = broken / "adapters" / "adapters.safetensors"
    watcher = Watcher(lambda *_: None, print, lambda: 0, Recorder(broken / "recorder.bin"))
    for change in (Path.unlink, flip, cut):
        change(adapter)
        open_run(job_of(broken, base), watcher)
        assert adapter.read_bytes() == best.read_bytes()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, Path]:
    """An unbroken run and one that was stopped, without dropout; not to be changed."""
    folder = tmp_path_factory.mktemp("still")
    run(job_of(folder / "unbroken", base, lora=STILL.lora))
    stop(job_of(folder / "stopped", base, lora=STILL.lora))
    return folder / "unbroken", folder / "stopped"


@pytest.mark.parametrize("changed", [
    {"batch_size": 4, "gradient_accumulation": 1}, {"batch_size": 1, "gradient_accumulation": 4},
    {"gradient_checkpointing": True}, {"dequantize_base": False},
])  # fmt: skip
def test_going_on_with_less_memory_changes_nothing_but_rounding(
    base: Path, still: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any]
) -> None:
    """From 2 x 2."""
    shutil.copytree(still[1], tmp_path / "broken")
    result = run(job_of(tmp_path / "broken", base, lora=STILL.lora, **changed))
    assert result.state.resumed_from_step == STOPPED_AT
    start = {name: np.array(value) for name, value in adapter_weights(prepare(base, SETTINGS)[0]).items()}

    def movement(folder: Path) -> np.ndarray:
        """How far training has moved each trained number."""
        end = final_state(folder)
        return flat({name: end[f"adapters:{name}"] - value for name, value in start.items()})

    expected = movement(still[0])
    assert np.linalg.norm(expected) > 0.1
    assert distance(movement(tmp_path / "broken"), expected) < ROUNDING


MIB = 2**20
Build = Callable[..., Path]


class Disk:
    """A disk with ``free`` bytes, or with what ``looks`` says at each look until that is used up."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.looks: Iterator[int] = iter(())
        self.asked = 0

    def usage(self, _folder: Path) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(free=next(self.looks, self.free))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(100 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", made.usage)
    monkeypatch.setattr(run_module, "LOOK_SECONDS", 0.02)
    return made


def test_a_run_on_a_disk_that_is_full_now_and_then_gives_the_same_bits(
    disk: Disk, tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is stopped while it waits: what was saved before is whole."""
    base, said = tiny_model(bits=4), list[str]()
    run(job_in(tmp_path / "whole", base))
    asked, disk.asked = disk.asked, 0
    assert asked > 20
    disk.looks = (0 if look % 5 == 3 else 100 * MIB for look in range(10**6))
    refusals = iter([OSError(errno.EDQUOT, "no")])  # the disk looks free, and was full in the middle of a write
    with monkeypatch.context() as patched:
        patched.setattr(state, "save_arrays", Mock(side_effect=lambda *asked: raised_or(save_arrays, refusals, *asked)))
        run(job_in(tmp_path / "full", base), say=said.append)
    assert said.count("there is free space again") >= 5
    phases = [record.phase for record in read_flight(tmp_path / "full" / "recorder.bin").records]
    assert Phase.WAIT in phases
    require_same_run(tmp_path / "full", tmp_path / "whole")
    disk.looks, said[:] = (100 * MIB if look < asked // 2 else 0 for look in range(10**6)), []
    with pytest.raises(InterruptedRun, match=r"while the disk was full(?s:.*)from the newest checkpoint") as caught:
        run(job_in(tmp_path / "stopped", base), say=said.append, stop=lambda: signal.SIGTERM if said else 0)
    assert caught.value.exit_code == 143
    disk.looks = iter(())
    assert 0 < run(job_in(tmp_path / "stopped", base)).state.resumed_from_step < 15
    require_same_run(tmp_path / "stopped", tmp_path / "whole")


def raised_or(write: Callable[..., None], errors: Iterator[OSError], *asked: object) -> None:
    """Fail as long as there are errors."""
    for error in errors:
        raise error
    write(*asked)


def test_the_wait_has_an_end(disk: Disk, tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "WAIT_MINUTES", 0.005)
    monkeypatch.setattr(state, "save_arrays", Mock(side_effect=OSError(errno.EDQUOT, "no")))
    began = time.monotonic()
    with pytest.raises(DiskFullError, match=r"The disk stayed full for 0\.005 minutes") as caught:
        run(job_in(tmp_path / "a", tiny_model()))
    assert 0.3 <= time.monotonic() - began < 60
    assert str(tmp_path) in str(caught.value)


def test_a_run_without_room_for_its_checkpoints_does_not_start(disk: Disk, tiny_model: Build, tmp_path: Path) -> None:
    disk.free = MIB
    with pytest.raises(DiskFullError, match="too little disk space for this run's checkpoints"):
        run(job_in(tmp_path / "a", tiny_model()))
