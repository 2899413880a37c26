"""Send a recorded run to W&B, as a new run there: settings, steps, scores; no rows or answers.

The training process is not involved.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, install_extra
from safetrain.core.records.metrics import StepRecord, TrainingMetrics
from safetrain.core.records.settings import TrainSettings
from safetrain.core.run_folder import Run
from safetrain.core.storage import paths

FOLDER = paths.OUTPUT / "trackers"
PROJECT = "safetrain"
MACHINE_FACTS = ("backend", "chip", "device", "system", "mlx", "mlx_lm", "total_memory_bytes")
SCORES = ("loss", "exact_match", "token_f1")
GIB = 2**30

Settings = dict[str, Any]
Point = tuple[int, float, dict[str, float]]  # step, wall clock in seconds, numbers by name


def export(run: Run, project: str = "", name: str = "") -> str:
    """Send a run; return a line that says where it is now. Raises ConfigError.

    ``project`` and ``name`` are those of the run there; empty: the default.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb is not installed.", do=install_extra("wandb"))
    if not any(record.step for record in run.steps):
        raise ConfigError("No step is recorded yet.", where=str(paths.METRICS_CSV), do="train first: safetrain run")
    last, results = run.steps[-1], dict(_results(run))
    began = run.journal[0].wall_seconds if run.journal else run.read_at_seconds - last.elapsed_seconds
    points = [(record.step, began + record.elapsed_seconds, _numbers(record)) for record in run.steps]
    points.append((last.step, began + last.elapsed_seconds, results))
    FOLDER.mkdir(parents=True, exist_ok=True)
    where = _send(project, name, dict(_settings(run)), points)
    also = f" and {counted(len(results), 'result')}" if results else ""
    return f"{counted(len(run.steps), 'step')}{also} sent to W&B: {where}"


def _numbers(record: StepRecord) -> dict[str, float]:
    values = {
        "loss/train": record.train_loss,
        "loss/valid": record.valid_loss,
        "pairs/accuracy": record.valid_accuracy,
        "pairs/margin": record.valid_margin,
        "pairs/chosen_logp": record.chosen_logp,
        "pairs/rejected_logp": record.rejected_logp,
        "train/learning_rate": record.learning_rate if record.step else None,
        "train/grad_norm": record.grad_norm,
        "train/epoch": record.epoch,
        "train/labels_per_second": record.labels_per_second,
        "memory/mlx_peak_gib": record.peak_memory_bytes / GIB,
        "memory/process_gib": record.footprint_bytes / GIB,
    }
    return {name: value for name, value in values.items() if value is not None}


def _settings(run: Run) -> Iterator[tuple[str, Any]]:
    """Settings of the training, the base model's name and facts about the machine; no paths."""
    yield "base_model", Path(run.summary.base_model if run.summary else run.job.base if run.job else "").name
    values = _fields_of(TrainSettings, run.settings)
    values |= {f"lora.{name}": value for name, value in vars(values.pop("lora")).items()} if values else {}
    yield from ((name, ", ".join(value) if isinstance(value, tuple) else value) for name, value in values.items())
    yield from ((f"machine.{name}", getattr(run.machine, name)) for name in MACHINE_FACTS if run.machine)


def _fields_of(kind: type[Any], record: object) -> dict[str, Any]:
    """Return a record's values for the fields of ``kind``; empty if the record is None."""
    return {field.name: getattr(record, field.name) for field in fields(kind) if record is not None}


def _results(run: Run) -> Iterator[tuple[str, float]]:
    """Final losses of a finished run, and the scores of the base and tuned models once they are measured."""
    values: dict[str, Any] = {}
    if run.summary is not None:
        values |= {f"result/{name}": value for name, value in _fields_of(TrainingMetrics, run.summary).items()}
    if run.evaluation is not None:
        sides = ("base", run.evaluation.base), ("tuned", run.evaluation.tuned)
        values |= {f"test/{side}_{name}": getattr(score, name) for side, score in sides for name in SCORES}
        values |= {f"test/{name}": getattr(run.evaluation.preference, name, None) for name in ("accuracy", "margin")}
        values["test/nats_per_label_gained"] = run.evaluation.improvement.nats_per_label
    yield from ((name, value) for name, value in values.items() if value is not None)


def _send(project: str, name: str, settings: Settings, points: Sequence[Point]) -> str:
    import wandb

    private = wandb.Settings(  # no names of hosts, users or packages, no code
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
        x_save_requirements=False, disable_git=True, save_code=False, disable_job_creation=True,
    )  # fmt: skip
    project = project or os.environ.get("WANDB_PROJECT") or PROJECT
    try:
        run = wandb.init(
            project=project, name=name or None, config=settings, dir=str(FOLDER.resolve()), settings=private
        )
        for step, seconds, values in points[:-1]:
            run.log(values | {"_timestamp": seconds}, step=step)
        run.summary.update(points[-1][2])
        folder = run.settings.sync_dir
        where = f"{folder}; to the server: wandb sync {folder}" if run.offline else run.url
        run.finish()
        wandb.teardown()  # finish does not wait until everything is written
    except wandb.errors.Error as error:
        do = "run 'wandb login'; without an account, set WANDB_MODE=offline"
        raise ConfigError(f"W&B refused the run: {error}", do=do) from error
    return str(where)
