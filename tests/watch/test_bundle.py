"""What leaves the machine: a bug report of numbers and fixed words; what `safetrain track` sends, by real packages."""

import json
import re
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.records.metrics import start_csv
from safetrain.core.records.reports import Finding
from safetrain.core.records.settings import TrainJob
from safetrain.core.run_folder import RunMarker, read_run
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.watch.bundle import CAUSES
from safetrain.watch.trackers import FOLDER, export
from tests.conftest import ROOT
from tests.support.settings import SETTINGS
from tests.watch.made_run import DEATH, PLAN, UPDATES, data_report, evaluation, make_run, sample, steps

ROW, NAME, PATH = "Whose birthday is on the ninth of Thermidor", "marguerite", "/home/marguerite/models/x"
TOKEN, HOST = "hf_abcdefGHIJKL0123456789xyz", "atelier-42.example.org"
PLANTED = (ROW, NAME, PATH, TOKEN, HOST)


def plant(value: Any, *, whole: bool) -> Any:
    """The record with something planted in every text, after it or in its place."""
    if isinstance(value, dict):
        return {key: item if key == "adapter" else plant(item, whole=whole) for key, item in value.items()}
    if isinstance(value, list):
        return [plant(item, whole=whole) for item in value]
    return (NAME if whole else f"{value} {' '.join(PLANTED)}") if isinstance(value, str) else value


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with every record, on a machine with the planted names."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": PATH, "USER": NAME, "HF_TOKEN": TOKEN, "HOSTNAME": HOST}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("platform.node", lambda: HOST)
    output = make_run(tmp_path)
    recorder = Recorder(output / "flight" / "recorder.bin")
    recorder.device(NAME)
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(12))
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(12, 1, 4, 512, (7, 8)))
    write_record(output / "postmortem.json", DEATH)
    write_record(output / "data_report.json", data_report((Finding("NEAR-COPIES", "warning", 3, (ROW,), ROW, NAME),)))
    write_record(output / "flight" / "job.json", TrainJob(PATH, SETTINGS, True, MemoryBudget(9), None))
    write_record(output / "flight" / "run.json", RunMarker(TOKEN, f"dvc repro {ROW}", 1.0, 1.0, 9, NAME))
    texts = ({"type": "Said", "text": ROW}, {"type": "Died", "title": NAME, "step": 12})
    lines = (json.dumps(event | {"wall_seconds": 1.0, "monotonic_seconds": 1.0}) for event in texts)
    (output / "flight" / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return output


def bundled() -> tuple[str, dict[str, str]]:
    """What `safetrain diagnose --bundle` prints, and the files that it writes."""
    done = CliRunner().invoke(app, ["diagnose", "--bundle", "bug.zip"], catch_exceptions=False)
    with zipfile.ZipFile("bug.zip") as file:
        return done.output, {name: file.read(name).decode() for name in file.namelist()}


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_that_is_planted_is_in_it(output: Path, whole: bool) -> None:
    for path in output.rglob("*.json"):
        path.write_text(json.dumps(plant(json.loads(path.read_text()), whole=whole)))
    _, files = bundled()
    assert len(files) == 2
    for name, text in files.items():
        assert not [each for each in PLANTED if each.casefold() in text.casefold()], f"{name}: {text}"


def test_it_says_what_is_in_it_and_replaces_nothing(output: Path) -> None:
    told, files = bundled()
    assert all(name in told for name in files)
    assert "Look at it before you send it" in told
    run = json.loads(files["run.json"])
    death = run["postmortem"]
    assert (death["cause"], death["phase"], death["confidence"]) == ("oom_kill", "gradient", "confirmed")
    assert (death["step"], death["footprint_bytes"], "evidence" in death) == (17, DEATH.footprint_bytes, False)
    settings = run["summary"]
    assert (settings["method"], settings["lora"]["targets"]) == ("lora", ["all-linear"])
    assert run["plan"]["predicted_peak_bytes"] == PLAN.predicted_peak_bytes
    assert json.loads(files["machine.json"])["packages"]["mlx"]
    assert run["data"]["findings"] == [{"id": "NEAR-COPIES", "severity": "warning", "count": 3}]
    assert run["evaluation"]["improvement"]["nats_per_label"] == 1.5
    assert [record["phase"] for record in run["flight"]] == ["GRADIENT"] * 2
    assert (run["events"], len(run["steps"])) == (["Said", "Died"], UPDATES + 1)
    (output / "postmortem.json").write_text("[1, 2")  # damaged records are named and end nothing
    (output / "flight" / "recorder.bin").write_bytes(b"SAFETRN1")
    Path("bug.zip").unlink()
    assert json.loads(bundled()[1]["run.json"])["unreadable"] == ["postmortem.json"]
    for name, words in {"bug.zip": "already exists", "bug.txt": "name it bug.zip"}.items():
        assert words in str(CliRunner().invoke(app, ["diagnose", "--bundle", name]).exception)


def test_every_cause_of_a_death_may_be_told() -> None:
    guard = "".join(path.read_text() for path in (ROOT / "safetrain" / "guard").glob("*.py"))
    assert set(re.findall(r'Cause\(\s*"(\w+)"', guard)) == set(CAUSES)


TRACKERS = ("wandb", "mlflow", "tensorboard")
ROW, PASSWORD = "the capital of Ruritania", "hunter2"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose training has recorded four steps and is evaluated."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "SAFETRAIN_LOCK_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    make_run(tmp_path, found=evaluation((sample(ROW),)))
    start_csv(paths.METRICS_CSV, steps(3))
    return tmp_path


@pytest.mark.parametrize("tracker", TRACKERS)
def test_steps_and_results_are_sent_without_rows(run: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    assert "4 steps and 14 results sent to" in export(tracker, read_run(), name="mine")
    content = b"".join(path.read_bytes() for path in FOLDER.rglob("*") if path.is_file())
    assert (b"test/tuned_loss" in content, b"loss/valid" in content, ROW.encode() in content) == (True, True, False)


def test_mistakes_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "wandb is not installed" in str(CliRunner().invoke(app, ["track", "wandb"]).exception)


def test_a_server_that_does_not_answer_is_told_without_its_password(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with pytest.raises(ConfigError, match="MLflow refused the run") as raised:
        export("mlflow", read_run(), f"http://me:{PASSWORD}@127.0.0.1:9")
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))
