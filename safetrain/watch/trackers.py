"""Send a recorded run to W&B, as a new run there: settings, steps, scores; no rows or answers.

The training process is not involved.
"""

import importlib.util
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, install_extra, with_python
from safetrain.core.records.metrics import TrainingMetrics
from safetrain.core.storage import paths
from safetrain.watch.run_folder import Run

FOLDER = paths.OUTPUT / "trackers"
SCORES = ("base", "tuned", "score_gain", "improvement", "preference")  # parts of evaluation.json that are numbers


def export(run: Run) -> str:
    """Send a run; return a line that says where it is now. Raises ConfigError."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb is not installed.", do=install_extra("wandb"))
    if not any(record.step for record in run.steps):
        raise ConfigError("No step is recorded yet.", where=paths.METRICS_CSV, do="train first: safetrain run")
    import wandb

    base = run.summary.base_model if run.summary else run.job.base if run.job else ""
    settings = {**(asdict(run.settings) if run.settings else {}), "base_model": Path(base).name}
    settings.pop("from_adapter", None)  # a path on this machine
    began = run.journal[0].wall_seconds if run.journal else run.read_at_seconds - run.steps[-1].elapsed_seconds
    results, folder = _results(run), FOLDER.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    private = wandb.Settings(  # no names of hosts, users or packages, no code
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_save_requirements=False, disable_git=True, save_code=False, disable_job_creation=True,
    )  # fmt: skip
    project = os.environ.get("WANDB_PROJECT") or "safetrain"
    try:
        sent = wandb.init(project=project, config=settings, dir=str(folder), settings=private)
        for record in run.steps:
            sent.log({**_known(asdict(record)), "_timestamp": began + record.elapsed_seconds}, step=record.step)
        sent.summary.update(results)
        sync = f"{with_python('wandb')} sync {shlex.quote(sent.settings.sync_dir)}"
        where = f"{sent.settings.sync_dir}; to the server: {sync}"
        where = where if sent.offline else sent.url
        sent.finish()
        wandb.teardown()  # finish does not wait until everything is written
    except wandb.errors.Error as error:
        do = f"log in: {with_python('wandb')} login; without an account, set WANDB_MODE=offline"
        raise ConfigError(f"W&B refused the run: {error}", do=do) from error
    return f"{counted(len(run.steps), 'step')} and {counted(len(results), 'result')} sent to W&B: {where}"


def _results(run: Run) -> dict[str, Any]:
    """Final losses of a finished run, and the scores of the base and tuned models once they are measured."""
    values: dict[str, Any] = {}
    if run.summary is not None:
        values |= {field.name: getattr(run.summary, field.name) for field in fields(TrainingMetrics)}
    for part in SCORES:
        numbers = getattr(run.evaluation, part, None)
        values |= {f"{part}/{name}": value for name, value in (asdict(numbers) if numbers else {}).items()}
    return _known(values)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
