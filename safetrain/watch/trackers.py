"""Send a recorded run to W&B, MLflow or TensorBoard: settings, steps, scores; never rows or answers.

The training process knows nothing of it. checkpoints_qlora/trackers/NAME.json remembers the last step that a tracker
has; an export that is interrupted sends some steps again, to the same run, with the same number and time.
"""

import dataclasses
import hashlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.lock import is_locked
from safetrain.core.records.metrics import StepRecord
from safetrain.core.run_folder import Run, RunReader, read_run
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_record, write_record

FOLDER = paths.OUTPUT / "trackers"
PROJECT = "safetrain"  # W&B's project, MLflow's experiment
MLFLOW_HERE = f"sqlite:///{FOLDER / 'mlflow.db'}"
MLFLOW_BATCH = 100  # steps per request: MLflow accepts 1000 numbers
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # default: 5 minutes
CREDENTIALS = re.compile(r"//[^/\s]*@")  # in a URL
MACHINE_FACTS = ("backend", "chip", "device", "system", "mlx", "mlx_lm", "total_memory_bytes")
SCORES = ("loss", "exact_match", "token_f1", "chrf")
GIB = 2**30

Settings = dict[str, Any]
Point = tuple[int, float, dict[str, float]]  # step, wall clock in seconds, numbers by name


@dataclass(frozen=True)
class Target:
    """A tracker, and the place of runs in it. Empty: the tracker's default."""

    tracker: str
    place: str = ""  # project of W&B, address of MLflow, folder of TensorBoard
    name: str = ""  # of the run


@dataclass(frozen=True)
class TrackerProgress:
    """trackers/NAME.json: what a tracker has received of a run."""

    run_id: str  # the same while a training is continued
    place: str
    began_seconds: float  # wall clock: a step has the same time whenever it is sent
    last_step: int = -1
    results: dict[str, float] = field(default_factory=dict)


def export(target: Target, run: Run | None = None) -> str:
    """Send what the tracker lacks, and describe it in a line. Raises ConfigError, OSError."""
    tracker, run = target.tracker, run or read_run()
    if importlib.util.find_spec(tracker) is None:
        raise ConfigError(f"{tracker} is not installed.", do=f"pip install -e '.[{tracker}]' -c constraints.txt")
    first = next((record for record in run.steps if record.step), None)
    if first is None:
        raise ConfigError("No step is recorded yet.", where=str(paths.METRICS_CSV), do="train first: safetrain run")
    path, last = FOLDER / f"{tracker}.json", run.steps[-1]
    began = run.journal[0].wall_seconds if run.journal else run.read_at_seconds - last.elapsed_seconds
    run_id = hashlib.sha256(repr(first).encode()).hexdigest()[:16]  # its time and speed make it unique
    progress = TrackerProgress(run_id, CREDENTIALS.sub("//", _place(target)), began)
    with suppress(OSError, ValueError, TypeError):  # nothing sent yet, or by an older version
        before = read_record(path, TrackerProgress)
        progress = before if (before.run_id, before.place) == (progress.run_id, progress.place) else progress
    new = [record for record in run.steps if record.step > progress.last_step]
    points = [(record.step, progress.began_seconds + record.elapsed_seconds, _numbers(record)) for record in new]
    results = dict(_results(run)) or progress.results
    new_results = results if results != progress.results else {}
    if not points and not new_results:
        return f"{tracker} is up to date"
    end = (last.step, progress.began_seconds + last.elapsed_seconds, new_results)
    where = SEND[tracker](target, progress, dict(_settings(run)), points, end)
    write_record(path, dataclasses.replace(progress, last_step=max(progress.last_step, last.step), results=results))
    also = f" and {counted(len(new_results), 'result')}" if new_results else ""
    return f"{counted(len(points), 'step')}{also} sent to {tracker}: {where}"


def follow(target: Target, every_seconds: float, say: Callable[[str], None]) -> None:
    """Export regularly until no training is running; raises ConfigError if the last export fails."""
    reader, runs = RunReader(), True
    while runs:
        runs = is_locked(paths.OUTPUT)  # first, so that the last step is sent too
        try:
            say(export(target, reader.read()))
        except ConfigError as error:
            if not runs:
                raise
            say(error.what)
        if runs:
            time.sleep(every_seconds)


def _numbers(record: StepRecord) -> dict[str, float]:
    values = {
        "loss/train": record.train_loss,
        "loss/valid": record.valid_loss,
        "train/learning_rate": record.learning_rate if record.step else None,
        "train/grad_norm": record.grad_norm,
        "train/epoch": record.epoch,
        "train/labels_per_second": record.labels_per_second,
        "memory/mlx_peak_gib": record.peak_memory_bytes / GIB,
        "memory/process_gib": record.footprint_bytes / GIB,
    }
    return {name: value for name, value in values.items() if value is not None}


def _settings(run: Run) -> Iterator[tuple[str, Any]]:
    """Settings of the training, the base model's name and facts of the machine; no paths."""
    base = run.summary.outcome.base_model if run.summary else run.job.base if run.job else ""
    yield "base_model", Path(base).name
    values = dataclasses.asdict(run.settings) if run.settings else {}
    lora = {f"lora.{name}": value for name, value in values.pop("lora", {}).items()}
    for name, value in (values | lora).items():
        yield name, ", ".join(value) if isinstance(value, tuple) else value
    for name in MACHINE_FACTS if run.machine else ():
        yield f"machine.{name}", getattr(run.machine, name)


