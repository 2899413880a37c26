"""A run goes on from its newest whole checkpoint, bit for bit; what was lost is said; another run is never continued.

The rounding of other micro-batches and of recomputed blocks is all that going on with less memory may change.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safetrain.core.data.training_rows import order_fingerprint
from safetrain.core.errors import InterruptedRun, TrainingError
from safetrain.core.recorder import Recorder
from safetrain.core.records.run_state import MANIFEST, RunIdentity, checkpoints_in, write_manifest
from safetrain.core.records.settings import TrainSettings, identity_of
from safetrain.core.storage.paths import POINTER
from safetrain.engine.adapters import adapter_weights
from safetrain.engine.job import Job
from safetrain.engine.run import Watcher, open_run
from safetrain.engine.state import mark_finished
from safetrain.engine.training import Result
from safetrain.engine.update import prepare
from tests.engine.exact import SETTINGS, STILL, distance, rows_of
from tests.engine.test_training import final_state, job_in, metrics_without_time, run, same, weights
from tests.support.jobs import with_rows
from tests.support.random_models import build_model

STEPS, LONGER, STOPPED_AT, SAVED_BEFORE = 9, 12, 5, 4  # 12 rows, 4 per update, 3 epochs or 4
ROWS = rows_of(*range(36, 60, 2))  # so long that each window of 4 makes other micro-batches
ROUNDING = 1e-4  # of the movement of all trained weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model."""
    return build_model(
        tmp_path_factory.mktemp("base") / "tiny",
        bits=4,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )


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
    return dataclasses.replace(with_rows(job_in(folder, base, settings), train=ROWS), identity=identity(settings))


def identity(settings: TrainSettings) -> RunIdentity:
    return RunIdentity("base", "train", "valid", identity_of(settings))


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


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "weights with a flipped bit": ("adapters.safetensors", flip),
    "half of the optimizer": ("optimizer.safetensors", cut),
    "no best weights": ("best.safetensors", Path.unlink),
    "half of the state": ("state.json", cut),
    "half of the manifest": (MANIFEST, cut),
    "no manifest": (MANIFEST, Path.unlink),
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
    assert f"damaged_{newest.folder.name}" in told
    assert (broken / f"damaged_{newest.folder.name}").is_dir()
    assert same(final_state(broken), final_state(unbroken))
    assert same(weights(broken), weights(unbroken))
    assert metrics_without_time(broken) == metrics_without_time(unbroken)


def test_a_numpy_that_draws_otherwise_does_not_reorder_the_rows_of_a_run_in_silence(
    base: Path, broken: Path, tmp_path: Path
) -> None:
    """What its generators draw may change with its version."""
    job = job_of(broken, base)
    with_draws = dataclasses.replace(job, identity=dataclasses.replace(job.identity, draws=order_fingerprint()))
    again = dataclasses.replace(with_draws, output=tmp_path / "now", adapters=tmp_path / "now" / "adapters")
    stop(again)
    other = dataclasses.replace(again, identity=dataclasses.replace(again.identity, draws="order another"))
    with pytest.raises(TrainingError, match="differs in: numpy's random order of rows"):
        run(other)
    longer = dataclasses.replace(SETTINGS, num_epochs=4)
    for identity_now in (other.identity, dataclasses.replace(other.identity, settings=identity_of(longer))):
        with pytest.raises(TrainingError, match="numpy's random order"):
            run(dataclasses.replace(other, identity=identity_now))
    assert run(again).state.resumed_from_step == STOPPED_AT


def test_a_refused_run_leaves_a_damaged_checkpoint_where_it_is(base: Path, broken: Path) -> None:
    newest = checkpoints_in(broken)[0].folder
    flip(newest / "optimizer.safetensors")
    with pytest.raises(TrainingError, match=f"stopped at step {SAVED_BEFORE}.*learning_rate"):
        run(job_of(broken, base, learning_rate=1e-3))
    assert newest.is_dir()


def test_without_a_whole_checkpoint_the_run_says_so_and_starts_over(base: Path, unbroken: Path, broken: Path) -> None:
    for checkpoint in checkpoints_in(broken):
        flip(checkpoint.folder / "optimizer.safetensors")
    result, said = telling(job_of(broken, base))
    assert result.state.resumed_from_step == 0
    assert sum("is damaged" in text for text in said) == 2
    assert "no undamaged checkpoint is left: training starts from the beginning" in said
    assert same(final_state(broken), final_state(unbroken))


@pytest.mark.parametrize("damage", [Path.unlink, cut, lambda path: path.write_text("{}")])
def test_a_lost_pointer_loses_nothing(base: Path, unbroken: Path, broken: Path, damage: Callable[[Path], None]) -> None:
    damage(broken / POINTER)
    result = run(job_of(broken, base))
    assert result.state.resumed_from_step == STOPPED_AT
    assert same(final_state(broken), final_state(unbroken))


