"""The ladder: rung by rung, settings with less memory or shorter GPU work for the same rows per update."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import MachineError
from safetrain.core.formatting import run_again, size_text
from safetrain.core.memory.estimate import memory_of_run, mlx_limit_bytes
from safetrain.core.memory.system import OWN_LIMIT, Readings, host_room_bytes, read_memory, within_data_limit
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.schema import WHOLE
from safetrain.core.records.settings import LargestUpdate, MemoryShape, Rung, TrainJob, TrainSettings, memory_shape
from safetrain.core.storage.files import read_or_none
from safetrain.core.storage.paths import LADDER

MOST_RUNGS = 12
NEARLY = 0.99  # share of the planned budget that counts as all of it
GPU_CAUSES = ("gpu_watchdog", "gpu_timeout")
SHORTER = {"MLX_MAX_OPS_PER_BUFFER": "4", "MLX_MAX_MB_PER_BUFFER": "20"}  # mlx's defaults: 20 to 50, 40 to 50
RELAXED = {"AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1"}


@dataclass(frozen=True)
class Ladder:
    """memory_ladder.json: the planned settings, the current ones, and the failed rungs between them."""

    asked: MemoryShape
    limit_bytes: int  # the memory limit that was too small
    now: MemoryShape
    rungs: tuple[Rung, ...]
    gpu_rungs: tuple[str, ...] = ()  # rungs taken after the GPU watchdog ended a process


def read_ladder(output: Path, settings: TrainSettings, limit_bytes: int) -> Ladder | None:
    """Read the ladder of a run; None if it is for other settings or less memory."""
    ladder = read_or_none(output / LADDER, Ladder)
    is_same = ladder is not None and ladder.asked == memory_shape(settings) and limit_bytes <= ladder.limit_bytes
    return ladder if is_same else None


def next_settings(settings: TrainSettings, *, quantized: bool, loading: bool = False) -> TrainSettings | None:
    """Return the settings of the next rung; None at the bottom.

    The order: half the micro-batch and twice the accumulation (an odd micro-batch is divided by its smallest factor),
    gradient checkpointing, a base that stays quantized, a base that stays on disk. All give the same update up to
    rounding.
    """
    if loading:  # before the first update, only the base can use less memory
        dequantized = quantized and settings.dequantize_base
        return dataclasses.replace(settings, dequantize_base=False) if dequantized else _streamed(settings)
    if settings.batch_size > 1:
        factor = next(f for f in range(2, settings.batch_size + 1) if settings.batch_size % f == 0)
        return dataclasses.replace(
            settings,
            batch_size=settings.batch_size // factor,
            gradient_accumulation=settings.gradient_accumulation * factor,
        )
    if not settings.gradient_checkpointing:
        return dataclasses.replace(settings, gradient_checkpointing=True)
    if quantized and settings.dequantize_base:
        return dataclasses.replace(settings, dequantize_base=False)
    return _streamed(settings)


def _streamed(settings: TrainSettings) -> TrainSettings | None:
    """The same with the base on disk; None if it is there already, or is trained."""
    if settings.stream_base or settings.method in WHOLE:
        return None
    return dataclasses.replace(settings, stream_base=True, dequantize_base=False)


def describe_change(before: MemoryShape, after: MemoryShape) -> str:
    """Describe the difference between two rungs."""
    changes = []
    if after.batch_size != before.batch_size:
        changes.append(f"{after.window} rows per update instead of {before.window}")
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        changes.append("blocks recomputed in the backward pass")
    if before.dequantize_base and not after.dequantize_base:
        changes.append("the base left quantized")
    if after.stream_base and not before.stream_base:
        changes.append("the base read from disk block by block")
    return ", ".join(changes) or str(after)


# From macOS 26 on, the system ends GPU work that keeps the screen waiting (mlx#3267). Shorter pieces help on some
# machines (ltx-2-mlx#75); the driver's variable helps on most, and the screen stutters (ltx-2-mlx#78).
GPU_RUNGS: tuple[tuple[str, dict[str, str]], ...] = (  # in words, and as variables for the training process
    ("shorter pieces of GPU work", SHORTER),
    ("a GPU driver that waits longer: the screen will stutter meanwhile", {**SHORTER, **RELAXED}),
)


def next_gpu_rung(count: int) -> str | None:
    """Describe the GPU rung after the first ``count``; None if there are no more."""
    if count >= len(GPU_RUNGS):
        return None
    words, environment = GPU_RUNGS[count]
    return f"{words} ({' '.join(f'{name}={value}' for name, value in environment.items())})"


def gpu_environment(count: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the first ``count`` GPU rungs; those already set in ``ours`` stay."""
    environment = GPU_RUNGS[min(count, len(GPU_RUNGS)) - 1][1] if count else {}
    return {name: value for name, value in environment.items() if name not in ours}


