"""What `safetrain track` sends, by W&B's own package."""

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.records.metrics import csv_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_text
from safetrain.watch.run_folder import read_run
from safetrain.watch.trackers import FOLDER, export
from tests.conftest import ROOT
from tests.watch.made_run import evaluation, make_run, sample, steps

ROW = "the capital of Ruritania"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose training has recorded four steps and is evaluated."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "SAFETRAIN_LOCK_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    make_run(tmp_path, found=evaluation((sample(ROW),)))
    write_text(paths.METRICS_CSV, csv_of(steps(3)))
    return tmp_path


def test_steps_and_results_are_sent_without_rows(run: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    assert "4 steps and 20 results sent to" in export(read_run())
    content = b"".join(path.read_bytes() for path in FOLDER.rglob("*") if path.is_file())
    assert (b"tuned/loss" in content, b"valid_loss" in content, ROW.encode() in content) == (True, True, False)


def test_mistakes_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        return str(CliRunner().invoke(app, ["track"]).exception)

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "wandb is not installed" in said()
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    start = f"do:       uv pip install --python {sys.executable} "
    assert said().endswith(start + shlex.join(["-e", f"{ROOT}[wandb]", "-c", f"{ROOT}/constraints.txt"]))
    monkeypatch.setattr("safetrain.core.formatting.shipped", run.joinpath)  # an installed program has none
    assert said().endswith(f"{start}wandb")
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert "install uv (docs.astral.sh/uv), then: uv pip install" in said()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "pip" or None)
    assert said().endswith(f"do:       {sys.executable} -m pip install wandb")