def _results(run: Run) -> Iterator[tuple[str, float]]:
    """Final losses of a finished training, and base and tuned on the test file once they are measured."""
    metrics = dataclasses.asdict(run.summary.metrics) if run.summary else {}
    yield from ((f"result/{name}", value) for name, value in metrics.items() if value is not None)
    if run.evaluation is not None:
        for side, score in (("base", run.evaluation.base), ("tuned", run.evaluation.tuned)):
            scores = ((name, getattr(score, name)) for name in SCORES)
            yield from ((f"test/{side}_{name}", value) for name, value in scores if value is not None)
        yield "test/nats_per_label_gained", run.evaluation.improvement.nats_per_label


def _place(target: Target) -> str:
    """Project, address or folder; a different one gets a new run, and so does W&B offline."""
    if target.tracker == "wandb":
        project = target.place or os.environ.get("WANDB_PROJECT") or PROJECT
        return f"{project} ({os.environ.get('WANDB_MODE', 'online')})"
    usual = os.environ.get("MLFLOW_TRACKING_URI") or MLFLOW_HERE
    return target.place or (usual if target.tracker == "mlflow" else str(FOLDER / "tensorboard"))


def _send_wandb(target: Target, progress: TrackerProgress, settings: Settings, points: list[Point], end: Point) -> str:
    import wandb

    FOLDER.mkdir(parents=True, exist_ok=True)
    private = wandb.Settings(  # no names of hosts, users or packages, no code
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_save_requirements=False, disable_git=True, save_code=False, disable_job_creation=True,
    )  # fmt: skip
    try:
        wandb_run = wandb.init(
            project=_place(target).rpartition(" ")[0], id=progress.run_id, name=target.name or None, resume="allow",
            config=settings, dir=str(FOLDER.resolve()), settings=private,
        )  # fmt: skip
        for step, seconds, values in points:
            wandb_run.log(values | {"_timestamp": seconds}, step=step)
        wandb_run.summary.update(end[2])
        folder = wandb_run.settings.sync_dir
        where = f"{folder}; to the server: wandb sync {folder}" if wandb_run.offline else wandb_run.url
        wandb_run.finish()
        wandb.teardown()  # finish does not wait until everything is written
    except wandb.errors.Error as error:
        do = "wandb login, or without an account WANDB_MODE=offline"
        raise ConfigError(f"W&B refused the run: {error}", do=do) from error
    return str(where)


def _send_mlflow(target: Target, progress: TrackerProgress, settings: Settings, points: list[Point], end: Point) -> str:
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    os.environ.update({name: os.environ.get(name, value) for name, value in MLFLOW_PATIENCE.items()})
    for library in ("alembic", "mlflow"):
        logging.getLogger(library).setLevel(logging.WARNING)
    FOLDER.mkdir(parents=True, exist_ok=True)
    address, name = _place(target), target.name or None
    here = f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}"  # absolute, because MLflow caches databases by their name
    try:
        client = MlflowClient(tracking_uri=here if address == MLFLOW_HERE else address)
        experiment = client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
        same = client.search_runs([number], f"tags.safetrain = '{progress.run_id}'")
        mlflow_run = same[0] if same else client.create_run(number, tags={"safetrain": progress.run_id}, run_name=name)
        run_id = mlflow_run.info.run_id
        if not same:  # MLflow accepts each setting once, and running out of memory changes some
            client.log_batch(run_id, params=[Param(key, str(value)) for key, value in settings.items()])
        for start in range(0, len(points) + 1, MLFLOW_BATCH):
            batch = [*points, end][start : start + MLFLOW_BATCH]
            numbers = [(*number, round(1000 * at), step) for step, at, values in batch for number in values.items()]
            client.log_batch(run_id, metrics=[Metric(*number) for number in numbers])
        if end[2]:
            client.set_terminated(run_id)
    except MlflowException as error:
        text = CREDENTIALS.sub("//", str(error))
        failure = ConfigError(f"MLflow refused the run: {text}", where=progress.place, do="check that the server runs")
        raise failure from None  # the traceback has the password
    return f"run {run_id} of {PROJECT!r} in {progress.place}"


def _send_tensorboard(
    target: Target, progress: TrackerProgress, settings: Settings, points: list[Point], end: Point
) -> str:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    place = Path(progress.place)
    new_folder = place / (f"{target.name}-{progress.run_id}" if target.name else progress.run_id)
    folder = next(place.glob(f"*{progress.run_id}"), new_folder)  # with the name that it got first
    writer = EventFileWriter(str(folder))
    start = SessionLog(status=SessionLog.START)  # TensorBoard drops what an interrupted export wrote from here on
    writer.add_event(Event(step=progress.last_step + 1, wall_time=progress.began_seconds, session_log=start))
    if progress.last_step < 0:
        table = "\n".join(["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in settings.items())])
        writer.add_event(Event(step=0, wall_time=progress.began_seconds, summary=text_pb("settings", table)))
    for step, seconds, values in [*points, end]:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(step=step, wall_time=seconds, summary=summary))
    writer.close()
    return f"{folder}; tensorboard --logdir {folder.parent}"


SEND = {"wandb": _send_wandb, "mlflow": _send_mlflow, "tensorboard": _send_tensorboard}
