"""Pulling plugs in the real pipeline: nothing stays behind, nothing is lost, everything is explained.

The tests of this file build on each other, in their order.
"""

import json
import os
import shutil
import signal
import subprocess

import pytest

from safetrain.core.recorder import read_flight
from tests.pipeline.workspace import TINY_PATHS, Workspace
from tests.support.chaos.project import left_over, wait_for

STEPS = 120
SHORT = {"max_steps": STEPS, "num_epochs": 30, "save_steps": 10, "eval_steps": 60, "log_steps": 1, "max_examples": 160}
PLAN_SECONDS = 600.0  # of a busy machine
RECORDED = "checkpoints_qlora/flight/recorder.bin"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("survival"))
    made.make_small()
    of_train = {f"train.{key}": value for key, value in SHORT.items()}
    made.set_values({**TINY_PATHS, **of_train, "preflight.level": "quick", "evaluate.max_examples": 2})
    made.commit("a short training")
    return made


def has_checkpoint(workspace: Workspace) -> bool:
    pointer = workspace.folder / "checkpoints_qlora/training_state.json"
    return pointer.is_file() and not json.loads(pointer.read_text())["finished"]


def start_training(workspace: Workspace, *command: str) -> subprocess.Popen[str]:
    """Start a command that trains, and wait for its first checkpoint."""
    process = workspace.start(*command)
    wait_for(lambda: has_checkpoint(workspace) or process.poll() is not None, "the first checkpoint", PLAN_SECONDS)
    assert process.poll() is None, process.communicate()
    return process


def test_kill_9_of_dvc_leaves_nothing_running_and_the_next_repro_continues(workspace: Workspace) -> None:
    dvc = start_training(workspace, "dvc", "repro", "train")
    os.kill(dvc.pid, signal.SIGKILL)
    dvc.communicate(timeout=60)
    assert left_over(workspace.folder) == []
    told = workspace.json("postmortem.json")
    assert (told["cause"], told["confidence"]) == ("orphaned", "confirmed")
    assert told["resumes_from_step"] > 0
    assert "the program that started it was killed" in workspace.succeed("safetrain", "diagnose")
    output = workspace.succeed("dvc", "repro", "train")
    summary = workspace.json("training_summary.json")
    assert summary["resumed_from_step"] >= told["resumes_from_step"] > 0
    assert f"continuing from step {summary['resumed_from_step']}\n" in output
    assert summary["steps"] == STEPS


def test_kill_9_of_the_supervisor_is_told_at_the_next_start(workspace: Workspace) -> None:
    workspace.succeed("safetrain", "discard")
    train = start_training(workspace, "python", "-m", "stages.train")
    os.kill(train.pid, signal.SIGKILL)
    train.communicate(timeout=60)
    assert left_over(workspace.folder) == []
    again = workspace.run("python", "-m", "stages.train")
    assert again.returncode == 0
    assert "it was killed together with its supervisor" in again.stdout
    assert workspace.json("training_summary.json")["resumed_from_step"] > 0
    assert workspace.json("postmortem.json")["cause"] == "supervisor_killed"


def test_out_of_memory_under_a_limit_ends_well_on_a_lower_rung(workspace: Workspace) -> None:
    if os.uname().sysname != "Linux":
        pytest.skip("only Linux caps private memory")
    learnt = workspace.folder.parent / "cache"  # what did not fit here is nothing for other tests to know
    shutil.copytree(workspace.environment["SAFETRAIN_CACHE_DIR"], learnt, symlinks=True)
    workspace.environment["SAFETRAIN_CACHE_DIR"] = str(learnt)
    del workspace.environment["OPENBLAS_NUM_THREADS"]  # what a second thread takes is part of the limit
    settings = (
        "model.path=models/encyclopedia-3m", "data.path=data/example", "train.max_examples=256", "train.max_steps=4",
    )  # fmt: skip
    workspace.succeed("safetrain", "discard")  # an unfinished run of other data was left here
    for stage in ("validate_data", "preflight", "recommend_config"):
        workspace.succeed("python", "-m", f"stages.{stage}", *settings, "preflight.level=quick")
    done = workspace.run(
        "python", "-m", "stages.train", *settings, "train.memory_limit_gb=8"
    )  # which it does not reach
    assert done.returncode == 0, done.stderr
    uncapped = max(record.data_bytes for record in read_flight(workspace.folder / RECORDED).records)
    for share in (0.97, 0.94, 0.91):  # what the example's update needs is little beside what the process has
        limit = f"train.memory_limit_gb={share * uncapped / 2**30:.4f}"
        done = workspace.run("python", "-m", "stages.train", *settings, limit)
        if "continuing by itself with" in done.stdout:
            break
    assert done.returncode == 0, done.stderr
    summary = workspace.json("training_summary.json")
    assert summary["memory_rungs"]
    assert summary["batch_size"] < 16
    assert summary["batch_size"] * summary["gradient_accumulation"] == 16
    assert workspace.json("postmortem.json")["is_memory"] is True
