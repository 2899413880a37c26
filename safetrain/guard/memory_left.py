"""At the start of a training: is the memory that it was planned for still free? If not, it starts with less."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.again import run_again
from safetrain.core.errors import MachineError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import OWN_LIMIT, Readings, host_room_bytes, read_memory, within_data_limit
from safetrain.core.memory.estimate import mlx_limit_bytes, total_bytes
from safetrain.core.memory.run import RunMemory, memory_of_run
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.job import Rung, TrainJob, memory_shape
from safetrain.core.records.settings import LargestUpdate, TrainSettings
from safetrain.guard.ladder import describe_change, next_settings

NEARLY = 0.99  # of the planned budget counts as all of it


@dataclass(frozen=True)
class PlannedUpdate:
    """Where a training runs, and its largest update, rows not cut."""

    backend: str
    largest_update: LargestUpdate
    ranks_here: int = 1  # that share this machine's memory


def fit_to_what_is_left(job: TrainJob, planned: PlannedUpdate, say: Callable[[str], None]) -> TrainJob:
    """The job, taken down the ladder where less memory is free now than it needs; raises MachineError at the bottom.

    A CUDA device's memory is not looked at here: preflight asks it.
    """
    if planned.backend == "cuda":
        return job
    left = what_is_left(job, planned.backend, read_memory(), planned.ranks_here)
    model = read_model_files(Path(job.base))
    settings: TrainSettings | None = job.settings
    while settings is not None and needed_bytes(model, settings, job, planned) > left.size_bytes:
        settings = next_settings(settings, quantized=model.quantization_bits is not None, may_shorten=False)
    wanted = f"{size_text(needed_bytes(model, job.settings, job, planned))} are needed"
    if settings == job.settings:
        return job
    if settings is None:
        if job.survival.oversize:
            say(f"warning: {left.text} and {wanted}; train.oversize lets it try")
            return job
        raise MachineError(
            "There is not enough free memory for this training.",
            expected=wanted,
            got=left.text,
            do=f"{left.remedy}; train.oversize=true tries all the same",
        )
    change = describe_change(memory_shape(job.settings), memory_shape(settings))
    say(f"warning: {left.text} and {wanted}, so it starts with {change}")
    rung = Rung(memory_shape(job.settings), 0, left.text)
    budget = dataclasses.replace(job.memory_budget, total_bytes=left.size_bytes)
    limit = mlx_limit_bytes(budget.mlx_bytes, budget)
    return dataclasses.replace(job, settings=settings, rungs=(*job.rungs, rung), mlx_limit_bytes=limit)


@dataclass(frozen=True)
class Left:
    """Memory that there is for a training now, and how to have more."""

    size_bytes: int
    text: str
    remedy: str


def what_is_left(job: TrainJob, backend: str, host: Readings, ranks_here: int = 1) -> Left:
    """The free memory, or what train.memory_limit_gb leaves of it; of several ranks on this machine the share of one.

    On a Mac the budget, unless macOS says that memory is critically short: its free memory says nothing.
    """
    remedy = f"close other programs, or plan for what there is: {run_again()}"
    if backend == "metal":
        free = job.memory_budget.total_bytes
        if host.is_critical:
            return Left(0, f"macOS reports critical memory pressure ({host.free_percent} % free)", remedy)
    else:
        free = host_room_bytes(host) // ranks_here
    own = within_data_limit(free, job.survival.memory_limit_bytes)
    if own < min(free, NEARLY * job.memory_budget.total_bytes):  # else the plan was made under that limit
        raise_it = f"raise {OWN_LIMIT}, or plan for it: set it in params.yaml, then {run_again()}"
        return Left(own, f"{OWN_LIMIT} leaves only {size_text(own)}", raise_it)
    if ranks_here > 1:
        each = f"{ranks_here} ranks share this machine, so that each has only {size_text(free)}"
        return Left(free, each, f"lower train.ranks, or {remedy}")
    return Left(free, f"only {size_text(free)} are free now", remedy)


def needed_bytes(model: ModelFiles, settings: TrainSettings, job: TrainJob, planned: PlannedUpdate) -> int:
    """What the whole process needs, its rows cut to the settings' length."""
    return _memory(model, settings, job, planned).needed_bytes + job.memory_budget.process_bytes


def closed_form_bytes(job: TrainJob, planned: PlannedUpdate) -> int:
    """The peak of mlx's allocator as the closed form has it, whatever a dry run has measured. Raises ModelError."""
    return total_bytes(_memory(read_model_files(Path(job.base)), job.settings, job, planned).terms)


def _memory(model: ModelFiles, settings: TrainSettings, job: TrainJob, planned: PlannedUpdate) -> RunMemory:
    longest = min(planned.largest_update.longest, settings.max_seq_length - 1)
    largest = dataclasses.replace(planned.largest_update, longest=longest)
    return memory_of_run(model, settings, largest, planned.backend, job.memory_budget, job.planned)
