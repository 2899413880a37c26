"""At the start of a training: is the memory that it was planned for still free? If not, it starts with less."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import MachineError
from safetrain.core.job import Rung, TrainJob, memory_shape
from safetrain.core.memory import MARGIN, peak_of_run, told_limit_bytes, total_bytes
from safetrain.core.memory import needed_bytes as with_process
from safetrain.core.memory_budget import host_room_bytes, within_data_limit
from safetrain.core.memory_terms import backend_of
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.settings import LargestUpdate, TrainSettings
from safetrain.core.words import size_text
from safetrain.guard.ladder import describe_change, next_settings
from safetrain.guard.sampling import OWN_LIMIT

NEARLY = 0.99


@dataclass(frozen=True)
class Need:
    """What the plan knows of the memory that a training takes."""

    backend: str
    largest_update: LargestUpdate
    planned: TrainSettings  # that the peak is of
    planned_peak_bytes: int  # of mlx's allocator
    measured: bool  # with the model itself; else it is an estimate, and the margin is added


def fit_to_what_is_left(job: TrainJob, need: Need, say: Callable[[str], None]) -> TrainJob:
    """The job, with less memory at a time where less is free now than it needs. Raises MachineError at the bottom.

    The rungs are the ladder's: the same rows in each update. A GPU's own memory is asked by preflight alone.
    """
    if need.backend == "cuda":
        return job
    left, free, remedy = room_for(job)
    model = read_model_files(Path(job.base))
    settings: TrainSettings | None = job.settings
    while settings is not None and needed_bytes(model, settings, need) > left:
        settings = next_settings(settings, packed=model.quantization_bits is not None, may_shorten=False)
    wanted = f"{size_text(needed_bytes(model, job.settings, need))} are needed"
    if settings == job.settings:
        return job
    if settings is None:
        if job.survival.oversize:
            say(f"warning: {free} and {wanted}; train.oversize lets it try")
            return job
        raise MachineError(
            "There is not enough free memory for this training.",
            expected=wanted,
            got=free,
            do=f"{remedy}; train.oversize=true tries all the same",
        )
    change = describe_change(memory_shape(job.settings), memory_shape(settings))
    say(f"warning: {free} and {wanted}, so it starts with {change}")
    rung = Rung(memory_shape(job.settings), 0, free)
    told = told_limit_bytes(left, left)
    return dataclasses.replace(job, settings=settings, rungs=(*job.rungs, rung), told_bytes=told)


def room_for(job: TrainJob) -> tuple[int, str, str]:
    """Memory that there is for it, in bytes and in words, and how to have more: what is free, or less under
    train.memory_limit_gb.
    """
    left = host_room_bytes()
    own = within_data_limit(left, job.survival.memory_limit_bytes)
    if own < min(left, NEARLY * job.memory_budget_bytes):  # else the plan was made under that limit
        remedy = f"raise {OWN_LIMIT}, or plan for it: set it in params.yaml, then dvc repro"
        return own, f"{OWN_LIMIT} leaves only {size_text(own)}", remedy
    remedy = "close other programs, or plan for what there is: dvc repro"
    return left, f"only {size_text(left)} are free now", remedy


def needed_bytes(model: ModelFiles, settings: TrainSettings, need: Need) -> int:
    """Peak with the process around it: the closed form, corrected by what is known of the planned settings."""
    known = need.planned_peak_bytes / _closed_form_bytes(model, need.planned, need)
    peak = known * _closed_form_bytes(model, settings, need)
    return with_process(int(peak), 1.0 if need.measured else MARGIN)


def _closed_form_bytes(model: ModelFiles, settings: TrainSettings, need: Need) -> int:
    backend = backend_of(
        model, need.backend, settings.dequantize_base, settings.method, checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer, optimizer_state_bits=settings.optimizer_state_bits,
    )  # fmt: skip
    longest = min(need.largest_update.longest, settings.max_seq_length - 1)
    largest = dataclasses.replace(need.largest_update, longest=longest)
    return total_bytes(peak_of_run(model, settings, largest, backend))
