"""Chooses the configuration: what the data asks for, what the model wants, what fits. Every value has its reason."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from safetrain.core.errors import ConfigError
from safetrain.core.memory import MARGIN, does_not_fit, fits, predicted_peak, require_trainable, total_bytes
from safetrain.core.memory_bounds import learnt_factor
from safetrain.core.memory_budget import within_own_limit
from safetrain.core.memory_terms import FLOAT32, Backend, Shape, backend_of, padded, trained_parameters, unknown_targets
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import DataReport, Machine
from safetrain.core.schema import Lora, Train
from safetrain.core.settings import (
    ALL_LINEAR,
    LoraSettings,
    MemoryTerm,
    Reason,
    Recommendation,
    resolve_lora,
    total_updates,
)
from safetrain.plan.calibration import Calibration, Mode
from safetrain.plan.hyperparameters import ROWS_PER_UPDATE, epochs_for, intervals, learning_rate_for
from safetrain.plan.nearest import Tight, what_would_fit

NOISE = 1.05
KEPT = 4  # checkpoints at one time: two kept, the best, the one that is being written
GIB = 2**30


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
    rejected: frozenset[Candidate] = frozenset()  # did not pass when the model itself was measured
    previous: Candidate | None = None  # what was chosen before: kept, unless another is faster by more than noise
    learnt: float = 0.0  # the smallest factor on the estimate that an earlier death leaves possible


NONE = Experience()


@dataclass(frozen=True)
class Fit:
    """A micro-batch that fits, what it is predicted to need, and how fast it is."""

    batch_size: int
    length: int
    dequantize_base: bool
    gradient_checkpointing: bool
    terms: tuple[MemoryTerm, ...]
    calibration: Calibration | None
    factor: float  # on the predicted peak: one and the margin

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)

    @property
    def candidate(self) -> Candidate:
        """What it is a measure of."""
        return Candidate(self.batch_size, self.length, self.mode)

    @property
    def mode(self) -> Mode:
        """How it computes."""
        return Mode(self.gradient_checkpointing, self.dequantize_base)

    def micro_batch_seconds(self, blocks: int, tokens: int) -> float | None:
        """Of one micro-batch of rows of so many tokens, where it was measured."""
        if self.calibration is None:
            return None
        return self.calibration.speed.seconds(blocks, self.batch_size, tokens)

    def tokens_per_second(self, blocks: int) -> float | None:
        """At its own length, where that was measured."""
        seconds = self.micro_batch_seconds(blocks, self.length)
        return self.batch_size * self.length / seconds if seconds else None


def recommend(
    data: DataReport,
    machine: Machine,
    model: ModelFiles,
    train: Train,
    lora_pins: Lora,
    experience: Experience = NONE,
) -> Recommendation:
    """The whole configuration; pins in ``train`` and ``lora_pins`` that shape memory or length are constraints.

    Raises MachineError when nothing fits, ConfigError when the pins contradict the model.
    """
    require_trainable(train.method, packed=model.quantization_bits is not None)
    budget = within_own_limit(machine.memory_budget_bytes, train.memory_limit_gb)
    machine = dataclasses.replace(machine, memory_budget_bytes=budget)
    reasons: dict[str, str] = {}
    lora = _lora(data, model, lora_pins, reasons)
    experience = dataclasses.replace(experience, learnt=learnt_factor(model.fingerprint))
    fit = _fit(_lengths(data, model, train), machine, model, lora, train, experience)
    _explain_fit(fit, data, model, machine, train, reasons)
    accumulation = train.gradient_accumulation or max(1, ROWS_PER_UPDATE // fit.batch_size)
    together = f"{fit.batch_size} x {accumulation} = {fit.batch_size * accumulation} rows per update"
    usual = "8 to 32 is the range in which LoRA trains well"
    reasons["gradient_accumulation"] = f"{together}; {'set by you' if train.gradient_accumulation else usual}"
    rows = min(data.train.rows, train.max_examples or data.train.rows)
    epochs = epochs_for(rows, fit.batch_size * accumulation, train, reasons)
    updates = total_updates(rows, fit.batch_size * accumulation, epochs, train.max_steps)
    steps = intervals(updates, reasons)
    mean_tokens = max(1, data.train.tokens // data.train.rows)
    seconds = fit.micro_batch_seconds(lora.num_layers, min(fit.length, mean_tokens))
    step_seconds = None if seconds is None else round(seconds * accumulation, 4)
    return Recommendation(
        batch_size=fit.batch_size,
        gradient_accumulation=accumulation,
        max_seq_length=fit.length,
        learning_rate=learning_rate_for(model, lora, train.method, fit.batch_size * accumulation, reasons),
        num_epochs=epochs,
        warmup_steps=steps["warmup_steps"],
        save_steps=steps["save_steps"],
        eval_steps=steps["eval_steps"],
        log_steps=steps["log_steps"],
        dequantize_base=fit.dequantize_base,
        gradient_checkpointing=fit.gradient_checkpointing,
        lora=lora,
        planned_method=train.method,
        planned_model=str(model.folder),
        planned_backend=machine.backend,
        reasons=tuple(Reason(key, text) for key, text in reasons.items()),
        predicted_peak_bytes=fit.peak_bytes,
        memory_terms=fit.terms,
        memory_budget_bytes=machine.memory_budget_bytes,
        margin=round(fit.factor - 1, 4),
        basis="closed form" if fit.calibration is None else f"calibrated here on {fit.calibration.probes} probes",
        step_seconds=step_seconds,
        total_seconds=None if step_seconds is None else round(step_seconds * updates, 1),
        disk_bytes=checkpoint_disk_bytes(model, lora, train),
        measured_peak_bytes=None,
        measured_footprint_bytes=None,
        verified=False,
    )


def _lora(data: DataReport, model: ModelFiles, pins: Lora, reasons: dict[str, str]) -> LoraSettings:
    """Rank by the size of the data, all layers, all linear layers, scale 2 (alpha = 2 rank)."""
    if pins.num_layers is not None and pins.num_layers > model.num_layers:
        raise ConfigError(f"lora.num_layers is {pins.num_layers}.", expected=f"at most {model.num_layers}, the model's")
    unknown = unknown_targets(model, tuple(pins.targets or ()))
    if unknown:
        raise ConfigError(f"lora.targets names layers that the model does not have: {', '.join(unknown)}.")
    rank = 16 if data.train.rows >= 1000 or model.hidden_size < 1024 else 8
    recommended = LoraSettings(rank, 2.0, 0.0, model.num_layers, (ALL_LINEAR,))
    texts = {
        "rank": f"{rank}: enough for {data.train.rows} rows; the learning rate does not depend on it",
        "scale": "2: alpha = 2 x rank; the learning rate is chosen together with it",
        "dropout": "0: few passes over the data do not need it",
        "num_layers": f"all {model.num_layers} blocks: more layers at a low rank beat few at a high one",
        "targets": "all linear layers: attention alone learns less (LoRA without regret)",
    }
    for key, text in texts.items():
        reasons[f"lora.{key}"] = text if getattr(pins, key) is None else "set by you"
    return resolve_lora(pins, recommended)


def default_disk_bytes(data: DataReport, model: ModelFiles, train: Train, pins: Lora) -> int:
    """Disk for a training with these pins and the recommended adapter; raises ConfigError as ``recommend`` does."""
    return checkpoint_disk_bytes(model, _lora(data, model, pins, {}), train)


def checkpoint_disk_bytes(model: ModelFiles, lora: LoraSettings, train: Train) -> int:
    """Disk for a training: checkpoints of float32 weights, the best ones, two moments; and the adapter."""
    weights = FLOAT32 * trained_parameters(model, lora, train.method)
    return (KEPT * 4 + 1) * weights + KEPT * 2**20


def _lengths(data: DataReport, model: ModelFiles, train: Train) -> list[int]:
    """Lengths to try: the pin; else one that cuts no row, then one that cuts at most one row in two hundred."""
    limit = model.max_positions or 2**20
    if train.max_seq_length is not None:
        if train.max_seq_length > limit:
            raise ConfigError(
                f"train.max_seq_length is {train.max_seq_length}.", expected=f"at most {limit}, the model's context"
            )
        return [train.max_seq_length]
    whole = max(data.train.lengths.max, data.valid.lengths.max)
    most = max(data.train.lengths.p99_5, data.valid.lengths.p99_5)
    return [min(padded(length), limit) for length in (whole, most)]


def _fit(
    lengths: list[int], machine: Machine, model: ModelFiles, lora: LoraSettings, train: Train, experience: Experience
) -> Fit:
    """The fastest micro-batch that fits, at the first length at which one does."""
    tried: list[Fit] = []
    for length in lengths:
        found: list[Fit] = []
        for mode in _modes(machine, model, train):
            fits_here = _fits_in_mode(length, mode, machine, model, lora, train, experience, tried)
            found += fits_here
            if fits_here and fits_here[0].batch_size == _sizes(train)[0]:
                break  # the ways that follow take less memory and more time
        if found:
            return _fastest(found, lora.num_layers, experience.previous)
    least = min(tried, key=lambda fit: fit.peak_bytes)
    if train.oversize:
        return least
    backend = _backend(machine, model, train, least.mode, least.calibration)
    tight = Tight(model, lora, padded(least.length), True, backend, least.factor, machine.memory_budget_bytes)
    instead = what_would_fit(tight, machine.backend)
    raise does_not_fit(least.terms, least.batch_size, least.length, machine.memory_budget_bytes, least.factor, instead)


def _fits_in_mode(
    length: int,
    mode: Mode,
    machine: Machine,
    model: ModelFiles,
    lora: LoraSettings,
    train: Train,
    experience: Experience,
    tried: list[Fit],
) -> list[Fit]:
    """Every size that fits, the largest first; all that were looked at are added to ``tried``."""
    calibration, found, accumulation = experience.calibrate(lora, mode), [], train.gradient_accumulation or 1
    backend = _backend(machine, model, train, mode, calibration)
    factor = max(MARGIN if calibration is None else 1 + calibration.margin, experience.learnt)
    for size in _sizes(train):
        accumulates = accumulation > 1 or (train.gradient_accumulation is None and size < ROWS_PER_UPDATE)
        terms = predicted_peak(model, lora, Shape(size, padded(length), accumulates), backend)
        fit = Fit(size, length, mode.dequantize_base, mode.checkpointing, terms, calibration, factor)
        tried.append(fit)
        refused = fit.candidate in experience.rejected
        if not refused and fits(fit.peak_bytes, machine.memory_budget_bytes, factor):
            found.append(fit)
    return found


def _backend(machine: Machine, model: ModelFiles, train: Train, mode: Mode, calibration: Calibration | None) -> Backend:
    backend = backend_of(model, machine.backend, mode.dequantize_base, train.method, checkpointing=mode.checkpointing)
    return backend if calibration is None else calibration.applied_to(backend)


def _sizes(train: Train) -> list[int]:
    """Micro-batches to try, the largest first."""
    most = max(1, ROWS_PER_UPDATE // (train.gradient_accumulation or 1))
    return [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]


def _modes(machine: Machine, model: ModelFiles, train: Train) -> list[Mode]:
    """Ways of computing to try, usually the fastest first."""
    unpacked_first = [True, False] if machine.backend == "cpu" and model.quantization_bits else [False]
    choices = unpacked_first if train.dequantize_base is None else [train.dequantize_base]
    given = train.gradient_checkpointing
    recomputing = [False, True] if given is None else [given]
    return [Mode(checkpointing, dequantize) for checkpointing in recomputing for dequantize in choices]


def _fastest(found: list[Fit], blocks: int, previous: Candidate | None) -> Fit:
    """The previous choice, else the first, within a twentieth of the fastest: noise in measurements must not choose."""
    rates = [fit.tokens_per_second(blocks) for fit in found]
    most = max((rate for rate in rates if rate is not None), default=None)
    if most is None:
        return found[0]
    good = [fit for fit, rate in zip(found, rates, strict=True) if rate and rate >= most / NOISE]
    return next((fit for fit in good if fit.candidate == previous), good[0])


def _explain_fit(
    fit: Fit, data: DataReport, model: ModelFiles, machine: Machine, train: Train, reasons: dict[str, str]
) -> None:
    longest = max(data.train.lengths.max, data.valid.lengths.max)
    if train.max_seq_length is not None:
        reasons["max_seq_length"] = "set by you"
    elif longest <= fit.length:
        reasons["max_seq_length"] = f"the longest row has {longest} tokens: none is cut"
    else:
        limit = "the model's context" if fit.length == model.max_positions else "what fits; at most 1 row in 200 is cut"
        reasons["max_seq_length"] = f"the longest row has {longest} tokens and is cut: {limit}"
    peak, budget = fit.peak_bytes / GIB, machine.memory_budget_bytes / GIB
    predicted = f"predicted peak {peak:.2f} GiB of a budget of {budget:.1f} GiB at {fit.length} tokens"
    which = "largest" if fit.calibration is None else "fastest"
    largest = f"the {which} that fits with {100 * (fit.factor - 1):.0f} % margin: {predicted}"
    reasons["batch_size"] = f"set by you; {predicted}" if train.batch_size else largest
    if not fits(fit.peak_bytes, machine.memory_budget_bytes, fit.factor):
        reasons["batch_size"] = f"the least there is, and it does not fit; train.oversize asks for it: {predicted}"
    if train.gradient_checkpointing is not None:
        reasons["gradient_checkpointing"] = "set by you"
    elif fit.gradient_checkpointing:
        alone = "nothing fits without it; it makes a step about a third slower"
        reasons["gradient_checkpointing"] = alone if fit.calibration is None else f"{alone}, or it is faster by measure"
    else:
        reasons["gradient_checkpointing"] = "not needed: stored activations fit"
    if train.dequantize_base is not None:
        reasons["dequantize_base"] = "set by you"
    elif fit.dequantize_base:
        reasons["dequantize_base"] = "the unpacked weights fit, and on CPU packed ones are unpacked again at each use"
    elif model.quantization_bits is None:
        reasons["dequantize_base"] = "the base is not quantized"
    else:
        reasons["dequantize_base"] = (
            "unpacked weights do not fit" if machine.backend == "cpu" else "the GPU multiplies packed weights directly"
        )
