"""The training run to plan, and the candidates for running its micro-batches, with predicted memory and speed."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.data.windows import MOST_VALID_TOKENS, TrainRows
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import run_again, size_text
from safetrain.core.memory.budget import MemoryBudget, own_limit_bytes, within_data_limit
from safetrain.core.memory.estimate import (
    does_not_fit,
    in_rectangles,
    largest_micro_batch,
    require_computable,
    require_trainable,
    with_margin,
)
from safetrain.core.memory.terms import (
    Backend,
    Shape,
    dequantizes_per_use,
    padded,
    shards_at_once,
    shards_of,
    unknown_targets,
)
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.schema import PRETRAIN, SET, WHOLE, Lora, Train
from safetrain.core.records.settings import (
    ALL_LINEAR,
    LargestUpdate,
    LoraSettings,
    resolve_lora,
    updates_per_epoch,
)
from safetrain.plan.estimate import Estimate, what_would_fit
from safetrain.plan.speed import tokens_to_train

# The order in which candidates are tried; dry runs decide close ones. (measured on CPU: benchmarks/bench_choice)
RECOMPUTED_COST = 4 / 3  # one more forward pass; forward is one part of the work, backward two
FIXED_TOKENS = {"cpu": 16, "metal": 100, "cuda": 100}  # fixed cost of a micro-batch, in tokens' worth of work
DEQUANTIZING_TOKENS = 50  # cost of dequantizing the weights for one pass of a shard, in tokens' worth of work
ROWS_PER_UPDATE = 16
MIN_UPDATES, MAX_EPOCHS = 300, 8
MOST_WINDOW = 2048  # tokens; usual in published pretraining runs of small models
LEAST_PRETRAIN_UPDATES, LEAST_UPDATE_TOKENS = 500, 2048


@dataclass(frozen=True)
class PlanInputs:
    """The records and rows that a plan is made from."""

    data: DataReport
    machine: Machine
    model: ModelFiles
    rows: TrainingRows


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the training rows that determine memory and speed."""

    longest_row: int  # tokens
    mean_tokens: float  # tokens that the model reads per row
    largest: Callable[[int, int], LargestUpdate]  # by truncation length and rows per step
    count: int  # rows per epoch
    usual_per_update: int = ROWS_PER_UPDATE  # a power of two
    valid_tokens: int = 0  # maximum tokens that a validation reads


