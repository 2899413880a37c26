"""Preflight as people meet it: each fault is found in one run, with what is needed and one remedy; nothing is lost."""

import json
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("doctor"))
    for stage in ("validate_data", "preflight"):  # which keeps what it has found of the model
        assert made.stage(stage).returncode == 0
    return made


def examine(workspace: Workspace, *overrides: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """At level quick; the process and its checks by id."""
    done = workspace.stage("preflight", "preflight.level=quick", *overrides)
    return done, {check["id"]: check for check in workspace.json("preflight_report.json")["checks"]}


def test_all_is_well_is_exit_0_and_json_is_only_json(workspace: Workspace) -> None:
    done = workspace.run("safetrain", "preflight", "preflight.level=quick", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"], report["status"]) == (0, 0, "pass")
    fit = next(check for check in report["checks"] if check["id"] == "MEM-FIT")
    assert (fit["status"], fit["needed"][:8]) == ("pass", "at most ")


def test_half_a_model_is_named_with_everything_else_still_checked(workspace: Workspace) -> None:
    cut = workspace.folder / "models" / "cut"
    workspace.succeed("cp", "-r", "models/encyclopedia-3m", str(cut))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:100_000])
    done, checks = examine(workspace, "model.path=models/cut")
    assert (done.returncode, "error: Checks failed: MODEL-FILES." in done.stderr) == (1, True)
    status = [checks[name]["status"] for name in ("MODEL-FILES", "MEM-FIT", "DATA-FILES")]
    assert status == ["fail", "skip", "pass"]
    assert "1929349 bytes, by its header" in checks["MODEL-FILES"]["needed"]
    assert "safetrain fetch" in checks["MODEL-FILES"]["remedy"]


def test_too_little_memory_under_a_limit_of_the_shell(workspace: Workspace) -> None:
    limited = subprocess.run(
        ["python", "-m", "stages.preflight", "preflight.level=quick"], cwd=workspace.folder,
        env=workspace.environment,  # with one thread of the BLAS: each takes 32 MiB
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (330 * 2**20, 330 * 2**20)),
    )  # fmt: skip
    assert (limited.returncode, "HW-RAM" in limited.stderr) == (1, True)
    assert "ulimit -d is 330.0 MiB" in limited.stdout


def test_what_comes_nowhere_near_fitting_fails_and_a_typo_is_told(workspace: Workspace) -> None:
    done, checks = examine(workspace, "train.memory_limit_gb=0.18")
    assert (done.returncode, checks["MEM-FIT"]["status"]) == (1, "fail")
    assert "with margin, at batch size 1" in checks["MEM-FIT"]["found"]
    assert checks["MEM-FIT"]["remedy"]
    done = workspace.stage("preflight", "preflight.downgrade=[MEM-FTI]")
    assert (done.returncode, "MEM-FIT" in done.stderr) == (2, True)


def test_without_data_the_rest_is_checked_and_machine_json_stays(workspace: Workspace) -> None:
    report, machine = (workspace.folder / "checkpoints_qlora" / f"{name}.json" for name in ("data_report", "machine"))
    kept, before = report.read_text(), machine.read_text()
    assert examine(workspace, "data.path=nothing")[1]["DATA-FILES"]["found"] == "data.path does not exist; nothing"
    report.unlink()
    shutil.rmtree(report.parent / "last_result", ignore_errors=True)  # as before the first validation
    done, checks = examine(workspace)
    report.write_text(kept)
    assert (done.returncode, checks["DATA-FILES"]["status"], checks["MEM-FIT"]["status"]) == (1, "fail", "skip")
    assert "safetrain run" in checks["DATA-FILES"]["remedy"]
    assert Path(machine).read_text() == before
