"""A result outlives its successor: whatever refuses, fails or kills a stage under DVC, the last result is there.

The tests of this file build on each other, in their order.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from safetrain.core.results import RESULTS, TRAINED
from safetrain.core.storage.files import sha256_of
from tests.pipeline.workspace import TINY_PATHS, Workspace
from tests.support.chaos.project import left_over, wait_for

STEPS, KILLS = 12, 3
SHORT = {"max_steps": STEPS, "num_epochs": 30, "save_steps": 2, "eval_steps": 4, "log_steps": 1}
OF_A_RUN = [name for names in RESULTS[2:] for name in names]  # what it has learnt, and what was measured of that
HOLD = (
    "import time; from safetrain.core.lock import locked, lock_path\n"
    "with locked(lock_path()): print('held', flush=True); time.sleep(600)"
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("results"))
    made.make_small()
    values: dict[str, object] = {**TINY_PATHS, **{f"train.{key}": value for key, value in SHORT.items()}}
    values |= {"evaluate.max_examples": 2, "preflight.level": "quick", "train.learning_rate": 1e-3}
    made.set_values(values)
    made.succeed("dvc", "repro")
    made.commit("a result")
    return made


def results(workspace: Workspace, names: list[str] | None = None) -> dict[str, str]:
    """The hash of each file of the last result."""
    output = workspace.folder / "checkpoints_qlora"
    found = [output / name for name in names or OF_A_RUN]
    files = [file for path in found for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    return {str(file.relative_to(output)): sha256_of(file) for file in files}


@contextmanager
def lock_held(workspace: Workspace) -> Iterator[None]:
    holder = workspace.start("python", "-c", HOLD)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        yield
    finally:
        holder.kill()
        holder.communicate()


def start_repro(workspace: Workspace, *words: str) -> subprocess.Popen[bytes]:
    """Start dvc repro in a process group of its own."""
    return subprocess.Popen(
        ["dvc", "repro", *words], cwd=workspace.folder, env=workspace.environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill_all(workspace: Workspace, process: subprocess.Popen[bytes]) -> None:
    """Kill dvc and all that it has started, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not left_over(workspace.folder), "the end of all processes", 60)


@pytest.mark.parametrize("words", [(), ("-s", "train")])
def test_a_refused_training_leaves_the_last_result(workspace: Workspace, words: tuple[str, ...]) -> None:
    workspace.set_values({"train.learning_rate": 2e-3})
    before = results(workspace)
    with lock_held(workspace):
        done = workspace.run("dvc", "repro", *words)
        assert "Another training run is in progress" in done.stderr
        assert results(workspace) == before
        said = workspace.cli("result")
        assert f"Trained {STEPS} steps" in said
        assert ", learning rate 0.001." in said


def test_a_training_killed_at_any_moment_leaves_the_last_result_and_then_replaces_it(workspace: Workspace) -> None:
    before, draw = results(workspace), random.Random(47)
    live = workspace.folder / "checkpoints_qlora/unfinished/training_metrics.csv"
    for number in range(KILLS):
        train = start_repro(workspace, "-s", "train")
        if number % 2:
            wait_for(live.is_file, "the first step", 60)
        time.sleep(draw.uniform(0, 0.5 if number % 2 else 3))
        kill_all(workspace, train)
        said = workspace.cli("result")  # which puts back what DVC has removed
        if results(workspace) != before:
            break  # it had finished
        is_unfinished = live.parent.is_dir()
        assert ("This is the last evaluated run. A newer run is unfinished, at step" in said) == is_unfinished
        assert f"Trained {STEPS} steps" in said
    workspace.succeed("dvc", "repro")
    assert workspace.json("training_summary.json")["learning_rate"] == 2e-3
    assert results(workspace).keys() == before.keys()
    assert not live.parent.exists()
    assert "newer run" not in workspace.cli("result")


