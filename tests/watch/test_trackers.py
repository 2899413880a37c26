"""`safetrain track` against the real packages, offline: what was recorded is there, each step once."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetrain.core.protocol.marker import RunMarker
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.recorder import boot_id
from safetrain.core.records.metrics import StepRecord, append_csv, start_csv
from safetrain.core.records.record_files import write_record
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT, JOB, MARKER
from safetrain.watch.trackers.export import describe, export, export_apart, follow
from safetrain.watch.trackers.sent import FOLDER, Target, path_of
from safetrain.watch.trackers.tracked import read_tracked
from tests.conftest import ROOT

TRACKERS = ("wandb", "mlflow", "tensorboard")
PASSWORD = "hunter2"
ROW = "the capital of Ruritania"


def record(step: int, *, valid: float | None = None) -> StepRecord:
    trained = 0.5 + 1 / (1 + step) if step else None
    return StepRecord(step, step / 10, trained, valid, 1e-4, 1.0, 7 * step, 99.0, 2**28, 2**29, 2.0 * step)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose training has come to step 3."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "params.yaml").write_text("data: {path: x}\n", encoding="utf-8")
    flight = paths.OUTPUT / FLIGHT
    flight.mkdir(parents=True)
    settings = {"method": "lora", "learning_rate": 1e-4, "lora": {"rank": 8, "targets": ["all-linear"]}}
    (flight / JOB).write_text(json.dumps({"base": "/home/me/models/tiny", "settings": settings}), encoding="utf-8")
    marks(os.getpid())
    start_csv(paths.METRICS_CSV, [record(0, valid=2.5), record(1), record(2, valid=1.5), record(3)])
    return tmp_path


def marks(supervisor: int) -> None:
    """A training runs, with this process for its supervisor."""
    write_record(paths.OUTPUT / FLIGHT / MARKER, RunMarker(boot_id(), "safetrain run", time.time(), 0.0, supervisor))


def ends(*, loss: float = 0.75) -> None:
    """The training goes on to step 5, ends, and is evaluated."""
    append_csv(paths.METRICS_CSV, record(4))
    append_csv(paths.METRICS_CSV, record(5, valid=1.25))
    paths.SUMMARY.write_text("{}", encoding="utf-8")
    paths.METRICS_JSON.write_text(json.dumps({"best_valid_loss": 1.25, "steps": 5}), encoding="utf-8")
    scores = {"base": {"loss": 2.5}, "tuned": {"loss": loss, "exact_match": None}, "samples": [{"question": ROW}]}
    paths.EVALUATION.write_text(json.dumps(scores | {"improvement": {"nats_per_label": 1.75}}), encoding="utf-8")
    (paths.OUTPUT / FLIGHT / MARKER).unlink()


def there(tracker: str) -> dict[str, list[tuple[int, float]]]:
    """What the tracker's own package reads of its files: (step, value) by name, as they were written."""
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    return {"wandb": in_wandb, "mlflow": in_mlflow, "tensorboard": in_tensorboard}[tracker]()


