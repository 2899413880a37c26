"""A training job with all that is read before mlx is loaded: the headers of its model, its rows, its updates."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.formatting import counted, size_text
from safetrain.core.memory.run import RunMemory, in_rectangles, memory_of_run, require_fit
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.job import TrainJob, memory_shape
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import LargestUpdate, TrainSettings, total_updates, usual_warmup


@dataclass(frozen=True)
class LoadedJob:
    """A job, its model's headers and its rows, cut to length."""

    job: TrainJob
    files: ModelFiles
    rows: TrainingRows
    settings: TrainSettings  # the job's; a recommended warm-up is no longer than this run wants
    updates: int


def load_job(job: TrainJob, beat: Callable[[], None] = lambda: None) -> LoadedJob:
    """Read model headers and map the rows; raises SafetrainError for what cannot be used.

    ``beat`` is called again and again where that takes long.
    """
    base, settings = Path(job.base), job.settings
    files = read_model_files(base)
    rows = load_training_rows(base, settings.max_examples, settings.max_seq_length, beat, method=settings.method)
    updates = total_updates(len(rows.train), settings.rows_per_update, settings.num_epochs, settings.max_steps)
    if job.warmup_is_recommended:  # the plan may have been for a longer run
        settings = dataclasses.replace(settings, warmup_steps=min(settings.warmup_steps, usual_warmup(updates)))
    return LoadedJob(job, files, rows, settings, updates)


def own_largest_update(loaded: LoadedJob, backend_name: str) -> LargestUpdate:
    """The largest update of the run, its rows in the order of its own seed."""
    settings = loaded.settings
    return largest_update(
        loaded.rows.train,
        loaded.rows.valid,
        settings.rows_per_update,
        settings.num_epochs,
        settings.max_steps,
        seeds=(settings.seed,),
        rectangles=in_rectangles(loaded.files, backend_name),
    )


def memory_of(loaded: LoadedJob, backend_name: str) -> RunMemory:
    """What the run will take; raises MachineError when it exceeds the budget."""
    job, settings, largest = loaded.job, loaded.settings, own_largest_update(loaded, backend_name)
    found = memory_of_run(loaded.files, settings, largest, backend_name, job.memory_budget, job.planned)
    if not job.rungs and not job.survival.oversize:  # the ladder has its own end
        require_fit(found, settings, largest, job.memory_budget)
    return found


def describe(loaded: LoadedJob, predicted_bytes: int, blas: str, adaptation: str) -> str:
    """The first words of a training; ``adaptation``: how the model computes it."""
    settings, rows = loaded.settings, loaded.rows.train
    lost = (
        f"{counted(rows.cut_rows, 'row')} cut to {settings.max_seq_length} tokens, "
        f"{counted(rows.lost_labels, 'label')} lost\n"
    )
    name = "window" if settings.method == PRETRAIN else "row"
    shared = f" shared by {loaded.job.ranks} ranks" if loaded.job.ranks > 1 else ""
    return (lost if rows.cut_rows else "") + (
        f"training on {counted(len(rows), name)}: {memory_shape(settings).window} rows per update{shared}, "
        f"{counted(loaded.updates, 'update')}, {settings.optimizer}, {settings.schedule} learning rate to "
        f"{settings.learning_rate:g}, {_trained(settings)}; expected peak of mlx {size_text(predicted_bytes)}; "
        f"BLAS: {blas}; {adaptation}"
    )


def _trained(settings: TrainSettings) -> str:
    layers = f"the top {counted(settings.lora.num_layers, 'block')}"
    if settings.method in WHOLE:
        return "all weights" if settings.method == PRETRAIN else f"all weights of {layers}"
    name = {"lora": "LoRA", "dora": "DoRA"}[settings.method]
    return f"{name} rank {settings.lora.rank} on {layers}"