@dataclass(frozen=True)
class PlannedTraining:
    """What determines the memory and speed of a training run."""

    machine: Machine  # with the budget limited by train.memory_limit_gb
    model: ModelFiles
    lora: LoraSettings
    why_lora: Mapping[str, str]  # a reason for each value of ``lora``
    train: Train
    rows: RowStatistics
    lengths: tuple[int, ...]  # tried in this order until one fits

    @property
    def budget(self) -> MemoryBudget:
        """Memory that training may use, in bytes."""
        return self.machine.memory_budget

    def rows_per_update(self, batch_size: int) -> int:
        """Rows per step: the usual number, or what the pinned settings give."""
        return batch_size * (self.train.gradient_accumulation or max(1, self.rows.usual_per_update // batch_size))


@dataclass(frozen=True)
class Fit(Estimate):
    """A candidate: micro-batches of ``rows`` rows, with predicted memory and relative cost."""

    length: int = 0  # rows are truncated to this, in tokens
    rows_per_update: int = 0
    relative_cost: float = 0.0  # per token, compared with other candidates


def ask(inputs: PlanInputs, train: Train, pins: Lora, rows: RowStatistics | None = None) -> PlannedTraining:
    """Describe the training run to plan, within the pinned settings that affect memory or length.

    ``rows`` is computed unless given. Raises ConfigError if a pinned setting contradicts the model.
    """
    data, machine, model = inputs.data, inputs.machine, inputs.model
    require_trainable(train.method, quantized=model.quantization_bits is not None)
    require_computable(train.compute_dtype, machine.backend)
    if machine.backend != "cuda":  # train.memory_limit_gb does not count the memory of a CUDA device
        budget = within_data_limit(machine.memory_budget_bytes, own_limit_bytes(train.memory_limit_gb))
        machine = dataclasses.replace(machine, memory_budget_bytes=budget)
    lora, reasons = recommended_lora(data, model, pins)
    reasons = {} if train.method in WHOLE else reasons
    rows = rows or _statistics(inputs, train)
    return PlannedTraining(machine, model, lora, reasons, train, rows, tuple(_lengths(data, model, train)))


def _statistics(inputs: PlanInputs, train: Train) -> RowStatistics:
    data, model, rows = inputs.data, inputs.model, inputs.rows
    mean = max(1.0, data.train.tokens / data.train.rows - 1)
    valid_tokens = min(MOST_VALID_TOKENS, int(rows.valid.inputs().sum(dtype=np.int64)))
    rectangles = in_rectangles(model, inputs.machine.backend)

    @functools.cache
    def cut(length: int) -> tuple[TrainRows, TokenRows]:
        shorter = rows.in_windows(length) if train.method == PRETRAIN else rows.cut(length)
        return shorter.train, shorter.valid

    @functools.cache
    def largest(length: int, rows_per_update: int) -> LargestUpdate:
        both = cut(length)
        epochs = 1 if train.method == PRETRAIN else epochs_for(len(both[0]), rows_per_update, train)
        return largest_update(*both, rows_per_update, epochs, train.max_steps, rectangles=rectangles)

    if train.method == PRETRAIN:  # every window is full
        length = window_length(model, train)
        tokens = int(rows.train.documents.lengths.sum(dtype=np.int64))
        usual = windows_per_update(model, tokens_to_train(model.parameters, tokens, train), length)
        return RowStatistics(length, float(length), largest, -(-(tokens - 1) // length), usual, valid_tokens)
    count = min(data.train.rows, train.max_examples or data.train.rows)
    return RowStatistics(data.longest_row, mean, largest, count, valid_tokens=valid_tokens)


def window_length(model: ModelFiles, train: Train | None = None) -> int:
    """Tokens in a pretraining window: the pinned length, else the model's context, at most MOST_WINDOW."""
    pinned = train.max_seq_length if train is not None else None
    return pinned or min(model.max_positions or MOST_WINDOW, MOST_WINDOW)


def windows_per_update(model: ModelFiles, tokens: int, length: int) -> int:
    """Windows per step of pretraining on ``tokens`` tokens; a power of two."""
    return 2 ** max(0, round(math.log2(tokens_per_update(model.parameters, tokens) / length)))


def tokens_per_update(parameters: int, tokens: int) -> int:
    """Tokens per step of pretraining: 0.292 C^0.3271, for C = 6 N D operations (arXiv 2401.02954, formula 1).

    N is ``parameters``, D ``tokens`` over the whole run. A short run uses smaller steps, so that it makes
    at least LEAST_PRETRAIN_UPDATES; below LEAST_UPDATE_TOKENS, the optimizer would take longer than the gradient.
    """
    fitted = 0.292 * (6.0 * parameters * tokens) ** 0.3271
    return int(max(LEAST_UPDATE_TOKENS, min(fitted, tokens / LEAST_PRETRAIN_UPDATES)))


def epochs_for(rows: int, rows_per_update: int, train: Train) -> int:
    """Three epochs; up to eight for little data, to reach 300 steps; one above 50,000 rows."""
    per_epoch = updates_per_epoch(rows, rows_per_update)
    return train.num_epochs or max(usual_epochs(rows), min(MAX_EPOCHS, math.ceil(MIN_UPDATES / per_epoch)))


def usual_epochs(rows: int) -> int:
    """Epochs if the data is not small."""
    return 1 if rows > 50_000 else 3


def recommended_lora(data: DataReport, model: ModelFiles, pins: Lora) -> tuple[LoraSettings, dict[str, str]]:
    """LoRA settings with reasons: rank by the size of the data, all blocks, all linear layers, scale 2."""
    if pins.num_layers is not None and pins.num_layers > model.num_layers:
        raise ConfigError(f"lora.num_layers is {pins.num_layers}.", expected=f"at most {model.num_layers} blocks")
    unknown = unknown_targets(model, tuple(pins.targets or ()))
    if unknown:
        raise ConfigError(f"lora.targets names layers that the model does not have: {', '.join(unknown)}.")
    rank = 16 if data.train.rows >= 1000 or model.hidden_size < 1024 else 8
    texts = {
        "rank": f"{rank}: enough for {data.train.rows:,} rows; the learning rate does not depend on it",
        "scale": "2: alpha = 2 x rank; the learning rate is chosen together with it",
        "dropout": "0: not needed for few epochs",
        "num_layers": f"all {model.num_layers} blocks: more layers at a low rank beat few at a high one",
        "targets": "all linear layers: attention alone learns less (LoRA without regret)",
    }
    reasons = {f"lora.{key}": text if getattr(pins, key) is None else SET for key, text in texts.items()}
    return resolve_lora(pins, LoraSettings(rank, 2.0, 0.0, model.num_layers, (ALL_LINEAR,))), reasons


def _lengths(data: DataReport, model: ModelFiles, train: Train) -> list[int]:
    """Lengths to try: the pinned one; else one that truncates no row, then one that truncates at most 1 row in 200."""
    limit, pinned = model.max_positions or 2**20, train.max_seq_length
    if pinned is not None and pinned > limit:
        raise ConfigError(f"train.max_seq_length is {pinned}.", expected=f"at most {limit}, the model's context")
    if pinned is not None or train.method == PRETRAIN:
        return [window_length(model, train)]
    most = max(data.train.lengths.p99_5, data.valid.lengths.p99_5)
    return list(dict.fromkeys(min(padded(length), limit) for length in (data.longest_row, most)))


def compute_dtype_of(train: Train, machine: Machine, model: ModelFiles) -> str | None:
    """The pinned type, or the one chosen for the machine and the base; None: the base's stored type.

    Pretraining computes in bfloat16 on a GPU, unless that is slower; the weights stay float32.
    """
    if train.method == PRETRAIN and machine.backend != "cpu":
        return train.compute_dtype or machine.compute_dtype or "bfloat16"
    return train.compute_dtype or usual_dtype(machine, model, dequantized=bool(train.dequantize_base))


def usual_dtype(machine: Machine, model: ModelFiles, *, dequantized: bool = False) -> str | None:
    """float32 for a bfloat16 base, if the machine computes faster in float32; other bases are not cast.

    ``dequantized``: a quantized base is dequantized first (train.dequantize_base).
    """
    if not model.in_bfloat16:
        return None
    plain = dequantized or model.quantization_bits is None
    return machine.compute_dtype if plain else machine.quantized_compute_dtype


def candidates_at(question: PlannedTraining, length: int) -> list[Fit]:
    """List all distinct candidates, fastest first."""
    fits = dict[tuple[bool, bool, Shape], Fit]()  # sizes that hold a whole step are identical
    for checkpointing, dequantize in _modes(question):
        for size in _sizes(question):
            fit = _fit(question, size, length, checkpointing, dequantize)
            fits.setdefault((checkpointing, dequantize, fit.micro_batch), fit)
    return sorted(fits.values(), key=lambda fit: fit.relative_cost)


def best_fit(question: PlannedTraining) -> Fit:
    """The fastest candidate that fits by the closed form, at the first length where one does; raises MachineError."""
    all_fits = list[Fit]()
    for length in question.lengths:
        fits = candidates_at(question, length)
        for fit in fits:
            if fit.fits:
                return fit
        all_fits += fits
    raise nothing_fits(question, all_fits)


def nothing_passed(budget_bytes: int, memory_limit_gb: float | None) -> MachineError:
    """The error if no dry run stayed within the budget."""
    budget, first = f"the budget of {size_text(budget_bytes)}", f"close other programs and run '{run_again()}' again"
    if memory_limit_gb is not None:
        budget, first = f"train.memory_limit_gb={memory_limit_gb:g}", "raise that limit"
    return MachineError(
        "No configuration fits: every dry run ran out of memory.",
        expected=f"a process within {budget}",
        do=f"{first}, or shorten rows (train.max_seq_length)",
    )


def nothing_fits(question: PlannedTraining, fits: list[Fit]) -> MachineError:
    """The error if no candidate is predicted to fit: what the smallest one needs, and what would fit instead."""
    least, train = min(fits, key=lambda fit: fit.peak_bytes), question.train
    tokens = least.micro_batch.tokens
    instead = what_would_fit(least.but(tokens=tokens, largest=None))
    needed = with_margin(least.terms)
    return does_not_fit(least.terms, least.rows, tokens, question.budget, needed, instead, train.memory_limit_gb)


def _fit(question: PlannedTraining, batch_size: int, length: int, checkpointing: bool, dequantize: bool) -> Fit:
    train, model, machine = question.train, question.model, question.machine
    rows = question.rows_per_update(batch_size)
    largest = largest_micro_batch(question.rows.largest(length, rows), batch_size, rows)
    fit = Fit(
        model, machine, question.lora, train.method, checkpointing, dequantize, train.optimizer,
        compute_dtype_of(train, machine, model), largest.accumulates, batch_size, length, largest, length, rows,
    )  # fmt: skip
    cost = _relative_cost(question, rows, min(length, question.rows.mean_tokens), largest, fit.backend)
    return dataclasses.replace(fit, relative_cost=cost)


def _relative_cost(
    question: PlannedTraining, rows_per_update: int, mean_tokens: float, shape: Shape, backend: Backend
) -> float:
    """Cost per token in a micro-batch of rows of mean length."""
    rows = max(1.0, min(shape.total / mean_tokens, rows_per_update))
    counts = int(rows), ROWS_PER_UPDATE
    shards, usual_shards = (shards_at_once(count, on_cpu=backend.computes_in_float32) for count in counts)
    if backend.method == PRETRAIN:  # windows can be split for all shards
        shards = usual_shards = shards_of(question.model, shape, backend)
    tokens = rows * mean_tokens / shards
    passes = 2 + backend.checkpointing
    dequantizing = passes * DEQUANTIZING_TOKENS if dequantizes_per_use(question.model, backend) else 0
    work = (RECOMPUTED_COST if backend.checkpointing else 1.0) * tokens + dequantizing
    return (work + FIXED_TOKENS.get(question.machine.backend, 0)) / tokens * (usual_shards / shards) ** 0.5


def _sizes(question: PlannedTraining) -> list[int]:
    """Micro-batch sizes to try, largest first."""
    train = question.train
    most = max(1, question.rows.usual_per_update // (train.gradient_accumulation or 1))
    return [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]


def _modes(question: PlannedTraining) -> list[tuple[bool, bool]]:
    """Pairs to try: whether to recompute activations, and whether to dequantize the base."""
    train, on_cpu = question.train, question.machine.backend == "cpu"
    dequantized_first = [True, False] if on_cpu and question.model.quantization_bits else [False]
    choices = dequantized_first if train.dequantize_base is None else [train.dequantize_base]
    setting = train.gradient_checkpointing
    recomputing = [False, True] if setting is None else [setting]
    return [(checkpointing, dequantize) for checkpointing in recomputing for dequantize in choices]
