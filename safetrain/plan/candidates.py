"""Ways to run micro-batches: what each is predicted to need and in which order to try them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safetrain.core.errors import MachineError
from safetrain.core.formatting import run_again, size_text
from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.memory.estimate import (
    LEAST_SHARE,
    does_not_fit,
    largest_micro_batch,
    mlx_limit_bytes,
    predicted_peak,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.terms import Backend, Shape, backend_of, dequantizes_per_use, shards_at_once, shards_of
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import PRETRAIN, Train
from safetrain.core.records.settings import LargestUpdate, LoraSettings, MemoryTerm
from safetrain.plan.estimate import Estimate, what_would_fit
from safetrain.plan.hyperparameters import ROWS_PER_UPDATE, compute_dtype_of

# For the order in which candidates are tried: dry runs decide what is close. (measured on CPU: benchmarks/bench_choice)
RECOMPUTED_COST = 4 / 3  # one more forward pass, where forward is one part of the work and backward two
FIXED_TOKENS = {"cpu": 16, "metal": 100, "cuda": 100}  # fixed cost of a micro-batch, in tokens' worth of work
DEQUANTIZING_TOKENS = 50  # cost of dequantizing the weights for one pass of a shard, in tokens' worth of work


@dataclass(frozen=True)
class RowStatistics:
    """The figures of a training's rows that memory and speed depend on."""

    longest_row: int  # tokens
    mean_tokens: float  # that a row feeds
    largest: Callable[[int, int], LargestUpdate]  # by the length that rows are cut to, and the rows of an update
    count: int  # rows of a pass
    usual_per_update: int = ROWS_PER_UPDATE  # a power of two


