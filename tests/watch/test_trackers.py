"""`safetrain track` with the real packages, offline: what was recorded is in the tracker."""

import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.lock import training_lock
from safetrain.core.records.metrics import append_csv, start_csv
from safetrain.core.storage import paths
from safetrain.watch.trackers import FOLDER, Target, export, follow
from tests.conftest import ROOT
from tests.watch.made_run import UPDATES, evaluation, make_run, sample, steps

TRACKERS = ("wandb", "mlflow", "tensorboard")
ROW, PASSWORD = "the capital of Ruritania", "hunter2"
Found = dict[str, list[tuple[int, float]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose training has recorded four steps; its results are set aside."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "SAFETRAIN_LOCK_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    make_run(tmp_path, found=evaluation((sample(ROW),)))
    for path in (paths.SUMMARY, paths.EVALUATION):
        path.rename(path.name)
    start_csv(paths.METRICS_CSV, steps(3))
    return tmp_path


def end() -> None:
    """Let the training record two more steps, end and be evaluated."""
    for record in steps(5)[4:]:
        append_csv(paths.METRICS_CSV, record)
    for path in (paths.SUMMARY, paths.EVALUATION):
        Path(path.name).rename(path)


def in_mlflow() -> Found:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}")
    (experiment,) = client.search_experiments(filter_string="name = 'safetrain'")
    found: Found = {}
    for each in client.search_runs([experiment.experiment_id]):
        for name in each.data.metrics:
            history = client.get_metric_history(each.info.run_id, name)
            found.setdefault(name, []).extend((metric.step, metric.value) for metric in history)
    return found


def in_tensorboard() -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Found = {}
    for folder in sorted({path.parent for path in FOLDER.rglob("events.*")}):
        read = EventAccumulator(str(folder))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in read.Scalars(name))
    return found


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_running_training_and_its_end_are_sent_without_rows(run: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    assert "4 steps sent to" in export(Target(tracker, name="mine"))
    assert export(Target(tracker, name="mine")) == f"{tracker} is up to date"
    end()
    assert "2 steps and 14 results sent to" in export(Target(tracker))
    content = b"".join(path.read_bytes() for path in FOLDER.rglob("*") if path.is_file())
    assert (b"test/tuned_loss" in content, b"loss/valid" in content, ROW.encode() in content) == (True, True, False)


@pytest.mark.parametrize(("tracker", "read"), [("mlflow", in_mlflow), ("tensorboard", in_tensorboard)])
def test_a_continued_training_stays_one_run_and_another_becomes_one(
    run: Path, tracker: str, read: Callable[[], Found]
) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    state = FOLDER / f"{tracker}.json"
    export(Target(tracker))
    first = json.loads(state.read_text())
    state.write_text(json.dumps(first | {"last_step": 1}))  # an export that was killed before it wrote this down
    start_csv(paths.METRICS_CSV, steps(2))  # continued from a checkpoint
    export(Target(tracker))
    append_csv(paths.METRICS_CSV, steps(3)[3])
    end()
    export(Target(tracker))
    found = read()
    assert [step for step, _ in found["loss/train"]] == [0, 1, 2, 3, 4, 5]
    assert [(step, round(value, 4)) for step, value in found["loss/valid"]] == [(0, 3.2), (5, 1.6)]
    assert [value for name in ("test/tuned_loss", "result/steps") for _, value in found[name]] == [1.5, UPDATES]
    start_csv(paths.METRICS_CSV, steps(9)[2:])
    assert "8 steps" in export(Target(tracker))
    assert json.loads(state.read_text())["run_id"] != first["run_id"]


def test_it_follows_a_training_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    lines = list[str]()
    with contextlib.ExitStack() as training:
        training.enter_context(training_lock(paths.OUTPUT))
        training.callback(end)
        monkeypatch.setattr("time.sleep", lambda _seconds: training.close())
        follow(Target("tensorboard"), 5.0, lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        "4 steps sent to tensorboard", "2 steps and 14 results sent to tensorboard"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["../../evil", "/evil", ".."])
def test_mistakes_are_named(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "without a slash" in str(CliRunner().invoke(app, ["track", "tensorboard", "--name", name]).exception)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "wandb is not installed" in str(CliRunner().invoke(app, ["track", "wandb"]).exception)


def test_a_server_that_does_not_answer_is_told_without_its_password(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with pytest.raises(ConfigError, match="MLflow refused the run") as raised:
        export(Target("mlflow", f"http://me:{PASSWORD}@127.0.0.1:9"))
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))


def test_no_tracker_is_imported_until_one_is_asked_for() -> None:
    script = f"import sys, safetrain.watch.trackers\nprint(*set(sys.modules) & set({TRACKERS}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""
