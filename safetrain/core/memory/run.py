"""The memory of one run: what it will take, whether it fits, and the memory limit of mlx.

Asked by the plan, by ``train`` before it starts, by the guard on each rung, and by the training process itself.
"""

from dataclasses import dataclass

from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.memory.estimate import (
    MARGIN,
    check_model_takes,
    does_not_fit,
    mlx_limit_bytes,
    peak_of_run,
    require_computable,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.terms import backend_of, padded
from safetrain.core.model.files import ModelFiles
from safetrain.core.model.shapes import is_known
from safetrain.core.records.settings import LargestUpdate, MemoryTerm, PlannedMemory, TrainSettings


@dataclass(frozen=True)
class RunMemory:
    """The memory of mlx's allocator in a run, in bytes."""

    terms: tuple[MemoryTerm, ...]  # of the closed form
    peak_bytes: int
    needed_bytes: int  # the peak, with a margin where it is not measured
    mlx_limit_bytes: int


def memory_of_run(
    model: ModelFiles,
    settings: TrainSettings,
    largest: LargestUpdate,
    backend_name: str,
    budget: MemoryBudget,
    planned: PlannedMemory | None,
) -> RunMemory:
    """The memory of a run: as measured, if the dry run covers it; else scaled from it, or only by the closed form.

    ``backend_name`` is cpu, metal, cuda or gpu. Raises ConfigError when model or backend cannot take the settings.
    """
    check_model_takes(model, settings)
    require_computable(settings.compute_dtype, backend_name)
    terms = _terms(model, settings, largest, backend_name)
    if planned is None:
        peak, needed = total_bytes(terms), with_margin(terms, MARGIN)
        return RunMemory(terms, peak, needed, mlx_limit_bytes(peak, budget))
    then = _terms(model, planned.settings, planned.largest_update, backend_name)
    peak = _scaled(planned.peak_bytes, then, terms)
    if planned.covers(settings, largest):  # it met the largest update of several orders of the rows, not of one
        own = planned.own_order
        peak = own.peak_bytes if own is not None and own.largest_update == largest else min(peak, planned.peak_bytes)
        peak = min(peak, budget.mlx_bytes)
    return RunMemory(terms, peak, peak, mlx_limit_bytes(peak, budget))


def _scaled(measured_bytes: int, then: tuple[MemoryTerm, ...], now: tuple[MemoryTerm, ...]) -> int:
    """What was measured, for another run: what is counted is exact, the rest in proportion to what is estimated."""
    exact_then, exact_now = (sum(term.size_bytes for term in terms if term.exact) for terms in (then, now))
    estimated_then, estimated_now = total_bytes(then) - exact_then, total_bytes(now) - exact_now
    share = estimated_now / estimated_then if estimated_then else 1.0
    return exact_now + int(max(0, measured_bytes - exact_then) * share)


def in_rectangles(model: ModelFiles, backend_name: str) -> bool:
    """Whether rows are padded to rectangles: always on a GPU, on CPU where packing is not known to work."""
    return backend_name != "cpu" or not is_known(model.model_type)


def require_fit(memory: RunMemory, settings: TrainSettings, largest: LargestUpdate, budget: MemoryBudget) -> None:
    """Raise MachineError when a run does not fit: pins on the command line were never planned for."""
    if memory.needed_bytes > budget.mlx_bytes:
        raise does_not_fit(memory.terms, settings.batch_size, padded(largest.longest), budget, memory.needed_bytes)


def _terms(
    model: ModelFiles, settings: TrainSettings, largest: LargestUpdate, backend_name: str
) -> tuple[MemoryTerm, ...]:
    backend = backend_of(
        model, backend_name, settings.dequantize_base, settings.method, checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer, compute_dtype=settings.compute_dtype,
    )  # fmt: skip
    return peak_of_run(model, settings, largest, backend)
