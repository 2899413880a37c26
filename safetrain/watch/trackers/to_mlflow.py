"""To MLflow: the server that MLFLOW_TRACKING_URI names, or a database file here."""

import logging
import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.watch.trackers.sent import FOLDER, Sent, Target
from safetrain.watch.trackers.tracked import TrackedRun

EXPERIMENT = "safetrain"
HERE = f"sqlite:///{FOLDER / 'mlflow.db'}"
MOST_AT_ONCE = 1000  # metrics of a request, by MLflow's limits
MOST_PARAMETERS = 100
# Whoever sets them has them as they are. MLflow itself asks eight times in almost five minutes, and says nothing.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
USER = re.compile(r"//[^/\s]*@")  # and password, in an address


def place_of(target: Target) -> str:
    """The tracking server or database, without the user and password that its address may have."""
    return _without_secrets(_address(target))


def _address(target: Target) -> str:
    return target.place or os.environ.get("MLFLOW_TRACKING_URI") or HERE


def _without_secrets(text: str) -> str:
    return USER.sub("//", text)


def open_run(run: TrackedRun, target: Target) -> str:
    """Make a run, with its settings; gives the id that MLflow has given it. Raises ConfigError."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    address = _address(target)
    try:
        client = _client(address)
        artifacts = str((FOLDER / "mlflow").resolve()) if address == HERE else None
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT, artifacts)
        opened = client.create_run(experiment, run_name=target.name or None)
        parameters = [Param(setting.name, str(setting.value)) for setting in run.settings]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(opened.info.run_id, params=parameters[start : start + MOST_PARAMETERS])
    except MlflowException as error:
        raise _refused(error, place_of(target)) from None  # its traceback has the address
    return str(opened.info.run_id)


def send(run: TrackedRun, sent: Sent, target: Target) -> str:
    """Send the steps, and the results; says where the run is. Raises ConfigError.

    A step has the same time whenever it is sent: MLflow's database then keeps one that comes twice once.
    """
    from mlflow.exceptions import MlflowException

    metrics = _metrics(run, sent)
    try:
        client = _client(_address(target))
        while batch := list(islice(metrics, MOST_AT_ONCE)):
            client.log_batch(sent.run_id, metrics=batch)
        if run.results:
            client.set_terminated(sent.run_id)
    except MlflowException as error:
        raise _refused(error, sent.place) from None
    return f"run {sent.run_id} of {EXPERIMENT!r} in {sent.place}"


def _metrics(run: TrackedRun, sent: Sent) -> Iterator[Any]:
    """Steps, then results, as MLflow's metrics."""
    from mlflow.entities import Metric

    for step in run.steps:
        milliseconds = round(1000 * (sent.began_seconds + step.elapsed_seconds))
        for scalar in step.scalars:
            yield Metric(scalar.name, scalar.value, milliseconds, step.step)
    for scalar in run.results:
        yield Metric(scalar.name, scalar.value, round(1000 * run.recorded_seconds), run.steps.last_step)


def _client(address: str) -> Any:
    from mlflow.tracking import MlflowClient

    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    FOLDER.mkdir(parents=True, exist_ok=True)
    here = f"sqlite:///{(FOLDER / 'mlflow.db').resolve()}"  # MLflow keeps a database by its name, wherever we are
    return MlflowClient(tracking_uri=here if address == HERE else address)


def _refused(error: Exception, place: str) -> ConfigError:
    told = _without_secrets(str(error))
    return ConfigError(f"MLflow did not take it: {told}", where=place, do="see whether the server runs")