@dataclass(frozen=True)
class PlannedTraining:
    """A training, as far as memory and speed are concerned."""

    machine: Machine  # its budget within train.memory_limit_gb
    model: ModelFiles
    lora: LoraSettings
    why_lora: Mapping[str, str]  # a reason for each of its values
    train: Train
    rows: RowStatistics
    lengths: tuple[int, ...]  # to try in this order, until something fits

    @property
    def budget(self) -> MemoryBudget:
        """The memory that the training may use."""
        return self.machine.memory_budget

    def rows_per_update(self, batch_size: int) -> int:
        """What is usual, or what the pins make."""
        return batch_size * (self.train.gradient_accumulation or max(1, self.rows.usual_per_update // batch_size))

    def backend(self, *, checkpointing: bool, dequantize_base: bool) -> Backend:
        """The way that a candidate computes."""
        return backend_of(
            self.model, self.machine.backend, dequantize_base, self.train.method,
            checkpointing=checkpointing, optimizer=self.train.optimizer,
            compute_dtype=compute_dtype_of(self.train, self.machine, self.model),
        )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """A way to run micro-batches, with what it is predicted to need."""

    batch_size: int
    length: int  # that rows are cut to, in tokens
    checkpointing: bool
    dequantize_base: bool
    shape: Shape  # of the largest micro-batch
    rows_per_update: int
    terms: tuple[MemoryTerm, ...]
    relative_cost: float  # of a token, compared with other candidates

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def needed_bytes(self) -> int:
        """What mlx needs, with the margin for a configuration that no dry run has measured."""
        return with_margin(self.terms)

    def fits(self, budget: MemoryBudget) -> bool:
        """Whether the budget has room for it, by the prediction with its margin."""
        return self.needed_bytes <= budget.mlx_bytes

    def may_fit(self, budget: MemoryBudget) -> bool:
        """Whether it is worth a dry run: mlx gets by with less under its memory limit."""
        return with_margin(self.terms, LEAST_SHARE) <= budget.mlx_bytes

    def mlx_limit_bytes(self, budget: MemoryBudget) -> int:
        """For mx.set_memory_limit."""
        return mlx_limit_bytes(self.peak_bytes, budget)


def candidates_at(question: PlannedTraining, length: int) -> list[Fit]:
    """All candidates that differ, in the order of their expected speed."""
    fits = dict[tuple[bool, bool, Shape], Fit]()  # sizes that hold a whole update are all the same
    for checkpointing, dequantize in _modes(question):
        for size in _sizes(question):
            fit = _fit(question, size, length, checkpointing=checkpointing, dequantize_base=dequantize)
            fits.setdefault((checkpointing, dequantize, fit.shape), fit)
    return sorted(fits.values(), key=lambda fit: fit.relative_cost)


def best_fit(question: PlannedTraining) -> Fit:
    """The first that fits by the closed form, at the first length at which one does; raises MachineError where none."""
    all_fits = list[Fit]()
    for length in question.lengths:
        fits = candidates_at(question, length)
        for fit in fits:
            if fit.fits(question.budget):
                return fit
        all_fits += fits
    raise nothing_fits(question, all_fits)


def nothing_passed(budget_bytes: int, memory_limit_gb: float | None) -> MachineError:
    """The error when no dry run ended well within the budget."""
    budget, first = f"the budget of {size_text(budget_bytes)}", f"close other programs and run '{run_again()}' again"
    if memory_limit_gb is not None:
        budget, first = f"train.memory_limit_gb={memory_limit_gb:g}", "raise it"
    return MachineError(
        "No configuration fits: every dry run ran out of memory.",
        expected=f"a process within {budget}",
        do=f"{first}, or take shorter rows (train.max_seq_length)",
    )


def nothing_fits(question: PlannedTraining, fits: list[Fit]) -> MachineError:
    """The error when nothing is predicted to fit: what the smallest candidate needs, and what would fit instead."""
    least, train = min(fits, key=lambda fit: fit.peak_bytes), question.train
    smallest = Estimate(
        question.model, question.machine, question.lora, train.method, least.checkpointing, least.dequantize_base,
        train.optimizer, compute_dtype_of(train, question.machine, question.model), least.shape.accumulates,
        least.batch_size, least.shape.tokens,
    )  # fmt: skip
    return does_not_fit(
        least.terms, least.batch_size, least.shape.tokens, question.budget, least.needed_bytes,
        what_would_fit(smallest), train.memory_limit_gb,
    )  # fmt: skip


def _fit(question: PlannedTraining, batch_size: int, length: int, *, checkpointing: bool, dequantize_base: bool) -> Fit:
    rows = question.rows_per_update(batch_size)
    shape = largest_micro_batch(question.rows.largest(length, rows), batch_size, rows)
    backend = question.backend(checkpointing=checkpointing, dequantize_base=dequantize_base)
    terms = predicted_peak(question.model, question.lora, shape, backend)
    cost = _relative_cost(question, rows, min(length, question.rows.mean_tokens), shape, backend)
    return Fit(batch_size, length, checkpointing, dequantize_base, shape, rows, terms, cost)


def _relative_cost(
    question: PlannedTraining, rows_per_update: int, mean_tokens: float, shape: Shape, backend: Backend
) -> float:
    """The cost of a token in a micro-batch of rows of mean length."""
    rows = max(1.0, min(shape.total / mean_tokens, rows_per_update))
    counts = int(rows), ROWS_PER_UPDATE
    shards, usual_shards = (shards_at_once(count, on_cpu=backend.computes_in_float32) for count in counts)
    if backend.method == PRETRAIN:  # windows have pieces enough for all
        shards = usual_shards = shards_of(question.model, shape, backend)
    tokens = rows * mean_tokens / shards
    passes = 2 + backend.checkpointing
    dequantizing = passes * DEQUANTIZING_TOKENS if dequantizes_per_use(question.model, backend) else 0
    work = (RECOMPUTED_COST if backend.checkpointing else 1.0) * tokens + dequantizing
    return (work + FIXED_TOKENS.get(question.machine.backend, 0)) / tokens * (usual_shards / shards) ** 0.5


def _sizes(question: PlannedTraining) -> list[int]:
    """Micro-batches to try, the largest first."""
    train = question.train
    most = max(1, question.rows.usual_per_update // (train.gradient_accumulation or 1))
    return [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]


def _modes(question: PlannedTraining) -> list[tuple[bool, bool]]:
    """Whether to recompute blocks, and whether to dequantize the base."""
    train, on_cpu = question.train, question.machine.backend == "cpu"
    dequantized_first = [True, False] if on_cpu and question.model.quantization_bits else [False]
    choices = dequantized_first if train.dequantize_base is None else [train.dequantize_base]
    setting = train.gradient_checkpointing
    recomputing = [False, True] if setting is None else [setting]
    return [(checkpointing, dequantize) for checkpointing in recomputing for dequantize in choices]
