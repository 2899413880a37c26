"""Chooses the configuration: what the data asks for, what the model wants, what fits. Every value has its reason."""

import math
from dataclasses import dataclass

from safetrain.core.errors import ConfigError, MachineError
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
from safetrain.plan.memory import Backend, Shape, predicted_peak

MARGIN = 1.15  # the closed form is not calibrated on this machine
WIDTH_STEP = 32  # the engine pads rows to a multiple of this
ROWS_PER_UPDATE = 16
MIN_UPDATES, MAX_EPOCHS = 300, 8
GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that fits, and what it is predicted to need."""

    batch_size: int
    dequantize_base: bool
    terms: tuple[MemoryTerm, ...]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak."""
        return sum(term.size_bytes for term in self.terms)


def recommend(data: DataReport, machine: Machine, model: ModelFiles, train: Train, lora_pins: Lora) -> Recommendation:
    """The whole configuration; pins in ``train`` and ``lora_pins`` that shape memory or length are constraints.

    Raises MachineError when nothing fits, ConfigError when the pins contradict the model.
    """
    reasons: dict[str, str] = {}
    lora = _lora(data, model, lora_pins, reasons)
    length = _length(data, model, train, reasons)
    fit = _fit(machine, model, lora, length, train, reasons)
    accumulation = train.gradient_accumulation or max(1, ROWS_PER_UPDATE // fit.batch_size)
    reasons["gradient_accumulation"] = (
        "pinned in params.yaml" if train.gradient_accumulation
        else f"{fit.batch_size} x {accumulation} = {fit.batch_size * accumulation} rows per update; 8 to 32 is the "
        "range in which LoRA trains well"
    )  # fmt: skip
    rows = min(data.train.rows, train.max_examples or data.train.rows)
    epochs = _epochs(rows, fit.batch_size * accumulation, train, reasons)
    updates = total_updates(rows, fit.batch_size * accumulation, epochs, train.max_steps)
    steps = _steps(updates, reasons)
    return Recommendation(
        batch_size=fit.batch_size,
        gradient_accumulation=accumulation,
        max_seq_length=length,
        learning_rate=_learning_rate(model, lora, fit.batch_size * accumulation, reasons),
        num_epochs=epochs,
        warmup_steps=steps["warmup_steps"],
        save_steps=steps["save_steps"],
        eval_steps=steps["eval_steps"],
        log_steps=steps["log_steps"],
        dequantize_base=fit.dequantize_base,
        lora=lora,
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
        reasons[f"lora.{key}"] = text if getattr(pins, key) is None else "pinned in params.yaml"
    return resolve_lora(pins, recommended)


def _length(data: DataReport, model: ModelFiles, train: Train, reasons: dict[str, str]) -> int:
    """The length that cuts no row of the data, unless the model or a pin cannot take it."""
    limit = model.max_positions or 2**20
    if train.max_seq_length is not None:
        if train.max_seq_length > limit:
            raise ConfigError(
                f"train.max_seq_length is {train.max_seq_length}.", expected=f"at most {limit}, the model's context"
            )
        reasons["max_seq_length"] = "pinned in params.yaml"
        return train.max_seq_length
    longest = max(data.train.lengths.max, data.valid.lengths.max)
    length = min(_padded(longest), limit)
    cut = "no row is cut" if longest <= length else f"rows longer than the model's context of {limit} are cut"
    reasons["max_seq_length"] = f"the longest row has {longest} tokens, rounded up to {length}: {cut}"
    return length


def _fit(
    machine: Machine, model: ModelFiles, lora: LoraSettings, length: int, train: Train, reasons: dict[str, str]
) -> Fit:
    """The largest micro-batch, unpacked where that helps, whose predicted peak with margin is within the budget."""
    on_cpu = machine.backend == "cpu"
    sizes = [train.batch_size] if train.batch_size else [16, 8, 4, 2, 1]
    unpacked_first = [True, False] if on_cpu and model.quantization_bits else [False]
    choices = unpacked_first if train.dequantize_base is None else [train.dequantize_base]
    budget, tried = machine.memory_budget_bytes, []
    for dequantize in choices:
        for size in sizes:
            backend = Backend(4 if on_cpu else model.compute_bytes, dequantize, on_cpu)
            shape = Shape(size, _padded(length))
            accumulates = size < ROWS_PER_UPDATE
            fit = Fit(size, dequantize, predicted_peak(model, lora, shape, accumulates, backend))
            tried.append(fit)
            if fit.peak_bytes * MARGIN <= budget:
                _explain_fit(fit, machine, length, train, reasons)
                return fit
    least = min(tried, key=lambda fit: fit.peak_bytes)
    raise MachineError(
        "No configuration of this model and data fits this machine.",
        expected=f"at most {budget / GIB:.1f} GiB, the memory budget in machine.json",
        got=f"{least.peak_bytes * MARGIN / GIB:.1f} GiB with margin, at batch size {least.batch_size}; "
        + ", ".join(f"{term.name} {term.size_bytes / GIB:.2f}" for term in least.terms),
        do="close other programs, use a smaller or more strongly quantized model, or shorten rows "
        "(train.max_seq_length)",
    )


def _explain_fit(fit: Fit, machine: Machine, length: int, train: Train, reasons: dict[str, str]) -> None:
    peak, budget = fit.peak_bytes / GIB, machine.memory_budget_bytes / GIB
    predicted = f"predicted peak {peak:.2f} GiB of a budget of {budget:.1f} GiB at {length} tokens"
    reasons["batch_size"] = f"pinned in params.yaml; {predicted}" if train.batch_size else (
        f"the largest of 16, 8, 4, 2, 1 that fits with 15 % margin: {predicted}"
    )  # fmt: skip
    if train.dequantize_base is not None:
        reasons["dequantize_base"] = "pinned in params.yaml"
    elif fit.dequantize_base:
        reasons["dequantize_base"] = "on CPU packed weights are some fifty times slower than unpacked ones, which fit"
    else:
        reasons["dequantize_base"] = (
            "unpacked weights do not fit" if machine.backend == "cpu" else "the GPU multiplies packed weights directly"
        )


def _epochs(rows: int, rows_per_update: int, train: Train, reasons: dict[str, str]) -> int:
    """Three passes; more for little data, up to eight, so that there are 300 updates; one above 50,000 rows."""
    if train.num_epochs is not None:
        reasons["num_epochs"] = "pinned in params.yaml"
        return train.num_epochs
    per_epoch = math.ceil(rows / rows_per_update)
    usual = 1 if rows > 50_000 else 3
    epochs = max(usual, min(MAX_EPOCHS, math.ceil(MIN_UPDATES / per_epoch)))
    kept = ", the adapter that validates best is kept" if epochs > usual else ""
    reasons["num_epochs"] = f"{rows} rows are {per_epoch} updates per pass, {epochs * per_epoch} in all{kept}"
    return epochs


def _steps(updates: int, reasons: dict[str, str]) -> dict[str, int]:
    """Warm-up and intervals, in optimizer updates."""
    warmup = min(updates, max(1, round(0.05 * updates))) if updates > 1 else 0
    log = max(1, min(10, updates // 10))
    interval = max(1, min(500, round(updates / 10 / log) * log))
    reasons["warmup_steps"] = f"5 % of {updates} updates"
    reasons["save_steps"] = "about a tenth of the run, at most 500 updates: that much is lost at worst"
    reasons["eval_steps"] = "about a tenth of the run: each validation is a candidate for the best adapter"
    reasons["log_steps"] = "a line every ten updates, more often in short runs"
    return {"warmup_steps": warmup, "save_steps": interval, "eval_steps": interval, "log_steps": log}


def _learning_rate(model: ModelFiles, lora: LoraSettings, rows_per_update: int, reasons: dict[str, str]) -> float:
    """scale x rate = 4e-4 to width 2560, 2e-4 to 5120, 1e-4 above; more below 2048; root of the batch relative to 16.

    First-order, Adam sees scale x rate, so the two are chosen together (QLoRA, Unsloth, tinker's sweeps bracket the
    values). Below a width of 2048 the rate grows as (2048 / width)^0.781, tinker's fit for the Llama family.
    It never depends on how much memory there is.
    """
    width = model.hidden_size
    product = 4e-4 if width <= 2560 else 2e-4 if width <= 5120 else 1e-4
    product *= max(1.0, 2048 / width) ** 0.781
    batch_factor = min(2.0, max(0.5, math.sqrt(rows_per_update / ROWS_PER_UPDATE)))
    rate = float(f"{product / lora.scale * batch_factor:.2g}")
    reasons["learning_rate"] = (
        f"width {width} and LoRA scale {lora.scale:g}: scale x rate = {rate * lora.scale:.2g}, for "
        f"{rows_per_update} rows per update"
    )
    return rate


def _padded(length: int) -> int:
    return -(-length // WIDTH_STEP) * WIDTH_STEP
