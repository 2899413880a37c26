"""Memory of a run: predict mlx's peak, decide whether it fits, and set mlx's memory limit.

The prediction is arithmetic on a model's headers (core/memory/terms.py). The plan chooses with it; ``train``,
the guard on each rung and the training process check with it.
(measured: benchmarks/bench_memory_accuracy.py, benchmarks/bench_memory_estimate.py)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import size_text
from safetrain.core.memory.streamed import streamed_phases
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.memory.terms import (
    FLOAT32,
    Backend,
    Shape,
    backend_of,
    base_bytes,
    matrix_bytes,
    optimizer_state_bytes,
    padded,
    trained_parameters,
    work_phases,
)
from safetrain.core.model.files import ModelFiles
from safetrain.core.model.shapes import is_known
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import LargestUpdate, LoraSettings, MemoryTerm, PlannedMemory, TrainSettings

# The factor on estimated terms; exact terms need none (measured on Linux CPU: the closed form is 7 to 35 % above the
# peak, benchmarks/bench_memory_estimate; published on Metal: 1.5 and 1.9 % above, MakazhanAlpamys/Soup #663).
MARGIN = 1.15
# Under a memory limit, mlx can run with this share of the estimated terms (benchmarks/bench_memory_accuracy: the closed
# form is 10 to 46 % above the minimum). A run that does not fit even then is not worth a dry run.
LEAST_SHARE = 0.7
OPTIMIZER_COPIES = 3  # copies of one block's numbers during its optimizer update (measured: 1.7 to 2.7)
OVERSTEP_SHARE = 0.02  # of the prediction: mlx exceeds its limit by one allocation


@dataclass(frozen=True)
class RunMemory:
    """The memory of mlx's allocator in a run, in bytes."""

    terms: tuple[MemoryTerm, ...]  # from the closed form
    peak_bytes: int
    needed_bytes: int  # the peak, plus a margin unless it is measured
    mlx_limit_bytes: int