def test_a_run_that_ends_before_its_evaluation_leaves_the_last_evaluated_one(workspace: Workspace) -> None:
    before = workspace.cli("result")
    workspace.set_values({"train.learning_rate": 4e-3})
    workspace.succeed("dvc", "repro", "train")
    said = workspace.cli("result")
    assert f"This is the last evaluated run. A newer run is unfinished, at step {STEPS}" in said
    assert next(line for line in before.splitlines() if "Test loss" in line) in said
    workspace.set_values({"train.learning_rate": 2e-3})
    workspace.succeed("dvc", "repro")
    assert "newer run" not in workspace.cli("result")


@pytest.mark.parametrize("stage", ["evaluate", "plot"])
def test_an_evaluation_or_a_report_that_is_killed_leaves_the_last_one(workspace: Workspace, stage: str) -> None:
    before = results(workspace)
    workspace.set_values({"evaluate.max_new_tokens": 1500})  # seconds of it
    process = start_repro(workspace, "-f", "-s", stage)
    output = workspace.folder / "checkpoints_qlora"
    is_gone = {"evaluate": output / "evaluation.json", "plot": output / "report.html"}[stage]
    wait_for(lambda: not is_gone.exists() or process.poll() is not None, "DVC's removal", 60)
    time.sleep(0.3)
    kill_all(workspace, process)
    assert f"Trained {STEPS} steps" in workspace.cli("result")
    assert results(workspace) == before
    workspace.set_values({"evaluate.max_new_tokens": None})
    workspace.succeed("dvc", "repro")
    assert results(workspace, OF_A_RUN[:5]).items() <= before.items()


def test_a_replacement_that_was_cut_short_is_ended_by_the_next_command(workspace: Workspace) -> None:
    """Killed between two of its files: the results are never of two runs."""
    before, output = results(workspace, list(TRAINED)), workspace.folder / "checkpoints_qlora"
    code = (
        "import safetrain.core.results as r; from pathlib import Path; import os\n"
        "link, calls = r._link, []\n"
        "def dying(source, target):\n"
        "    calls.append(0)\n"
        "    if len(calls) == 4: os.kill(os.getpid(), 9)\n"
        "    link(source, target)\n"
        "r._link = dying; r.publish(Path('checkpoints_qlora'))"
    )
    (output / "unfinished").mkdir()
    for name in TRAINED:
        copy = shutil.copytree if (output / name).is_dir() else shutil.copyfile
        copy(output / name, output / "unfinished" / name)
    (output / "unfinished/training_metrics.json").write_text('{"steps": 7}')
    (output / "unfinished/adapters/adapters.safetensors").write_bytes(b"new")
    assert workspace.run("python", "-c", code).returncode == -signal.SIGKILL
    workspace.run("safetrain", "diagnose")
    after = results(workspace, list(TRAINED))
    assert (output / "adapters/adapters.safetensors").read_bytes() == b"new"
    assert workspace.json("training_metrics.json") == {"steps": 7}
    assert after.keys() == before.keys()
    assert not (output / "unfinished").exists()
    workspace.succeed("dvc", "checkout", "--force")
    assert results(workspace, list(TRAINED)) == before


def test_values_that_were_trained_before_come_back_from_the_run_cache(workspace: Workspace) -> None:
    workspace.set_values({"train.learning_rate": 1e-3})
    assert "Stage 'train' is cached - skipping run, checking out outputs" in workspace.succeed("dvc", "repro")
    assert workspace.json("training_summary.json")["learning_rate"] == 1e-3
    workspace.succeed("safetrain", "result")  # keeps it, where all stages were cached and none ran
    workspace.set_values({"train.learning_rate": 3e-3})
    before = results(workspace, list(TRAINED))
    with lock_held(workspace):
        assert workspace.run("dvc", "repro", "-s", "train").returncode != 0
    assert results(workspace, list(TRAINED)) == before  # what DVC checked out, and not what was trained last
