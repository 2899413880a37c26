"""The training run to plan, its possible micro-batches with predicted memory and speed, and changes that would fit."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from safetrain.core.data.training_rows import TrainingRows, largest_update
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.formatting import counted, run_again, size_text
from safetrain.core.memory.estimate import (
    LEAST_SHARE,
    does_not_fit,
    in_rectangles,
    largest_micro_batch,
    predicted_peak,
    require_computable,
    require_trainable,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.system import own_limit_bytes, within_data_limit
from safetrain.core.memory.terms import WIDTH_STEP, Setup, base_bytes, width_of
from safetrain.core.model.files import ModelFiles, adapted_weights
from safetrain.core.model.shapes import wanted_tokens
from safetrain.core.records.adapter_files import starting_shape
from safetrain.core.records.reports import DataReport, Machine, SplitReport
from safetrain.core.records.schema import OF_START, PAIRED, PRETRAIN, SET, WHOLE, Lora, Train, rows_together
from safetrain.core.records.settings import (
    ALL_LINEAR,
    CHUNKS,
    DRY_RUN_SLOW_SECONDS,
    MANY_LABELS,
    MOST_VALID_TOKENS,
    SMALLEST,
    LoraSettings,
    Shape,
    is_target,
    updates_per_epoch,
    with_pins,
)

# Costs that order the candidates; dry runs decide between close ones. (measured on CPU: benchmarks/bench_choice)
QUANTIZED_COST = 1.2  # at least, of a quantized base on a CUDA device that is faster without (engine/backend.py: NOISE)
RECOMPUTED_COST = 4 / 3  # one more forward pass, which is a third of the work of a step
FIXED_TOKENS = 32  # fixed cost of a micro-batch on CPU, in tokens' worth of work; on a GPU PADDING_TOKENS
DEQUANTIZING_TOKENS = 100  # cost of dequantizing the weights for one pass, in tokens' worth of work (on two cores)
ROWS_PER_UPDATE = 16
MIN_UPDATES, MAX_EPOCHS = 300, 8
START_SECONDS, LOAD_BYTES_PER_SECOND = 4.0, 0.5e9  # start of a process with mlx, and timing; loading of the base
FLOPS_PER_WEIGHT = 4  # per token: one product forward, one backward; base weights have no gradient
ATTAINED = 0.5  # a training run's share of the speed of a large product (measured: benchmarks/bench_throughput)
LARGEST_MADE = 2.5  # time of a dry run, in largest updates, with its validation; 1.5 if they are slow
SHORTEST_ROWS = 64
# Up to four passes over the same text are worth nearly as much as new text (Muennighoff et al. 2023, arXiv:2305.16264).
MOST_PASSES = 4
MOST_WINDOW = 2048  # tokens; usual in published pretraining runs of small models
LEAST_UPDATES, LEAST_UPDATE_TOKENS = 500, 2048  # of pretraining


@dataclass(frozen=True)
class PlanInputs:
    data: DataReport
    machine: Machine
    model: ModelFiles
    rows: TrainingRows


@dataclass(frozen=True, kw_only=True)
class Estimate(Setup):
    """A way to run a training, with its estimated memory."""

    machine: Machine
    largest: Shape | None = None  # largest micro-batch of the real rows; None: all rows have full length
    relative_cost: float = 0.0  # per token, compared with other candidates

    @property
    def micro_batch(self) -> Shape:
        tokens = width_of(self.settings.max_seq_length, rectangles=in_rectangles(self.model, self.backend))
        rows = max(self.settings.batch_size, rows_together(self.settings.method))
        return self.largest or Shape(rows, tokens, rows * tokens, rows * tokens, max(rows, ROWS_PER_UPDATE) * tokens)

    @functools.cached_property
    def terms(self) -> dict[str, int]:
        """The terms of the peak of mlx's allocator."""
        return predicted_peak(self, self.micro_batch)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def needed_bytes(self) -> int:
        """Predicted peak with its margin, plus the memory of Python and libraries."""
        return with_margin(self.terms) + self.machine.process_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory is within the machine's budget."""
        return with_margin(self.terms) <= self.machine.memory_budget.mlx_bytes

    @property
    def may_fit(self) -> bool:
        """Whether a dry run is worthwhile: under a memory limit, mlx can run with less than estimated."""
        return with_margin(self.terms, LEAST_SHARE) <= self.machine.memory_budget.mlx_bytes

    @property
    def dequantizing_pays(self) -> bool:
        """Whether training is faster with a dequantized base, where it fits."""
        return self.on_cpu or bool(self.machine.dequantizing_pays)

    @property
    def cheapest(self) -> "Estimate":
        """The same training run, changed to need the least memory."""
        return self.but(gradient_checkpointing=True, dequantize_base=False)

    def but(self, **changes: Any) -> "Estimate":
        """The same training run with these settings changed."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes))


@dataclass(frozen=True)
class PlannedTraining:
    """The settings and sizes of data that determine the memory and speed of a training run."""

    run: Estimate  # micro-batches not chosen yet; its machine's budget is within train.memory_limit_gb
    why_lora: Mapping[str, str]  # a reason for each value of ``run.settings.lora``
    train: Train
    lengths: tuple[int, ...]  # to truncate to, in tokens; tried in this order until one fits
    longest_row: int  # tokens
    mean_tokens: float  # tokens that the model reads per row
    largest: Callable[[int, int], Shape]  # largest step for a length and a number of rows per step
    row_count: int  # rows per epoch
    test: SplitReport
    usual_per_update: int = ROWS_PER_UPDATE  # a power of two
    valid_tokens: int = 0  # maximum tokens that a validation reads

    def rows_per_update(self, batch_size: int) -> int:
        """Rows per step: the usual number, or the number that the pinned settings give; even for pairs."""
        accumulation = self.train.gradient_accumulation or max(1, self.usual_per_update // batch_size)
        if self.train.method in PAIRED and not self.train.gradient_accumulation:
            accumulation += batch_size * accumulation % 2
        return batch_size * accumulation


def ask(inputs: PlanInputs, train: Train, pins: Lora) -> PlannedTraining:
    """Describe the training run to plan, with the pinned settings that affect memory or length.

    Raises ConfigError if a pinned setting contradicts the model.
    """
    data, machine, model, rows = inputs.data, inputs.machine, inputs.model, inputs.rows
    require_trainable(train.method, quantized=model.quantization_bits is not None)
    require_computable(train.compute_dtype, machine.backend)
    if machine.backend != "cuda":  # train.memory_limit_gb does not count the memory of a CUDA device
        budget = within_data_limit(machine.memory_budget_bytes, own_limit_bytes(train.memory_limit_gb))
        machine = dataclasses.replace(machine, memory_budget_bytes=budget)
    lora, reasons = recommended_lora(data, model, pins)
    if train.from_adapter:
        base = model.folder, model.fingerprint, model.num_layers
        lora = dataclasses.replace(starting_shape(train.from_adapter, train.method, *base), dropout=lora.dropout)
        reasons |= {f"lora.{key}": f"that of {train.from_adapter}" for key in OF_START}
    valid_tokens = min(MOST_VALID_TOKENS, int(rows.valid.inputs().sum(dtype=np.int64)))
    lengths, usual, longest = tuple(_lengths(data, model, train)), ROWS_PER_UPDATE, data.longest_row
    mean = max(1.0, data.train.tokens / data.train.rows - 1)
    count = min(data.train.rows, (train.max_examples or data.train.rows) * inputs.rows.train.documents.rows_per_pair)
    if train.method == PRETRAIN:  # every window is full
        longest, tokens = lengths[0], int(rows.train.documents.lengths.sum(dtype=np.int64))
        usual_tokens = min(wanted_tokens(model.parameters), MOST_PASSES * tokens)
        usual = windows_per_update(model, train.num_epochs * tokens if train.num_epochs else usual_tokens, longest)
        mean, count = float(longest), -(-(tokens - 1) // longest)
    settings = dataclasses.replace(with_pins(SMALLEST, train), lora=lora)
    dtype = compute_dtype_of(train, machine, model, dequantized=settings.dequantize_base)
    settings = dataclasses.replace(settings, compute_dtype=dtype)
    run = Estimate(model, settings, machine.backend, machine=machine)
    reasons, largest = {} if train.method in WHOLE else reasons, _largest_updates(inputs, train)
    return PlannedTraining(run, reasons, train, lengths, longest, mean, largest, count, data.test, usual, valid_tokens)


def _largest_updates(inputs: PlanInputs, train: Train) -> Callable[[int, int], Shape]:
    """Return a function from truncation length and rows per step to the largest step; it computes each pair once."""
    rectangles = in_rectangles(inputs.model, inputs.machine.backend)

    @functools.cache
    def largest(length: int, rows_per_update: int) -> Shape:
        rows = inputs.rows.at_length(length, train.method)
        epochs = 1 if train.method == PRETRAIN else epochs_for(len(rows.train), rows_per_update, train)
        return largest_update(rows.train, rows.valid, rows_per_update, epochs, train.max_steps, rectangles=rectangles)

    return largest


def windows_per_update(model: ModelFiles, tokens: int, length: int) -> int:
    """Windows per step of pretraining on ``tokens`` tokens; a power of two.

    A short run uses smaller steps, so that it makes at least LEAST_UPDATES; below LEAST_UPDATE_TOKENS, the optimizer
    would take longer than the gradient.
    """
    fitted = fitted_update_tokens(6.0 * model.parameters * tokens)
    update_tokens = int(max(LEAST_UPDATE_TOKENS, min(fitted, tokens / LEAST_UPDATES)))
    return 2 ** max(0, round(math.log2(update_tokens / length)))


def fitted_update_tokens(operations: float) -> float:
    """Tokens per step, for the operations of the whole run (arXiv 2401.02954, formula 1)."""
    return 0.292 * operations**0.3271


def epochs_for(rows: int, rows_per_update: int, train: Train) -> int:
    """The pinned epochs; else one for pairs; else three (one above 50,000 rows), or up to eight, to reach 300 steps."""
    if train.method in PAIRED:
        return train.num_epochs or 1
    per_epoch = updates_per_epoch(rows, rows_per_update)
    return train.num_epochs or max(usual_epochs(rows), min(MAX_EPOCHS, math.ceil(MIN_UPDATES / per_epoch)))


def usual_epochs(rows: int) -> int:
    """Epochs for data that is not small: three, or one above 50,000 rows."""
    return 1 if rows > 50_000 else 3


def recommended_lora(data: DataReport, model: ModelFiles, pins: Lora) -> tuple[LoraSettings, dict[str, str]]:
    """LoRA settings with reasons: rank by the size of the data, all blocks, all linear layers, scale 2."""
    if pins.num_layers is not None and pins.num_layers > model.num_layers:
        raise ConfigError(f"lora.num_layers is {pins.num_layers}.", expected=f"at most {model.num_layers} blocks")
    names = [name for _, name, _ in adapted_weights(model)]  # none if the files name no layers
    unknown = [each for each in pins.targets or () if names and not any(is_target(name, each) for name in names)]
    if unknown:
        raise ConfigError(f"lora.targets names layers that the model does not have: {', '.join(unknown)}.")
    rank = 16 if data.train.rows >= 1000 or model.hidden_size < 1024 else 8
    many = counted(data.train.pairs, "pair") if data.train.pairs else counted(data.train.rows, "row")
    texts = {
        "rank": f"{rank}: enough for {many}; the learning rate does not depend on it",
        "scale": "2: alpha = 2 x rank; the learning rate is chosen together with it",
        "dropout": "0: not needed for few epochs",
        "num_layers": f"all {model.num_layers} blocks: many layers at a low rank beat few layers at a high rank",
        "targets": "all linear layers: attention alone learns less (LoRA without regret)",
    }
    reasons = {f"lora.{key}": text if getattr(pins, key) is None else SET for key, text in texts.items()}
    return with_pins(LoraSettings(rank, 2.0, 0.0, model.num_layers, (ALL_LINEAR,)), pins), reasons


def _lengths(data: DataReport, model: ModelFiles, train: Train) -> list[int]:
    """Lengths to try: the pinned one; else one that truncates no row, then one that truncates at most 1 row in 200."""
    limit, pinned = model.max_positions or 2**20, train.max_seq_length
    if pinned is not None and pinned > limit:
        raise ConfigError(f"train.max_seq_length is {pinned}.", expected=f"at most {limit}, the model's context")
    if pinned is not None or train.method == PRETRAIN:
        return [pinned or min(limit, MOST_WINDOW)]
    most = max(data.train.lengths.p99_5, data.valid.lengths.p99_5)
    return list(dict.fromkeys(min(width_of(each, rectangles=False), limit) for each in (data.longest_row, most)))


def compute_dtype_of(train: Train, machine: Machine, model: ModelFiles, *, dequantized: bool) -> str | None:
    """The pinned type, or the one chosen for the machine and the base; None: the base's stored type.

    Pretraining computes in bfloat16 on a GPU, unless that is slower; the weights stay float32.
    """
    if train.method == PRETRAIN and machine.backend != "cpu":
        return train.compute_dtype or machine.compute_dtype or "bfloat16"
    return train.compute_dtype or usual_dtype(machine, model, dequantized=dequantized)


def usual_dtype(machine: Machine, model: ModelFiles, *, dequantized: bool = False) -> str | None:
    """float32 for a bfloat16 base, if the machine computes faster in float32; other bases are not cast.

    ``dequantized``: a quantized base is dequantized first.
    """
    if not model.in_bfloat16:
        return None
    plain = dequantized or model.quantization_bits is None
    return machine.compute_dtype if plain else machine.quantized_compute_dtype


def candidates_at(question: PlannedTraining, length: int, *, stream: bool = False) -> list[Estimate]:
    """List all distinct candidates, fastest first, with the base in memory, or on disk if ``stream``."""
    train, run = question.train, question.run
    most = max(1, question.usual_per_update // (train.gradient_accumulation or 1))
    sizes = [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]
    if train.method in PAIRED and not train.batch_size:
        sizes = [size for size in sizes if size > 1 and question.rows_per_update(size) % 2 == 0] or [2]
    dequantizing = [True, False] if run.dequantizing_pays and run.model.quantization_bits else [False]
    dequantizing = dequantizing if train.dequantize_base is None else [train.dequantize_base]
    recomputing = [False, True] if train.gradient_checkpointing is None else [train.gradient_checkpointing]
    modes = [(True, bool(train.dequantize_base))] if stream else list(itertools.product(recomputing, dequantizing))
    rectangles = in_rectangles(run.model, run.backend)
    fits = dict[tuple[bool, bool, Shape], Estimate]()  # sizes that hold a whole step are identical
    most_labels = run.machine.labels_at_once or MANY_LABELS
    for (checkpointing, dequantize), size in itertools.product(modes, sizes):
        rows = question.rows_per_update(size)
        together = max(size, rows_together(train.method))
        shape = largest_micro_batch(question.largest(length, rows), together, rows, rectangles=rectangles)
        fit = run.but(
            dequantize_base=dequantize, gradient_checkpointing=checkpointing, stream_base=stream, batch_size=size,
            gradient_accumulation=rows // size, max_seq_length=length,
            compute_dtype=compute_dtype_of(train, run.machine, run.model, dequantized=dequantize),
        )  # fmt: skip
        fit = dataclasses.replace(fit, largest=shape)
        many = (fit.but(labels_at_once=labels) for labels in CHUNKS if labels <= most_labels)
        fits.setdefault((checkpointing, dequantize, shape), next((each for each in many if each.fits), fit))
    costed = [dataclasses.replace(fit, relative_cost=_relative_cost(question, fit)) for fit in fits.values()]
    return sorted(costed, key=lambda fit: fit.relative_cost)


def places_of_base(question: PlannedTraining) -> list[bool]:
    """The values of ``stream`` in the order to try: the base stays on disk only if nothing else fits, or if pinned."""
    train = question.train
    if train.stream_base is not None:
        return [train.stream_base]
    return [False] if train.method in WHOLE or train.gradient_checkpointing is False else [False, True]


def _relative_cost(question: PlannedTraining, fit: Estimate) -> float:
    """Cost per token in a micro-batch of rows of mean length."""
    settings = fit.settings
    mean_tokens = min(settings.max_seq_length, question.mean_tokens)
    tokens = mean_tokens * max(1.0, min(fit.micro_batch.tokens / mean_tokens, settings.rows_per_update))
    fixed = FIXED_TOKENS if fit.on_cpu else settings.padding_tokens
    fixed += (2 + settings.gradient_checkpointing) * DEQUANTIZING_TOKENS if fit.dequantizes_per_use else 0
    slower = QUANTIZED_COST if fit.machine.dequantizing_pays and not settings.dequantize_base else 1.0
    return slower * (RECOMPUTED_COST if settings.gradient_checkpointing else 1.0) + fixed / tokens


def dry_run_seconds(question: PlannedTraining, fit: Estimate) -> float:
    """Expected seconds of a dry run, from the speed of a large matrix product; 0 if the speed is unknown."""
    if not fit.machine.gemm_gflops:
        return 0.0
    largest = seconds_of(fit, fit.micro_batch.tokens)
    updates = LARGEST_MADE - (largest > DRY_RUN_SLOW_SECONDS)
    loading = base_bytes(fit.but(method="lora", compute_dtype=None)) / LOAD_BYTES_PER_SECOND
    return START_SECONDS + loading + updates * largest


def seconds_of(fit: Estimate, tokens: int) -> float:
    """Expected seconds of training on so many tokens, from the speed of a large matrix product."""
    operations = (FLOPS_PER_WEIGHT + 2 * fit.settings.gradient_checkpointing) * fit.model.parameters
    return tokens * operations / (ATTAINED * fit.machine.gemm_gflops * 1e9)


def nothing_passed(question: PlannedTraining) -> MachineError:
    """The error if no dry run stayed within the budget."""
    return MachineError(
        "No configuration fits: every dry run ran out of memory.",
        expected=f"a process within the budget of {size_text(question.run.machine.memory_budget_bytes)}",
        do=f"close other programs or raise train.memory_limit_gb, and run '{run_again()}' again; or shorten rows "
        "(train.max_seq_length)",
    )


def nothing_fits(question: PlannedTraining, fits: list[Estimate]) -> MachineError:
    """The error if no candidate is predicted to fit, with the memory of the smallest one and changes that would fit."""
    least = min(fits, key=lambda fit: fit.peak_bytes)
    tokens, budget = least.micro_batch.longest, question.run.machine.memory_budget
    full = dataclasses.replace(least.but(max_seq_length=tokens), largest=None)
    instead, needed = what_would_fit(full), with_margin(least.terms)
    return does_not_fit(least.terms, least.settings.batch_size, tokens, budget, needed, instead)


def what_would_fit(run: Estimate) -> list[str]:
    """List changes that make a training run fit, as texts with the memory that it then needs."""
    keys = dict[str, int | str]()
    for key, value in _smaller(run):
        keys[key], run = value, run.but(**{key: value})
        if run.fits:
            changes = " ".join(f"train.{key}={value}".lower() for key, value in keys.items())
            return [f"{changes} ({size_text(run.needed_bytes)})"]
    return ["a smaller base model or a machine with more memory"]


def _smaller(run: Estimate) -> Iterator[tuple[str, int | str]]:
    """Yield settings that need less memory: key and value; those that only cost time come first."""
    settings, rows = run.settings, run.settings.batch_size
    while rows > rows_together(settings.method):
        rows //= 2
        yield "batch_size", rows
    if settings.dequantize_base and run.model.quantization_bits is not None:
        yield "dequantize_base", False
    if not settings.gradient_checkpointing:
        yield "gradient_checkpointing", True
    if settings.compute_dtype == "float32" and run.machine.backend != "cpu":
        yield "compute_dtype", "bfloat16"
    if not settings.stream_base and settings.method not in WHOLE:
        yield "stream_base", True
    for tokens in range((settings.max_seq_length - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP):
        yield "max_seq_length", tokens
