"""Chooses the configuration: what the data asks for, what the model wants, what fits. Every value has its reason."""

import itertools
import math
from dataclasses import dataclass

from safetrain.core.errors import ConfigError
from safetrain.core.memory import (
    MARGIN,
    PROCESS_BYTES,
    Shape,
    backend_of,
    does_not_fit,
    fits,
    padded,
    predicted_peak,
    require_trainable,
    total_bytes,
    unknown_targets,
)
from safetrain.core.memory_bounds import learnt_factor
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
    updates_per_epoch,
    usual_warmup,
)

ROWS_PER_UPDATE = 16
MIN_UPDATES, MAX_EPOCHS = 300, 8
FULL_RATE_FACTOR = 10
GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that fits, and what it is predicted to need."""

    batch_size: int
    length: int
    dequantize_base: bool
    gradient_checkpointing: bool
    terms: tuple[MemoryTerm, ...]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of mlx's allocator."""
        return total_bytes(self.terms)


def recommend(data: DataReport, machine: Machine, model: ModelFiles, train: Train, lora_pins: Lora) -> Recommendation:
    """The whole configuration; pins in ``train`` and ``lora_pins`` that shape memory or length are constraints.

    Raises MachineError when nothing fits, ConfigError when the pins contradict the model.
    """
    require_trainable(train.method, packed=model.quantization_bits is not None)
    reasons: dict[str, str] = {}
    lora = _lora(data, model, lora_pins, reasons)
    fit = _fit(_lengths(data, model, train), machine, model, lora, train)
    _explain_fit(fit, data, model, machine, train, reasons)
    accumulation = train.gradient_accumulation or max(1, ROWS_PER_UPDATE // fit.batch_size)
    together = f"{fit.batch_size} x {accumulation} = {fit.batch_size * accumulation} rows per update"
    usual = "8 to 32 is the range in which LoRA trains well"
    reasons["gradient_accumulation"] = f"{together}; {'set by you' if train.gradient_accumulation else usual}"
    rows = min(data.train.rows, train.max_examples or data.train.rows)
    epochs = _epochs(rows, fit.batch_size * accumulation, train, reasons)
    updates = total_updates(rows, fit.batch_size * accumulation, epochs, train.max_steps)
    steps = _steps(updates, reasons)
    return Recommendation(
        batch_size=fit.batch_size,
        gradient_accumulation=accumulation,
        max_seq_length=fit.length,
        learning_rate=_learning_rate(model, lora, train.method, fit.batch_size * accumulation, reasons),
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
        reasons=tuple(Reason(key, text) for key, text in reasons.items()),
        predicted_peak_bytes=fit.peak_bytes,
        memory_terms=fit.terms,
        memory_budget_bytes=machine.memory_budget_bytes,
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


def _fit(lengths: list[int], machine: Machine, model: ModelFiles, lora: LoraSettings, train: Train) -> Fit:
    """The first length with a micro-batch that fits, the largest such, the base unpacked where that helps."""
    on_cpu, accumulation = machine.backend == "cpu", train.gradient_accumulation or 1
    most = max(1, ROWS_PER_UPDATE // accumulation)
    sizes = [train.batch_size] if train.batch_size else [size for size in (16, 8, 4, 2, 1) if size <= most]
    unpacked_first = [True, False] if on_cpu and model.quantization_bits else [False]
    choices = unpacked_first if train.dequantize_base is None else [train.dequantize_base]
    given = train.gradient_checkpointing
    recomputing = [False, True] if given is None else [given]
    tried, factor = [], max(MARGIN, learnt_factor(model.fingerprint, PROCESS_BYTES))
    for length, checkpointing, dequantize, size in itertools.product(lengths, recomputing, choices, sizes):
        accumulates = accumulation > 1 or (train.gradient_accumulation is None and size < ROWS_PER_UPDATE)
        shape = Shape(size, padded(length), accumulates)
        backend = backend_of(model, machine.backend, dequantize, train.method, checkpointing=checkpointing)
        terms = predicted_peak(model, lora, shape, backend)
        tried.append(Fit(size, length, dequantize, checkpointing, terms))
        if fits(tried[-1].peak_bytes, machine.memory_budget_bytes, factor):
            return tried[-1]
    least = min(tried, key=lambda fit: fit.peak_bytes)
    raise does_not_fit(least.terms, least.batch_size, least.length, machine.memory_budget_bytes)


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
    margin = max(MARGIN, learnt_factor(model.fingerprint, PROCESS_BYTES)) - 1
    learnt = ", learnt from running out of memory" if margin > MARGIN - 1 else ""
    largest = f"the largest that fits with {100 * margin:.0f} % margin{learnt}: {predicted}"
    reasons["batch_size"] = f"set by you; {predicted}" if train.batch_size else largest
    if train.gradient_checkpointing is not None:
        reasons["gradient_checkpointing"] = "set by you"
    elif fit.gradient_checkpointing:
        reasons["gradient_checkpointing"] = "nothing fits without it; it makes a step about a third slower"
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


def _epochs(rows: int, rows_per_update: int, train: Train, reasons: dict[str, str]) -> int:
    """Three passes; more for little data, up to eight, so that there are 300 updates; one above 50,000 rows."""
    if train.num_epochs is not None:
        reasons["num_epochs"] = "set by you"
        return train.num_epochs
    per_epoch = updates_per_epoch(rows, rows_per_update)
    usual = 1 if rows > 50_000 else 3
    epochs = max(usual, min(MAX_EPOCHS, math.ceil(MIN_UPDATES / per_epoch)))
    ended = f", ended by max_steps = {train.max_steps}" if train.max_steps else ""
    kept = "; the adapter that validates best is kept" if epochs > usual else ""
    reasons["num_epochs"] = f"{epochs} passes of {per_epoch} updates over {rows} rows{ended}{kept}"
    return epochs


def _steps(updates: int, reasons: dict[str, str]) -> dict[str, int]:
    """Warm-up and intervals, in optimizer updates."""
    warmup = usual_warmup(updates)
    log = max(1, min(10, updates // 10))
    interval = max(1, min(500, round(updates / 10 / log) * log))
    reasons["warmup_steps"] = f"5 % of {updates} updates"
    reasons["save_steps"] = "about a tenth of the run, at most 500 updates: that much is lost at worst"
    reasons["eval_steps"] = "about a tenth of the run: each validation is a candidate for the best adapter"
    reasons["log_steps"] = "every ten updates, more often in runs of less than a hundred"
    return {"warmup_steps": warmup, "save_steps": interval, "eval_steps": interval, "log_steps": log}


def _learning_rate(
    model: ModelFiles, lora: LoraSettings, method: str, rows_per_update: int, reasons: dict[str, str]
) -> float:
    """scale x rate = 4e-4 to width 2560, 2e-4 to 5120, 1e-4 above; more below 2048; root of the batch relative to 16.

    First-order, Adam sees scale x rate, so the two are chosen together (QLoRA, Unsloth, tinker's sweeps bracket the
    values). Below a width of 2048 the rate grows as (2048 / width)^0.781, tinker's fit for the Llama family.
    It never depends on how much memory there is. Full fine-tuning wants a tenth of LoRA's rate at scale 1 (LoRA without
    regret, Thinking Machines 2025).
    """
    width = model.hidden_size
    product = 4e-4 if width <= 2560 else 2e-4 if width <= 5120 else 1e-4
    product *= max(1.0, 2048 / width) ** 0.781
    batch_factor = min(2.0, max(0.5, math.sqrt(rows_per_update / ROWS_PER_UPDATE)))
    if method == "full":
        rate = float(f"{product / FULL_RATE_FACTOR * batch_factor:.2g}")
        reasons["learning_rate"] = f"width {width}: a tenth of what LoRA wants, for {rows_per_update} rows per update"
        return rate
    rate = float(f"{product / lora.scale * batch_factor:.2g}")
    reasons["learning_rate"] = (
        f"width {width} and LoRA scale {lora.scale:g}: scale x rate = {rate * lora.scale:.2g}, for "
        f"{rows_per_update} rows per update"
    )
    return rate