def predicted_peak(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> tuple[MemoryTerm, ...]:
    """The terms of the peak of mlx's allocator, in bytes; their sum is the prediction."""
    adapter = FLOAT32 * trained_parameters(model, lora, backend.method)
    accumulates, streams = shape.accumulates and not backend.stream_base, backend.stream_base
    accumulated = (MemoryTerm("accumulated gradient", adapter, exact=True),) if accumulates else ()
    phases = streamed_phases if streams else work_phases
    working = [(*accumulated, *phase) for phase in phases(model, lora, shape, backend)]
    base = () if streams else (MemoryTerm("base weights", base_bytes(model, backend), exact=True),)
    optimizer = (MemoryTerm("optimizer at work", at_work_bytes(model, lora, backend)),)
    return (
        *base,
        MemoryTerm("trained weights", adapter, exact=True),
        MemoryTerm("optimizer's state", optimizer_state_bytes(model, lora, backend), exact=True),
        *max(*working, optimizer, key=total_bytes),
    )


def at_work_bytes(model: ModelFiles, lora: LoraSettings, backend: Backend) -> int:
    """Memory of the optimizer step: the gradient of all trained weights, and copies of one block's numbers.

    In pretraining, the embedding counts as a block.
    """
    trained = FLOAT32 * trained_parameters(model, lora, backend.method)
    block = trained / lora.num_layers
    if backend.method == PRETRAIN:
        block = max(block, matrix_bytes(model))
    return trained + int(OPTIMIZER_COPIES * block)


def total_bytes(terms: tuple[MemoryTerm, ...]) -> int:
    """Sum of the terms, in bytes."""
    return sum(term.size_bytes for term in terms)


def with_margin(terms: tuple[MemoryTerm, ...], factor: float = MARGIN) -> int:
    """The predicted peak to compare with a budget, in bytes of mlx's allocator.

    ``factor`` multiplies the estimated terms; exact terms need no margin.
    """
    total, exact = total_bytes(terms), sum(term.size_bytes for term in terms if term.exact)
    return exact + int((total - exact) * factor)


def mlx_limit_bytes(peak_bytes: int, budget: MemoryBudget) -> int:
    """The value for mx.set_memory_limit: the smaller of the predicted peak and mlx's budget.

    It is never the budget alone, because mlx lets its memory grow up to the limit; and a little less, because mlx
    exceeds its limit by one allocation.
    """
    most = min(peak_bytes, budget.mlx_bytes)
    return max(1, most - int(OVERSTEP_SHARE * most))


def largest_micro_batch(largest: LargestUpdate, batch_size: int, rows_per_update: int) -> Shape:
    """The largest micro-batch: the tokens of ``batch_size`` of the longest rows, or of the whole update if fewer."""
    longest, more = padded(largest.longest), max(1.0, rows_per_update / largest.rows)
    in_update = max(longest, int(more * largest.tokens))
    tokens = min(batch_size * longest, in_update)
    labels = min(tokens, int(more * largest.labels))
    rows = max(-(-tokens // longest), round(rows_per_update * tokens / in_update))  # of mean length
    return Shape(rows, longest, tokens < in_update, tokens, labels, in_update)


def memory_of_run(
    model: ModelFiles,
    settings: TrainSettings,
    largest: LargestUpdate,
    backend_name: str,
    budget: MemoryBudget,
    planned: PlannedMemory | None,
) -> RunMemory:
    """The memory of a run: as measured if the dry run covers it, else scaled from the dry run or from the closed form.

    ``backend_name`` is cpu, metal, cuda or gpu. Raises ConfigError if model or backend do not support the settings.
    """
    require_trainable(settings.method, quantized=model.quantization_bits is not None)
    if model.max_positions is not None and settings.max_seq_length > model.max_positions:
        raise ConfigError(
            f"train.max_seq_length is {settings.max_seq_length}, longer than the model's context.",
            expected=f"at most {model.max_positions}",
        )
    require_computable(settings.compute_dtype, backend_name)
    terms = _terms(model, settings, largest, backend_name)
    if planned is None:
        peak, needed = total_bytes(terms), with_margin(terms)
        return RunMemory(terms, peak, needed, mlx_limit_bytes(peak, budget))
    then = _terms(model, planned.settings, planned.largest_update, backend_name)
    is_comparable = settings.stream_base == planned.settings.stream_base
    peak = _scaled(planned.peak_bytes, then, terms) if is_comparable else total_bytes(terms)
    if planned.covers(settings, largest):  # the dry run ran the largest update of several row orders
        own = planned.own_order
        peak = own.peak_bytes if own is not None and own.largest_update == largest else min(peak, planned.peak_bytes)
        peak = min(peak, budget.mlx_bytes)
    return RunMemory(terms, peak, peak, mlx_limit_bytes(peak, budget))


def _scaled(measured_bytes: int, then: tuple[MemoryTerm, ...], now: tuple[MemoryTerm, ...]) -> int:
    """Scale a measured peak to another run: exact terms are exchanged, the rest scales with the estimated terms."""
    exact_then, exact_now = (sum(term.size_bytes for term in terms if term.exact) for terms in (then, now))
    estimated_then, estimated_now = total_bytes(then) - exact_then, total_bytes(now) - exact_now
    share = estimated_now / estimated_then if estimated_then else 1.0
    return exact_now + int(max(0, measured_bytes - exact_then) * share)


def in_rectangles(model: ModelFiles, backend_name: str) -> bool:
    """Whether rows are padded to rectangles: always on a GPU; on CPU only if packing is not known to work."""
    return backend_name != "cpu" or not is_known(model.model_type)


def require_fit(memory: RunMemory, settings: TrainSettings, largest: LargestUpdate, budget: MemoryBudget) -> None:
    """Raise MachineError if a run does not fit: the plan does not know settings of the command line."""
    if memory.needed_bytes > budget.mlx_bytes:
        raise does_not_fit(memory.terms, settings.batch_size, padded(largest.longest), budget, memory.needed_bytes)


def _terms(
    model: ModelFiles, settings: TrainSettings, largest: LargestUpdate, backend_name: str
) -> tuple[MemoryTerm, ...]:
    backend = backend_of(
        model, backend_name, settings.dequantize_base, settings.method, checkpointing=settings.gradient_checkpointing,
        optimizer=settings.optimizer, compute_dtype=settings.compute_dtype, stream_base=settings.stream_base,
    )  # fmt: skip
    shape = largest_micro_batch(largest, settings.batch_size, settings.rows_per_update)
    return predicted_peak(model, settings.lora, shape, backend)


def require_trainable(method: str, *, quantized: bool) -> None:
    """Raise ConfigError if a method would train quantized weights directly."""
    if method in WHOLE and quantized:
        raise ConfigError(
            "Quantized weights cannot be trained in full.",
            do="name a float model in model.path; or a new one: model.path=models/new model.create=10m"
            if method == PRETRAIN
            else "train.method=lora or dora, or name the float model in model.path",
        )


def require_computable(compute_dtype: str | None, backend_name: str) -> None:
    """Raise ConfigError for a type that the backend does not compute in."""
    if backend_name == "cpu" and compute_dtype not in (None, "float32"):
        raise ConfigError(
            "A CPU computes everything in float32.",
            where="train.compute_dtype",
            expected="null or float32 on this machine",
            got=compute_dtype,
            do="set train.compute_dtype=null, which is right on every machine",
        )


def does_not_fit(
    terms: tuple[MemoryTerm, ...],
    batch_size: int,
    length: int,
    budget: MemoryBudget,
    needed_bytes: int,
    instead: Sequence[str] = (),
    memory_limit_gb: float | None = None,
) -> MachineError:
    """The error for a configuration in which mlx needs ``needed_bytes``; ``instead``: changes that would fit."""
    usual = "a smaller or more strongly quantized model, or shorter rows (train.max_seq_length)"
    large = [term for term in terms if term.size_bytes > total_bytes(terms) / 50]
    parts = ", ".join(f"{term.name} {size_text(term.size_bytes)}" for term in large)
    parts += f", the process around it {size_text(budget.process_bytes)}"
    source, whole_bytes = "the memory budget in machine.json", needed_bytes + budget.process_bytes
    first = "lower train.batch_size, " if batch_size > 1 else "close other programs, or use "
    if memory_limit_gb is not None:
        source = f"what train.memory_limit_gb={memory_limit_gb:g} leaves"
        enough = math.ceil(100 * (memory_limit_gb + (whole_bytes - budget.total_bytes) / 2**30)) / 100
        first = f"raise train.memory_limit_gb (to {enough:.2f} at least), or use "
    return MachineError(
        "This model and data do not fit this machine.",
        expected=f"at most {size_text(budget.total_bytes)}, {source}",
        got=f"{size_text(whole_bytes)} with margin, at batch size {batch_size} and {length} tokens ({parts})",
        do=first + (" or ".join(instead) if instead else usual),
    )
