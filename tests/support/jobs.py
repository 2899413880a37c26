"""Jobs for the engine, made without the stages before it."""

import dataclasses
from pathlib import Path
from typing import Any

from safetrain.core.data.token_rows import TokenRows, TrainRows
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.model.files import read_model_files
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.job import Job


def job_of(
    folder: Path, base: Path, train: TrainRows, valid: TokenRows, settings: TrainSettings, identity: RunIdentity
) -> Job:
    """A job that leaves everything in ``folder``, with as much memory as there is."""
    return Job(
        base=str(base), settings=settings, warmup_is_recommended=False, memory_budget=MemoryBudget(10**12),
        planned=None, rows=TrainingRows(train, valid), identity=identity, files=read_model_files(base),
        output=folder, adapters=folder / "adapters",
    )  # fmt: skip


def with_rows(job: Job, **changes: Any) -> Job:
    """The job with other rows."""
    return dataclasses.replace(job, rows=dataclasses.replace(job.rows, **changes))