def test_a_longer_run_goes_on_from_a_finished_one(base: Path, tmp_path: Path) -> None:
    """With another warm-up and other times to validate, as a longer run is recommended to have."""
    job = job_of(tmp_path, base)
    first = run(job)
    mark_finished(job.output, first.metrics.steps, job.identity)
    longer = job_of(tmp_path, base, num_epochs=4, warmup_steps=3, eval_steps=4)
    result, said = telling(longer)
    assert (result.state.resumed_from_step, result.metrics.steps) == (STEPS, LONGER)
    assert any("num_epochs is larger" in text and f"from step {STEPS}" in text for text in said)
    assert result.state.trained_tokens > first.state.trained_tokens
    assert result.metrics.best_valid_loss <= first.metrics.best_valid_loss


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_epochs": 2}, r"num_epochs \(3 before, 2 now\)"),
        ({"learning_rate": 1e-3}, r"learning_rate \(0\.005 before, 0\.001 now\)"),
        ({"num_epochs": 4, "seed": 8}, r"num_epochs \(3 before, 4 now\), seed \(7 before, 8 now\)"),
        ({"batch_size": 4}, r"rows_per_update \(4 before, 8 now\)"),
        ({"max_seq_length": 32}, r"max_seq_length \(64 before, 32 now\)"),
    ],
)
def test_another_run_is_refused_by_name_and_nothing_of_the_first_is_lost(
    base: Path, unbroken: Path, broken: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(TrainingError, match=named) as caught:
        run(job_of(broken, base, **changed))
    assert f"stopped at step {STOPPED_AT}" in str(caught.value)
    assert run(job_of(broken, base)).state.resumed_from_step == STOPPED_AT
    assert same(final_state(broken), final_state(unbroken))


@pytest.mark.parametrize("changed", [{"num_epochs": 1}, {"learning_rate": 1e-3}, {"num_epochs": 4, "seed": 8}, {}])
def test_a_finished_run_is_never_in_the_way(
    base: Path, unbroken: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    shutil.copytree(unbroken, tmp_path / "done")
    job = job_of(tmp_path / "done", base)
    mark_finished(job.output, run(job).metrics.steps, job.identity)
    again = job_of(job.output, base, **changed)
    short = dataclasses.replace(again.settings, max_steps=2)
    assert run(dataclasses.replace(again, settings=short)).metrics.steps == 2


@pytest.mark.parametrize("change", [Path.unlink, flip, cut], ids=["removed", "a bit flipped", "cut"])
def test_the_best_adapter_comes_back_from_the_checkpoint(
    base: Path, unbroken: Path, broken: Path, change: Callable[[Path], None]
) -> None:
    """DVC removes it before the stage runs again; a kill leaves one that is newer than the checkpoint."""
    best = checkpoints_in(broken)[0].folder / "best.safetensors"
    adapter = broken / "adapters" / "adapters.safetensors"
    assert adapter.read_bytes() == best.read_bytes()
    change(adapter)
    open_run(job_of(broken, base), Watcher(lambda *_: None, print, lambda: 0, Recorder(broken / "recorder.bin")))
    assert adapter.read_bytes() == best.read_bytes()


def movement(folder: Path, base: Path) -> np.ndarray:
    """How far training has moved each trained number from its start."""
    model, _ = prepare(base, SETTINGS)
    start = {name: np.array(value) for name, value in adapter_weights(model).items()}
    end = final_state(folder)
    return np.concatenate([(end[f"adapters:{name}"] - start[name]).ravel() for name in sorted(start)]).astype(float)


SMALLER: dict[str, dict[str, Any]] = {
    "4 x 1": {"batch_size": 4, "gradient_accumulation": 1},
    "1 x 4": {"batch_size": 1, "gradient_accumulation": 4},
    "blocks recomputed": {"gradient_checkpointing": True},
    "base left quantized": {"dequantize_base": False},
}


@pytest.mark.parametrize("changed", list(SMALLER.values()), ids=list(SMALLER))
def test_going_on_with_less_memory_changes_nothing_but_rounding(
    base: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """From 2 x 2, without dropout."""
    run(job_of(tmp_path / "unbroken", base, lora=STILL.lora))
    stop(job_of(tmp_path / "broken", base, lora=STILL.lora))
    result = run(job_of(tmp_path / "broken", base, lora=STILL.lora, **changed))
    assert result.state.resumed_from_step == STOPPED_AT
    expected = movement(tmp_path / "unbroken", base)
    assert np.linalg.norm(expected) > 0.1
    assert distance(movement(tmp_path / "broken", base), expected) < ROUNDING


def test_a_checkpoint_of_another_version_is_refused(base: Path, broken: Path) -> None:
    folder = checkpoints_in(broken)[0].folder
    state = json.loads((folder / "state.json").read_text())
    del state["grad_norm"]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / MANIFEST).unlink()
    write_manifest(folder)
    with pytest.raises(TrainingError, match="was written by a different version"):
        run(job_of(broken, base))
