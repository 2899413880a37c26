"""The prediction of mlx's peak memory: what is always there, and the most that an update needs at any moment.

Pure arithmetic on a model's headers (core/memory/terms.py): the plan chooses by it, core/memory/run.py checks by it.
(measured: benchmarks/bench_memory_accuracy.py, benchmarks/bench_memory_estimate.py)
"""

import dataclasses
import math
from collections.abc import Sequence

from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.memory.terms import (
    COEFFICIENTS,
    FLOAT32,
    Backend,
    PhaseTerms,
    Shape,
    base_bytes,
    matrix_bytes,
    optimizer_state_bytes,
    padded,
    trained_parameters,
    work_phases,
)
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import LargestUpdate, LoraSettings, MemoryTerm, TrainSettings

# The factor on estimated terms; counted ones need none (measured on Linux CPU: the closed form is 7 to 35 % above the
# peak, benchmarks/bench_memory_estimate; published on Metal: 1.5 and 1.9 % above, MakazhanAlpamys/Soup #663).
MARGIN = 1.15
# Under its memory limit mlx gets by with this share of what is estimated (benchmarks/bench_memory_accuracy: the closed
# form is 10 to 46 % above the least). A run that does not fit even then is not worth a dry run.
LEAST_SHARE = 0.7
OPTIMIZER_COPIES = 3  # of one block's numbers while the optimizer works on it (measured: 1.7 to 2.7)
OVERSTEP_SHARE = 0.02  # of the prediction: mlx oversteps its limit by one allocation
TERM_NAMES = {
    "stored": "stored activations",
    "scores": "attention scores",
    "block": "block in its backward pass",
    "logits": "logits and loss",
    "beside": "logits of other shards",
    "head": "head, dequantized",
    "head_gradient": "gradient of the head",
    "early_gradient": "gradient so far",
    "dequantized": "a block's weights, dequantized",
    "gradient": "gradient",
    "dequantizing": "slice of the head being dequantized",
}


def predicted_peak(model: ModelFiles, lora: LoraSettings, shape: Shape, backend: Backend) -> tuple[MemoryTerm, ...]:
    """The terms of the peak of mlx's allocator, in bytes; their sum is the prediction."""
    adapter = FLOAT32 * trained_parameters(model, lora, backend.method)
    accumulated = (MemoryTerm("accumulated gradient", adapter, exact=True),) if shape.accumulates else ()
    working = [(*accumulated, *terms_of(phase)) for phase in work_phases(model, lora, shape, backend)]
    optimizer = (MemoryTerm("optimizer at work", at_work_bytes(model, lora, backend)),)
    return (
        MemoryTerm("base weights", base_bytes(model, backend), exact=True),
        MemoryTerm("trained weights", adapter, exact=True),
        MemoryTerm("optimizer's state", optimizer_state_bytes(model, lora, backend), exact=True),
        *max(*working, optimizer, key=total_bytes),
    )


def at_work_bytes(model: ModelFiles, lora: LoraSettings, backend: Backend) -> int:
    """What an optimizer step holds: the gradient of all trained weights, and copies of one block's numbers.

    Of a model that is trained whole, the embedding counts as a block.
    """
    trained = FLOAT32 * trained_parameters(model, lora, backend.method)
    block = trained / lora.num_layers
    if backend.method == PRETRAIN:
        block = max(block, matrix_bytes(model))
    return trained + int(OPTIMIZER_COPIES * block)


def terms_of(phase: PhaseTerms) -> tuple[MemoryTerm, ...]:
    """The terms of a phase, each times its coefficient; those of 0 bytes are left out."""
    names = [field.name for field in dataclasses.fields(phase)]
    sizes = [(name, int(getattr(phase, name) * getattr(COEFFICIENTS, name))) for name in names]
    return tuple(MemoryTerm(TERM_NAMES[name], size) for name, size in sizes if size)


def total_bytes(terms: tuple[MemoryTerm, ...]) -> int:
    """The sum of the terms."""
    return sum(term.size_bytes for term in terms)


def with_margin(terms: tuple[MemoryTerm, ...], factor: float = MARGIN) -> int:
    """The predicted peak as it is compared with a budget, in bytes of mlx's allocator.

    ``factor`` is on what is estimated; what is counted needs none.
    """
    total, exact = total_bytes(terms), sum(term.size_bytes for term in terms if term.exact)
    return exact + int((total - exact) * factor)


def fits(terms: tuple[MemoryTerm, ...], budget: MemoryBudget, factor: float = MARGIN) -> bool:
    """Whether a predicted peak, with its margin, leaves the process its part of the budget."""
    return with_margin(terms, factor) <= budget.mlx_bytes


def mlx_limit_bytes(peak_bytes: int, budget: MemoryBudget) -> int:
    """For mx.set_memory_limit: the predicted peak, or what the budget leaves, whichever is less.

    Never the budget itself: mlx would let its memory grow up to it. A little less, because mlx oversteps its limit by
    one allocation.
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
    return Shape(rows, longest, tokens < in_update, tokens, labels)


def check_model_takes(model: ModelFiles, settings: TrainSettings) -> None:
    """Raise ConfigError when the model cannot be trained with these settings, whatever memory there is."""
    require_trainable(settings.method, quantized=model.quantization_bits is not None)
    if model.max_positions is not None and settings.max_seq_length > model.max_positions:
        raise ConfigError(
            f"train.max_seq_length is {settings.max_seq_length}, longer than the model's context.",
            expected=f"at most {model.max_positions}",
        )


def peak_of_run(
    model: ModelFiles, settings: TrainSettings, largest: LargestUpdate, backend: Backend
) -> tuple[MemoryTerm, ...]:
    """The terms of the peak of a run with these settings and this largest update."""
    shape = largest_micro_batch(largest, settings.batch_size, settings.rows_per_update)
    return predicted_peak(model, settings.lora, shape, backend)


def require_trainable(method: str, *, quantized: bool) -> None:
    """Raise ConfigError where quantized weights themselves are to be trained."""
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
    """The error for a configuration whose mlx needs ``needed_bytes``; ``instead``: what would fit."""
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
