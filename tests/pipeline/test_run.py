"""`safetrain run`: a run's own values, what is recorded of it, and the way back; killed, stopped, twice, without Git.

The tests of this file build on each other, in their order.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from safetrain.core.params_file import with_value
from safetrain.core.storage.files import sha256_of
from tests.pipeline.workspace import TINY_PATHS, Workspace
from tests.support.chaos.project import left_over, wait_for

SHORT: dict[str, object] = {
    **TINY_PATHS, "train.max_steps": 4, "train.num_epochs": 30,
    "train.save_steps": 1, "train.eval_steps": 4, "train.learning_rate": 1e-3, "evaluate.max_examples": 2,
    "evaluate.max_new_tokens": 2, "preflight.level": "quick",
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("run"))
    made.make_small()
    made.set_values(SHORT)
    made.commit("short runs")
    return made


@pytest.fixture(scope="module")
def before(workspace: Workspace) -> bytes:
    return (workspace.folder / "params.yaml").read_bytes()


def params_of(workspace: Workspace) -> bytes:
    return (workspace.folder / "params.yaml").read_bytes()


def adapter(workspace: Workspace) -> str:
    return sha256_of(workspace.folder / "checkpoints_qlora/adapters/adapters.safetensors")


def trained_with(lock: str) -> dict[str, Any]:
    return yaml.safe_load(lock)["stages"]["train"]["params"]["params.yaml"]


def kill_all(workspace: Workspace, process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not left_over(workspace.folder), "the end of all processes", 60)


def start(workspace: Workspace, *words: str) -> subprocess.Popen[bytes]:
    """Start a run in a process group of its own."""
    return subprocess.Popen(
        ["safetrain", "run", *words], cwd=workspace.folder, env=workspace.environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_training(workspace: Workspace) -> None:
    """Wait for checkpoints of a run that has just been started; an earlier one may have left its records."""
    live, began = workspace.folder / "checkpoints_qlora/unfinished/training_metrics.csv", time.time()

    def has_steps() -> bool:
        return live.is_file() and live.stat().st_mtime > began and live.read_text().count("\n") > 3

    wait_for(has_steps, "the first checkpoint", 120)


def test_values_hold_for_one_run_which_is_recorded(workspace: Workspace, before: bytes) -> None:
    said = workspace.succeed("safetrain", "run", "experiment=minimal", "train.seed=7")
    assert "recorded as minimal_seed-7" in said
    assert params_of(workspace) == before
    assert workspace.json("data_report.json")["train"]["rows"] == 160
    (ref,) = workspace.git("for-each-ref", "--format=%(refname)", "refs/exps/*/*/minimal_seed-7").split()
    recorded = yaml.safe_load(workspace.git("show", f"{ref}:params.yaml"))
    assert (recorded["train"]["seed"], recorded["train"]["max_examples"]) == (7, 100)
    values = trained_with(workspace.git("show", f"{ref}:dvc.lock"))
    assert (values["train.seed"], values["train.max_examples"], values["train.max_steps"]) == (7, 100, 4)
    assert workspace.json("training_summary.json")["train_rows"] == 100
    assert "minimal_seed-7" in workspace.succeed("dvc", "exp", "show", "--csv")


def test_the_next_run_has_the_values_of_params_yaml(workspace: Workspace, before: bytes) -> None:
    with_values = adapter(workspace)
    said = workspace.succeed("safetrain", "run")
    assert "Trained 4 steps on 160 rows" in said
    assert workspace.json("training_summary.json")["train_rows"] == 160
    usual = adapter(workspace)
    assert usual != with_values
    cached = workspace.succeed("safetrain", "run", "experiment=minimal", "train.seed=7")
    assert "Stage 'train' is cached - skipping run, checking out outputs" in cached
    assert "recorded as minimal_seed-7:" in cached  # the same result has the same name
    assert (adapter(workspace), params_of(workspace)) == (with_values, before)
    listed = workspace.cli("runs")
    assert re.search(r"workspace .*train\.seed=7", listed)
    assert len(re.findall(r"minimal_seed-7 ", listed)) == 1


def test_it_is_possible_to_go_back_and_to_set_values_to_stay(workspace: Workspace, before: bytes) -> None:
    with_values = adapter(workspace)
    workspace.succeed("safetrain", "run")
    assert adapter(workspace) != with_values
    workspace.cli("runs", "--back", "minimal_seed-7")
    assert adapter(workspace) == with_values
    assert yaml.safe_load(params_of(workspace))["train"]["seed"] == 7
    assert "on 100 rows" in workspace.cli("result")
    assert workspace.succeed("dvc", "status").split() == ["preflight:", "always", "changed"]
    workspace.cli("set", "train.seed=42", "train.max_examples=null", "train.num_epochs=30", "train.batch_size=null",
                  "train.gradient_accumulation=null", "train.log_steps=null", "evaluate.max_examples=2")  # fmt: skip
    assert params_of(workspace) == before
    unknown = workspace.run("safetrain", "runs", "--back", "none")
    assert (unknown.returncode, "There is no run none" in unknown.stderr) == (2, True)


def test_several_values_run_one_after_another_until_one_fails(workspace: Workspace, before: bytes) -> None:
    failed = workspace.run("safetrain", "run", "train.seed=7,8", "data.path=data/tiny,data/none")
    assert failed.returncode == 3
    assert "not run: train.seed=8 data.path=data/tiny; train.seed=8 data.path=data/none" in failed.stderr
    assert "recorded as seed-7_path-data-tiny" in failed.stdout
    wrong = workspace.run("safetrain", "run", "train.seed=9,10", "train.learning_rate=1e-3,5")
    assert (wrong.returncode, "Running stage" in wrong.stdout) == (2, False)
    assert "train.learning_rate = 5.0; allowed" in wrong.stderr
    assert params_of(workspace) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_training_and_puts_the_values_back(
    workspace: Workspace, before: bytes, number: int, code: int
) -> None:
    process = start(workspace, f"train.seed={number + 100}", "train.max_steps=400")
    wait_for_training(workspace)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, params_of(workspace)) == (code, before)
    assert f"train.seed={number + 100} train.max_steps=400" in stderr.decode()  # the command that continues
    assert "train.seed" not in workspace.git("log", "-1", "--format=%s", "HEAD")
    workspace.cli("discard")


def test_after_a_kill_the_values_have_a_name_and_a_second_run_is_refused(workspace: Workspace, before: bytes) -> None:
    words = ("train.seed=21", "train.max_steps=150")
    process = start(workspace, *words)
    wait_for_training(workspace)
    second = workspace.run("safetrain", "run", "train.seed=1")
    assert (second.returncode, f"Another run uses this project (process {process.pid})" in second.stderr) == (6, True)
    assert workspace.run("safetrain", "set", "train.seed=1").returncode == 6
    kill_all(workspace, process)
    assert params_of(workspace) != before
    said = workspace.run("safetrain", "diagnose").stderr
    assert "params.yaml holds values of 'safetrain run train.seed=21 train.max_steps=150', which was killed" in said
    assert "train.seed=21 (before: 42)" in workspace.run("dvc", "repro", "-s", "preflight").stderr
    again = workspace.succeed("safetrain", "run", *words)
    assert "this run continues it" in again
    assert "continuing from step" in again
    assert params_of(workspace) == before


def test_another_command_after_a_kill_puts_the_values_back(workspace: Workspace, before: bytes) -> None:
    process = start(workspace, "train.seed=22")
    wait_for(lambda: b"seed: 22 " in params_of(workspace), "the values", 120)  # the record is there before
    kill_all(workspace, process)
    said = workspace.succeed("safetrain", "set", "train.seed=5")
    assert "to continue it: safetrain run train.seed=22" in said
    assert params_of(workspace) == before.replace(b"seed: 42 ", b"seed: 5  ")
    workspace.git("checkout", "-q", "params.yaml")


def test_an_edit_during_a_stage_is_not_recorded_with_its_result(workspace: Workspace, before: bytes) -> None:
    process = start(workspace, "train.seed=31", "train.max_steps=100")
    wait_for_training(workspace)
    params = workspace.folder / "params.yaml"
    params.write_text(with_value(params.read_text(), "train.learning_rate", 5e-4))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "train.learning_rate changed in params.yaml while train ran" in stderr.decode()
    assert params_of(workspace).decode() == with_value(before.decode(), "train.learning_rate", 5e-4)  # the edit stays
    assert trained_with((workspace.folder / "dvc.lock").read_text())["train.learning_rate"] == 1e-3
    workspace.git("checkout", "-q", "params.yaml")


def test_it_works_without_git(workspace: Workspace, before: bytes, tmp_path: Path) -> None:
    """In a folder that is in no repository, and on a machine without the program; DVC is set up if it is missing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "bash", "env", "python", "cat", "uname"):
        if (path := shutil.which(name, path=workspace.environment["PATH"])) is not None:
            (programs / name).symlink_to(path)
    for number, (missing, path) in enumerate(((".git", workspace.environment["PATH"]), ("git", str(programs)))):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(workspace.folder, folder, ignore=shutil.ignore_patterns("checkpoints_qlora", ".dvc", ".git"))
        if missing == "git":
            shutil.copytree(workspace.folder / ".git", folder / ".git")
        program = shutil.which("safetrain", path=workspace.environment["PATH"]) or ""
        environment = {**workspace.environment, "PATH": path}
        done = subprocess.run(
            [program, "run", "train.seed=7"], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Experiments are not recorded: ") == 1
        assert "Trained 4 steps" in done.stdout
        assert trained_with((folder / "dvc.lock").read_text())["train.seed"] == 7
        assert (folder / "params.yaml").read_bytes() == before
        listed = subprocess.run(
            [program, "runs"], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        assert re.search(r"workspace .*train\.seed=7(.|\n)*not recorded", listed.stdout)


def test_a_run_without_values_is_recorded_under_a_name_and_a_plan_trains_nothing(workspace: Workspace) -> None:
    summary = workspace.folder / "checkpoints_qlora/training_summary.json"
    workspace.succeed("safetrain", "run", "--name=plain")
    before = summary.read_bytes()
    workspace.succeed("safetrain", "run", "--plan", "train.batch_size=8", "train.gradient_accumulation=2")
    assert workspace.json("recommended_config.json")["settings"]["batch_size"] == 8
    assert summary.read_bytes() == before
    assert workspace.cli("runs").count("plain ") == 1
    told = json.loads(workspace.cli("runs", "--json"))
    rows = {row["run"]: row for row in told["runs"]}
    assert set(rows) >= {"workspace", "plain", "minimal_seed-7"}
    assert rows["plain"]["test_loss"] == rows["workspace"]["test_loss"]
    assert "train.seed=7" in rows["minimal_seed-7"]["values"].split()


def test_missing_data_is_said_with_a_remedy_and_dvc_s_own_errors_are_quoted(workspace: Workspace) -> None:
    missing = workspace.run("safetrain", "run", "data.path=data/tinny")
    assert (missing.returncode, "did you mean data/tiny?" in missing.stderr) == (3, True)
    missing = workspace.run("safetrain", "run", "model.path=owner/name")
    assert (missing.returncode, "safetrain fetch owner/name" in missing.stderr) == (4, True)
    pipeline = workspace.folder / "dvc.yaml"
    text = pipeline.read_text()
    pipeline.write_text(text.replace("    cmd: python -m stages.plot\n", ""))
    broken = workspace.run("safetrain", "run", "train.seed=3")
    pipeline.write_text(text)
    assert (broken.returncode, re.search("DVC stopped: .*dvc.yaml", broken.stderr) is not None) == (1, True)
