"""Data and models that people add to DVC: in a clone and in a project of `safetrain init`, nothing of them is lost."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pipeline.workspace import Workspace
from tests.support.random_models import TINY, build_model

ONE, TWO, MODEL = "data/días (1) [x]=y.jsonl", "data/two.jsonl", "models/mödel [4bit]=a (1)"


@pytest.fixture(params=["clone", "project"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path)
    if request.param == "project":
        made.succeed("safetrain", "init", str(tmp_path / "mine"))
        made.folder = tmp_path / "mine"
    rows = (ROOT / "data/example/train.jsonl").read_text().splitlines(keepends=True)
    for name, count in ((ONE, 40), (TWO, 60)):
        (made.folder / name).write_text("".join(rows[:count]))
    build_model(made.folder / MODEL, **TINY)
    made.set_values({"data.path": ONE, "model.path": MODEL})
    return made


def test_what_is_added_is_pushed_collected_and_comes_back(workspace: Workspace) -> None:
    added, folder = [ONE, TWO, MODEL], workspace.folder
    workspace.succeed("dvc", "add", *added)
    assert workspace.git("status", "--short", "-uall", "data", "models").count(".dvc") == len(added)
    workspace.git("config", "user.name", "Test")
    workspace.git("config", "user.email", "test@localhost")
    workspace.commit("my data")
    workspace.succeed("dvc", "remote", "add", "-q", "-d", "store", str(folder.parent / "store"))
    workspace.commit("a remote")
    assert "pushed" in workspace.succeed("dvc", "push")
    for lose in (lambda: None, lambda: shutil.rmtree(folder / ".dvc/cache")):
        (folder / ONE).unlink()
        (folder / TWO).unlink()
        shutil.rmtree(folder / MODEL)
        workspace.succeed("dvc", "gc", "--workspace", "--force")
        lose()
        workspace.run("dvc", "pull", "--force")  # fails, because no stage has run yet
        assert all((folder / name).exists() for name in (ONE, TWO, f"{MODEL}/config.json"))
    assert "no model" not in workspace.succeed("safetrain", "estimate", MODEL)
    stage = ("safetrain", "stage", "validate_data") if (folder / ".safetrain").is_dir() else None
    workspace.succeed(*(stage or ("python", "-m", "stages.validate_data")), f"data.path={ONE}")
    workspace.succeed("dvc", "repro", "validate_data")
    report = workspace.json("data_report.json")
    assert (report["source"], sum(report[split]["rows"] for split in ("train", "valid", "test"))) == (ONE, 40)
