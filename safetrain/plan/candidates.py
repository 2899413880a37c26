"""Ways to run micro-batches: which of them fit, how fast each is, and the one to take."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from safetrain.core.errors import MachineError
from safetrain.core.memory import (
    LIMITED_FACTOR,
    MARGIN,
    does_not_fit,
    largest_micro_batch,
    mlx_limit_bytes,
    predicted_peak,
    total_bytes,
    with_margin,
)
from safetrain.core.memory_budget import MemoryBudget
from safetrain.core.memory_terms import Backend, Shape, allocation_bytes, backend_of, base_bytes, parts_at_once
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import Machine
from safetrain.core.schema import Train
from safetrain.core.settings import LargestUpdate, LoraSettings, MemoryTerm
from safetrain.core.words import size_text
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.compute_dtype import compute_dtype_of
from safetrain.plan.hyperparameters import ROWS_PER_UPDATE
from safetrain.plan.nearest import Tight, what_would_fit

NOISE = 1.05

Calibrate = Callable[[LoraSettings, Mode], Calibration | None]


def uncalibrated(_lora: LoraSettings, _mode: Mode) -> Calibration | None:
    """The closed form alone."""
    return None


@dataclass(frozen=True)
class Candidate:
    """A way to run micro-batches."""

    batch_size: int
    length: int
    mode: Mode


@dataclass(frozen=True)
class Experience:
    """What this machine has shown, beside the closed form."""

    calibrate: Calibrate = uncalibrated
    certifies: bool = False  # the model itself is measured afterwards, and decides: then no margin is needed
    rejected: frozenset[Candidate] = frozenset()  # rehearsed already
    less_than_bytes: float = math.inf  # predicted of what ran out of memory: nothing that would take as much passes
    previous: Candidate | None = None  # what was chosen before: kept, unless another is faster by more than noise
    learnt_factor: float = 0.0  # the smallest on the estimate that an earlier death leaves possible

    def allows(self, fit: "Fit") -> bool:
        """Whether nothing is known against it."""
        return fit.candidate not in self.rejected and fit.peak_bytes < self.less_than_bytes


NO_EXPERIENCE = Experience()


@dataclass(frozen=True)
class Rows:
    """The rows of a training, as far as its memory and speed depend on them."""

    longest_row: int  # tokens
    mean_tokens: float  # that a row feeds
    largest: Callable[[int, int], LargestUpdate]  # once cut to so many tokens, of updates of so many rows


@dataclass(frozen=True)
class Question:
    """A training, as far as memory and speed are concerned."""

    machine: Machine  # its budget within train.memory_limit_gb
    model: ModelFiles
    lora: LoraSettings
    train: Train
    rows: Rows

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return self.rows.longest_row

    def rows_per_update(self, batch_size: int) -> int:
        """As many as there should be, or as the pins make."""
        return batch_size * (self.train.gradient_accumulation or max(1, ROWS_PER_UPDATE // batch_size))

    def shape(self, batch_size: int, length: int) -> Shape:
        """The largest micro-batch of rows that are cut to the length."""
        rows = self.rows_per_update(batch_size)
        return largest_micro_batch(self.rows.largest(length, rows), batch_size, rows)

    def backend(self, mode: Mode, calibration: Calibration | None) -> Backend:
        """How it computes, with what was measured of that."""
        backend = backend_of(
            self.model, self.machine.backend, mode.dequantize_base, self.train.method,
            checkpointing=mode.checkpointing, optimizer=self.train.optimizer,
            optimizer_state_bits=self.train.optimizer_state_bits,
            compute_dtype=compute_dtype_of(self.train, self.machine, self.model),
        )  # fmt: skip
        return backend if calibration is None else calibration.applied_to(backend)


@dataclass(frozen=True)
class Fit:
    """A candidate with what it is predicted to need, and how fast it is."""

    candidate: Candidate
    shape: Shape
    rows_per_update: int
    mean_tokens: float  # that a row feeds
    terms: tuple[MemoryTerm, ...]
    calibration: Calibration | None
    factor: float  # one and the margin on what is estimated; below one: of what mlx can do with when it is limited
    learnt_factor: float  # the least on the whole peak that an earlier death leaves possible
    overstep_bytes: int | None  # by which mlx oversteps its limit, where that is part of the prediction
    on_cpu: bool

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def needed_bytes(self) -> int:
        """Of mlx's allocator, with the margin."""
        return max(with_margin(self.terms, self.factor), int(self.learnt_factor * self.peak_bytes))

    def fits(self, budget: MemoryBudget) -> bool:
        """Whether the budget has room for it."""
        return self.needed_bytes <= budget.mlx_bytes

    def peak_within(self, budget: MemoryBudget) -> int:
        """The peak once mlx is limited to the budget."""
        return min(self.peak_bytes, budget.mlx_bytes) if self.factor < 1 and self.fits(budget) else self.peak_bytes

    def mlx_limit_bytes(self, budget: MemoryBudget) -> int:
        """For mx.set_memory_limit."""
        return mlx_limit_bytes(self.peak_bytes, budget, self.overstep_bytes)

    def update_seconds(self, blocks: int) -> float | None:
        """Of an update of rows of mean length, where it was measured."""
        if self.calibration is None:
            return None
        tokens = self.rows_per_update * self.mean_tokens
        micro_batches = math.ceil(tokens / (self.candidate.batch_size * self.shape.tokens))
        rows, length = math.ceil(self.rows_per_update / micro_batches), max(1, round(self.mean_tokens))
        shape = Shape(rows, length, micro_batches > 1, max(1, round(tokens / micro_batches)))
        parts = parts_at_once(rows, on_cpu=self.on_cpu)
        return micro_batches * self.calibration.speed.seconds(blocks, shape, parts)

    def rows_per_second(self, blocks: int) -> float | None:
        """Where it was measured."""
        seconds = self.update_seconds(blocks)
        return self.rows_per_update / seconds if seconds else None