def in_wandb() -> dict[str, list[tuple[int, float]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(FOLDER.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in records_of(path.read_bytes()):
            one = Record()
            one.ParseFromString(data)
            values = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            for name in values.keys() - {"_step", "_timestamp", "_runtime"}:
                found.setdefault(name, []).append((one.history.step.num, values[name]))
            for item in one.summary.update:
                name = "".join(item.nested_key) or item.key
                if name.startswith(("test/", "result/")):
                    found.setdefault(name, []).append((0, json.loads(item.value_json)))
    return found


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log format, whose blocks of 32 KiB count from the file's beginning."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:  # no room for a record's head
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def in_mlflow() -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}")
    (experiment,) = client.search_experiments(filter_string="name = 'safetrain'")
    found: dict[str, list[tuple[int, float]]] = {}
    for each in client.search_runs([experiment.experiment_id]):
        for name in each.data.metrics:
            found.setdefault(name, []).extend(
                (metric.step, metric.value) for metric in client.get_metric_history(each.info.run_id, name)
            )
    return found


def in_tensorboard() -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for folder in sorted({path.parent for path in FOLDER.rglob("events.*")}):
        read = EventAccumulator(str(folder))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in read.Scalars(name))
    return found


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_running_training_and_its_end_are_there_once(run: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    target = Target(tracker, name="mine")
    assert "4 steps sent to" in describe(target, export(target))
    assert describe(target, export(target)) == f"{tracker} has everything already"
    ends()
    assert "2 steps and 5 results sent to" in describe(target, export(target))
    assert export(target).where == ""
    found = there(tracker)
    assert found["loss/valid"] == [(0, 2.5), (2, 1.5), (5, 1.25)]
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in found["test/tuned_loss"]] == [0.75]
    assert [value for _, value in found["test/nats_per_label_gained"]] == [1.75]
    for path in FOLDER.rglob("*"):
        assert not path.is_file() or ROW.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("tracker", TRACKERS)
def test_an_export_that_was_cut_off_is_sent_again_once(run: Path, tracker: str) -> None:
    """Killed after it had sent everything, before it wrote that down."""
    if tracker == "wandb":
        pytest.skip("offline, W&B's second file has the step too; its server keeps the first")
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    target = Target(tracker)
    export(target)
    state = json.loads(path_of(tracker).read_text())
    path_of(tracker).write_text(json.dumps(state | {"last_step": 1}), encoding="utf-8")
    export(target)
    assert [step for step, _ in there(tracker)["loss/train"]] == [1, 2, 3]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resumed_training_goes_on_and_a_new_one_is_a_new_run(run: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    target = Target(tracker)
    export(target)
    first = json.loads(path_of(tracker).read_text())["run_id"]
    start_csv(paths.METRICS_CSV, [record(0, valid=2.5), record(1), record(2, valid=1.5)])  # from the checkpoint at 2
    assert export(target).steps == 0
    append_csv(paths.METRICS_CSV, record(3))
    append_csv(paths.METRICS_CSV, record(4))
    assert export(target).steps == 1
    assert json.loads(path_of(tracker).read_text())["run_id"] == first
    assert [step for step, _ in there(tracker)["loss/train"]] == [1, 2, 3, 4]
    start_csv(paths.METRICS_CSV, [record(0, valid=2.5), record(2)])
    assert export(target).steps == 2
    assert json.loads(path_of(tracker).read_text())["run_id"] != first


def test_it_follows_a_training_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    said = list[str]()
    happens = iter([ends, lambda: None])
    monkeypatch.setattr("time.sleep", lambda _seconds: next(happens)())
    follow(Target("tensorboard"), 5.0, said.append)
    assert [line.partition(":")[0] for line in said] == [
        "4 steps sent to tensorboard", "2 steps and 5 results sent to tensorboard"
    ]  # fmt: skip


def test_it_follows_a_training_over_a_rung(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two processes of one run there is no marker for a moment."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    said, marker = list[str](), paths.OUTPUT / FLIGHT / MARKER
    happens = iter([marker.unlink, lambda: marks(os.getpid()), ends, lambda: None])
    monkeypatch.setattr("time.sleep", lambda _seconds: next(happens)())
    follow(Target("tensorboard"), 5.0, said.append)
    assert "2 steps and 5 results" in said[-1]


def test_it_does_not_follow_the_dead(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that was killed leaves its marker, and so does a machine that lost power."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    marks(killed.pid)
    monkeypatch.setattr("time.sleep", lambda _seconds: pytest.fail("it waits for nobody"))
    follow(Target("tensorboard"), 5.0, lambda _text: None)


def test_a_line_that_is_being_written_is_left_for_the_next_time(run: Path) -> None:
    with paths.METRICS_CSV.open("a", encoding="utf-8") as file:
        file.write("4,0.4,0.")
    assert [step.step for step in read_tracked().steps] == [0, 1, 2, 3]


def test_what_was_sent_is_not_read_again(run: Path) -> None:
    """A run may have a million steps, and an export follows it every few seconds."""
    steps = [record(step) for step in range(1, 400)]
    start_csv(paths.METRICS_CSV, steps)
    read = read_tracked()
    assert [step.step for step in read.steps] == list(range(1, 400))
    assert read.steps.read_bytes == paths.METRICS_CSV.stat().st_size
    content = paths.METRICS_CSV.read_bytes()
    middle = content.index(b"\n200,") + 1
    paths.METRICS_CSV.write_bytes(content[:middle] + b"!" + content[middle + 1 :])  # who reads this again, fails
    append_csv(paths.METRICS_CSV, record(400))
    again = read_tracked(399, read.identity, read.steps.read_bytes)
    assert [step.step for step in again.steps] == [400]
    start_csv(paths.METRICS_CSV, [*steps[:100], *(record(step) for step in range(101, 402))])  # written anew: longer
    anew = read_tracked(400, read.identity, read.steps.read_bytes)
    assert [step.step for step in anew.steps] == [401]


def test_long_metrics_are_read_in_pieces(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.watch.trackers.new_steps.PIECE_BYTES", 300)
    start_csv(paths.METRICS_CSV, [record(step) for step in range(100)])
    read = read_tracked(40, read_tracked().identity)
    assert [step.step for step in read.steps] == list(range(41, 100))
    assert (read.steps.count, read.steps.last_step) == (59, 99)


def test_scores_of_the_run_before_are_not_those_of_this_one(run: Path) -> None:
    ends()
    assert len(read_tracked().results) == 5
    later = paths.EVALUATION.stat().st_mtime + 10
    os.utime(paths.SUMMARY, (later, later))  # trained again, and not yet evaluated
    assert {scalar.name for scalar in read_tracked().results} == {"result/best_valid_loss", "result/steps"}


def test_without_steps_or_package_it_says_what_to_do(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    done = CliRunner().invoke(app, ["track", "wandb"])
    assert "package wandb is not installed" in str(done.exception)
    start_csv(paths.METRICS_CSV, [record(0, valid=2.5)])
    with pytest.raises(ConfigError, match="No training step was recorded"):
        read_tracked()


@pytest.mark.parametrize("name", ["../../evil", "/evil", ".."])
def test_a_name_is_no_path(run: Path, name: str) -> None:
    """TensorBoard's folder of a run has its name."""
    done = CliRunner().invoke(app, ["track", "tensorboard", "--name", name])
    assert "The name of a run has no / in it" in str(done.exception)
    assert not list(run.parent.rglob("events.out.tfevents.*"))


class MlflowServer(ThreadingHTTPServer):
    """Takes everything, as an MLflow server does; or nothing."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__(("127.0.0.1", 0), MlflowAnswers)
        self.takes, self.asked, self.authorized = takes, list[str](), list[str]()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class MlflowAnswers(BaseHTTPRequestHandler):
    """The few answers that an export reads."""

    server: MlflowServer

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def answer(self) -> None:
        self.server.asked.append(self.path)
        self.server.authorized.append(self.headers.get("Authorization", ""))
        info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
        found = {"experiment": {"experiment_id": "1", "name": "safetrain"}, "run": {"info": info, "data": {}}}
        body = json.dumps(found | {"run_info": info}).encode()
        self.send_response(200 if self.server.takes else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def mlflow_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], MlflowServer]]:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    servers = list[MlflowServer]()
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "")  # put back afterwards
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}")

    def serve(takes: bool) -> MlflowServer:
        servers.append(MlflowServer(takes=takes))
        address = f"http://me:{PASSWORD}@127.0.0.1:{servers[-1].server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_mlflow_s_password_is_used_and_neither_shown_nor_stored(
    run: Path, mlflow_at: Callable[[bool], MlflowServer]
) -> None:
    server, target = mlflow_at(True), Target("mlflow")
    said = describe(target, export(target))
    assert f"in http://127.0.0.1:{server.server_port}" in said
    assert all(server.authorized)
    for told in (said, *(path.read_text() for path in FOLDER.rglob("*.json"))):
        assert PASSWORD not in told
    assert export(target).where == ""  # it knows the place again


def test_an_mlflow_that_does_not_answer_is_told_soon_and_without_its_password(
    run: Path, mlflow_at: Callable[[bool], MlflowServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, MLflow asks seven times more, for almost five minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    server = mlflow_at(False)
    with pytest.raises(ConfigError, match="MLflow did not take it") as raised:
        export(Target("mlflow"))
    assert len(server.asked) <= 3
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))


def test_a_tracker_that_fails_does_not_fail_the_stage(run: Path) -> None:
    """`watch.export`: the training is done, and its result is not lost for want of a server."""
    paths.METRICS_CSV.unlink()
    said = export_apart("tensorboard")
    assert said.startswith("warning: not sent to tensorboard; again: safetrain track tensorboard\nerror: ")


def test_no_tracker_is_imported_by_a_stage_or_by_the_training() -> None:
    script = "import sys, stages.plot, safetrain.watch.trackers.export\nimport safetrain.engine.worker\n"
    script += f"print(*sorted(set(sys.modules) & set({TRACKERS})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""