@dataclass(frozen=True)
class PlannedUpdate:
    """Backend and largest update of a training, without truncation."""

    backend: str
    largest_update: LargestUpdate
    ranks_here: int = 1  # that share this machine's memory
    is_quantized: bool = False  # the base


def fit_to_available_memory(job: TrainJob, planned: PlannedUpdate, say: Callable[[str], None]) -> TrainJob:
    """Take the job down the ladder if it needs more memory than is free; raises MachineError at the bottom.

    This does not check a CUDA device's memory; preflight does.
    """
    if planned.backend == "cuda":
        return job
    available, words, remedy = available_memory(job, planned.backend, read_memory(), planned.ranks_here)
    model = read_model_files(Path(job.base))
    settings: TrainSettings | None = job.settings
    while settings is not None and needed_bytes(model, settings, job, planned) > available:
        settings = next_settings(settings, quantized=planned.is_quantized)
    if settings == job.settings:
        return job
    need = f"{size_text(needed_bytes(model, job.settings, job, planned))} are needed"
    if settings is None:
        raise MachineError("Not enough free memory for this training.", expected=need, got=words, do=remedy)
    change = describe_change(memory_shape(job.settings), memory_shape(settings))
    say(f"warning: {words} and {need}, so training starts with {change}")
    rung = Rung(memory_shape(job.settings), 0, words)
    budget = dataclasses.replace(job.memory_budget, total_bytes=available)
    limit = mlx_limit_bytes(budget.mlx_bytes, budget)
    return dataclasses.replace(job, settings=settings, rungs=(*job.rungs, rung), mlx_limit_bytes=limit)


def available_memory(job: TrainJob, backend: str, host: Readings, ranks_here: int = 1) -> tuple[int, str, str]:
    """The free memory within train.memory_limit_gb, divided by the ranks here: bytes, in words, and how to get more.

    On a Mac it is the budget, unless macOS reports critical pressure: free memory says nothing there.
    """
    remedy = f"close other programs, or plan for the free memory: {run_again()}"
    if backend == "metal":
        free = job.memory_budget.total_bytes
        if host.is_critical:
            return 0, f"macOS reports critical memory pressure ({host.free_percent} % free)", remedy
    else:
        free = host_room_bytes(host) // ranks_here
    own = within_data_limit(free, job.memory_limit_bytes)
    if own < min(free, NEARLY * job.memory_budget.total_bytes):  # else the plan was made under that limit
        raise_it = f"raise {OWN_LIMIT}, or plan for it: set it in params.yaml, then {run_again()}"
        return own, f"{OWN_LIMIT} leaves only {size_text(own)}", raise_it
    if ranks_here > 1:
        each = f"{ranks_here} ranks share this machine, and each has only {size_text(free)}"
        return free, each, f"lower train.ranks, or {remedy}"
    return free, f"only {size_text(free)} are free now", remedy


def needed_bytes(model: ModelFiles, settings: TrainSettings, job: TrainJob, planned: PlannedUpdate) -> int:
    """Memory of the whole process, with rows truncated to the settings' length."""
    longest = min(planned.largest_update.longest, settings.max_seq_length - 1)
    largest = dataclasses.replace(planned.largest_update, longest=longest)
    memory = memory_of_run(model, settings, largest, planned.backend, job.memory_budget, job.planned)
    return memory.needed_bytes + job.memory_budget.process_bytes