def best_fit(question: Question, lengths: list[int], experience: Experience) -> Fit:
    """The fastest candidate that fits, at the first length at which one does; raises MachineError where none does.

    With train.oversize, the one that needs least instead of the error.
    """
    train, budget, tried = question.train, question.machine.memory_budget, list[Fit]()
    for length in lengths:
        found: list[Fit] = []
        for mode in _modes(question):
            in_mode = _in_mode(question, length, mode, experience)
            tried += in_mode
            fitting = [fit for fit in in_mode if fit.fits(budget)]
            found += [fit for fit in fitting if experience.allows(fit)]
            if in_mode[0] in fitting and in_mode[0].peak_bytes < experience.less_than_bytes:
                break  # even the largest: the ways that follow take less memory and more time, and are not measured
        if found:
            return _fastest(found, question.lora.num_layers, experience.previous)
    least = min(tried, key=lambda fit: fit.peak_bytes)
    if train.oversize:
        return least
    if not experience.allows(least):
        raise nothing_passed(budget.total_bytes, train.memory_limit_gb)
    raise _nothing_fits(question, least)


def nothing_passed(budget_bytes: int, memory_limit_gb: float | None) -> MachineError:
    """What to say when the model itself bore out no prediction."""
    budget, first = f"the budget of {size_text(budget_bytes)}", "close other programs and run 'dvc repro' again"
    if memory_limit_gb is not None:
        budget, first = f"train.memory_limit_gb={memory_limit_gb:g}", "raise it"
    return MachineError(
        "Everything that was predicted to fit did not, when the model itself was measured.",
        expected=f"a process within {budget}",
        do=f"{first}, or take shorter rows (train.max_seq_length); train.oversize=true tries all the same",
    )


def _nothing_fits(question: Question, least: Fit) -> MachineError:
    backend = question.backend(least.candidate.mode, least.calibration)
    batch_size = least.candidate.batch_size
    shape = Shape(batch_size, least.shape.tokens, least.shape.accumulates)
    budget = question.machine.memory_budget
    factor = max(least.factor, least.needed_bytes / least.peak_bytes if least.learnt_factor else 0.0)
    tight = Tight(question.model, question.lora, shape, backend, factor, budget)
    instead = what_would_fit(tight, question.machine.backend)
    return does_not_fit(
        least.terms, batch_size, least.shape.tokens, budget, least.needed_bytes, instead,
        question.train.memory_limit_gb,
    )  # fmt: skip


def _in_mode(question: Question, length: int, mode: Mode, experience: Experience) -> list[Fit]:
    """Every size, the largest first. Nothing is measured where weights and process alone are too large."""
    weights = base_bytes(question.model, question.backend(mode, None))
    hopeless = weights > question.machine.memory_budget.mlx_bytes  # measuring would only swap
    calibration = None if hopeless else experience.calibrate(question.lora, mode)
    factor = _factor(question, calibration, experience)
    backend, on_cpu, found = question.backend(mode, calibration), question.machine.backend == "cpu", []
    for size in _sizes(question.train):
        shape = question.shape(size, length)
        terms = predicted_peak(question.model, question.lora, shape, backend)
        per_update, mean = question.rows_per_update(size), min(length, question.rows.mean_tokens)
        candidate = Candidate(size, length, mode)
        overstep = allocation_bytes(question.model, shape, backend) if backend.ahead else None
        learnt = experience.learnt_factor
        found.append(Fit(candidate, shape, per_update, mean, terms, calibration, factor, learnt, overstep, on_cpu))
    return found


def _factor(question: Question, calibration: Calibration | None, experience: Experience) -> float:
    if calibration is None:
        return MARGIN
    if not experience.certifies:
        return 1 + calibration.margin
    return LIMITED_FACTOR if calibration.ahead else 1.0


def _sizes(train: Train) -> list[int]:
    """Micro-batches to try, the largest first."""
    most = max(1, ROWS_PER_UPDATE // (train.gradient_accumulation or 1))
    return [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]


def _modes(question: Question) -> list[Mode]:
    """Ways of computing to try, usually the fastest first."""
    train, on_cpu = question.train, question.machine.backend == "cpu"
    unpacked_first = [True, False] if on_cpu and question.model.quantization_bits else [False]
    choices = unpacked_first if train.dequantize_base is None else [train.dequantize_base]
    given = train.gradient_checkpointing
    recomputing = [False, True] if given is None else [given]
    return [Mode(checkpointing, dequantize) for checkpointing in recomputing for dequantize in choices]


def _fastest(found: list[Fit], blocks: int, previous: Candidate | None) -> Fit:
    """The fastest, or the previous choice if that is within a twentieth of it: noise must not change a plan."""
    rates = {fit.candidate: rate for fit in found if (rate := fit.rows_per_second(blocks))}
    if not rates:
        return found[0]
    fastest = max((fit for fit in found if fit.candidate in rates), key=lambda fit: rates[fit.candidate])
    kept = [fit for fit in found if fit.candidate == previous]
    return kept[0] if kept and rates.get(kept[0].candidate, 0) >= rates[fastest.candidate] / NOISE else fastest
