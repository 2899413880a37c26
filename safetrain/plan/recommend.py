"""The recommended configuration for a candidate, with a reason for every value."""

import math
from collections.abc import Iterator

import numpy as np

from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.memory.estimate import mlx_limit_bytes, with_margin
from safetrain.core.memory.terms import FLOAT32, WIDTH_STEP, trained_parameters
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.run_state import KEPT_BESIDE
from safetrain.core.records.schema import PRETRAIN, SET, WHOLE, Lora, Train
from safetrain.core.records.settings import LoraSettings, Recommendation, total_updates, updates_per_epoch, usual_warmup
from safetrain.plan.candidates import (
    MOST_WINDOW,
    ROWS_PER_UPDATE,
    Fit,
    PlannedTraining,
    compute_dtype_of,
    epochs_for,
    recommended_lora,
    usual_epochs,
)
from safetrain.plan.speed import TOKENS_PER_PARAMETER, count_text, passes_for, wanted_tokens

CLOSED_FORM, DRY_RUN = "closed form", "dry run"  # what a plan is based on
FULL_RATE_FACTOR = 10
HIGHEST_PRETRAIN_RATE = 4e-3


def recommendation_of(question: PlannedTraining, fit: Fit) -> Recommendation:
    """The whole configuration for a candidate, before any measurement."""
    machine, model, train, lora = question.machine, question.model, question.train, question.lora
    reasons = {**question.why_lora, **_reasons_of_fit(fit, question)}
    epochs = _passes(question, fit.rows_per_update, reasons)
    max_steps = _max_steps(question, fit.rows_per_update, epochs, reasons)
    updates = total_updates(question.rows.count, fit.rows_per_update, epochs, max_steps)
    return Recommendation(
        batch_size=fit.rows,
        gradient_accumulation=fit.rows_per_update // fit.rows,
        max_seq_length=fit.length,
        learning_rate=_learning_rate(question, fit, updates, reasons),
        num_epochs=epochs,
        max_steps=max_steps,
        **_intervals(question, fit, updates, reasons),
        dequantize_base=fit.dequantize,
        gradient_checkpointing=fit.checkpointing,
        compute_dtype=compute_dtype_of(train, machine, model),
        lora=lora,
        largest_update=question.rows.largest(fit.length, fit.rows_per_update),
        planned_method=train.method,
        planned_optimizer=train.optimizer,
        planned_model=str(model.folder),
        planned_backend=machine.backend,
        reasons=reasons,
        predicted_peak_bytes=fit.peak_bytes,
        mlx_limit_bytes=mlx_limit_bytes(fit.peak_bytes, machine.memory_budget),
        memory_terms=fit.terms,
        memory_budget_bytes=machine.memory_budget_bytes,
        process_memory_bytes=machine.process_memory_bytes,
        margin_bytes=max(0, with_margin(fit.terms) - fit.peak_bytes),
        basis=CLOSED_FORM,
        step_seconds=None,
        total_seconds=None,
        disk_bytes=disk_bytes_of(trained_parameters(model, lora, train.method), train.keep_checkpoints),
        measured_peak_bytes=None,
        own_order=None,
        measured_footprint_bytes=None,
        verified=False,
    )


def recommendation_lines(recommendation: Recommendation, rows: TrainingRows, train: Train) -> Iterator[str]:
    """Lines that `recommend_config` prints: values with reasons, memory and time, and truncated rows.

    A pinned key is printed with its pinned value, although recommended_config.json does not depend on every such value.
    """
    for name, reason in recommendation.reasons.items():
        section, _, key = name.rpartition(".")
        value, pin = getattr(recommendation.lora if section else recommendation, key), getattr(train, key, None)
        if pin is not None and not section and SET not in reason:
            value, reason = pin, SET
        text = ", ".join(value) if isinstance(value, tuple) else "null" if value is None else value
        yield f"{name:<22} {text!s:<12} {reason}"
    peak, measured = recommendation.predicted_peak_bytes, recommendation.measured_peak_bytes
    whole, budget = peak + recommendation.process_memory_bytes, recommendation.memory_budget_bytes
    yield f"predicted peak: mlx {size_text(peak)}, process {size_text(whole)} of {size_text(budget)} (closed form)"
    if measured is None:
        yield "not measured: no dry run was made"
    else:
        process = size_text(recommendation.measured_footprint_bytes or measured)
        above = f"{100 * (peak / measured - 1):+.0f} %"
        yield f"dry-run peak: mlx {size_text(measured)}, process {process}; the closed form is off by {above}"
    if recommendation.total_seconds is not None:
        in_all = duration_text(recommendation.total_seconds)
        yield f"about {recommendation.step_seconds:.2f} s per step, {in_all} in total with validations and evaluation"
    if recommendation.planned_method != PRETRAIN:
        yield from cut_lines(rows, recommendation.max_seq_length)


def cut_lines(rows: TrainingRows, length: int) -> Iterator[str]:
    """Describe the rows, tokens and labels that the length truncates; empty if it truncates no row."""
    for name, before in (("train", rows.train.documents), ("valid", rows.valid)):
        cut = before.cut(length)
        if not cut.cut_rows:
            continue
        tokens, rest = (int(each.lengths.sum(dtype=np.int64)) for each in (before, cut))
        labels = int(before.label_counts.sum(dtype=np.int64))
        yield (
            f"{name}: {length} tokens truncate {cut.cut_rows} of {len(before)} rows: {100 * (1 - rest / tokens):.2f} % "
            f"of the tokens and {100 * cut.lost_labels / max(1, labels):.2f} % of the labels are lost"
        )


def default_disk_bytes(data: DataReport, model: ModelFiles, train: Train, pins: Lora) -> int:
    """Disk space for training with these settings and the recommended adapter; raises ConfigError like ``ask``."""
    lora, _ = recommended_lora(data, model, pins)
    return disk_bytes_of(trained_parameters(model, lora, train.method), train.keep_checkpoints)


def disk_bytes_of(trained: int, keep_checkpoints: int) -> int:
    """Disk space for checkpoints of ``trained`` float32 weights with two moments, and for the best weights."""
    checkpoints = keep_checkpoints + KEPT_BESIDE
    return (checkpoints * 4 + 1) * FLOAT32 * trained + checkpoints * 2**20


def _reasons_of_fit(fit: Fit, question: PlannedTraining) -> dict[str, str]:
    """Reasons for length, batch size, recomputation, dequantizing, compute type and accumulation."""
    train, model = question.train, question.model
    recompute = "less memory for a third more time" if fit.checkpointing else "not needed: stored activations fit"
    rows, usual = fit.rows_per_update, "8 to 32 is the range in which LoRA trains well"
    if train.method == PRETRAIN:
        usual = f"{rows * fit.length:,} tokens, from the operations of the whole training (DeepSeek's fit)"
    together = f"{fit.rows} x {rows // fit.rows} = {rows} rows per update"
    return {
        "max_seq_length": _why_length(fit, question),
        "batch_size": _why_batch_size(fit, question),
        "gradient_checkpointing": recompute if train.gradient_checkpointing is None else SET,
        "dequantize_base": _why_dequantize(fit, question) if train.dequantize_base is None else SET,
        "compute_dtype": _why_compute_dtype(train, question.machine, model),
        "gradient_accumulation": f"{together}; {SET if train.gradient_accumulation else usual}",
    }


def _why_length(fit: Fit, question: PlannedTraining) -> str:
    longest, length = question.rows.longest_row, fit.length
    if question.train.max_seq_length is not None:
        return SET
    if question.train.method == PRETRAIN:
        most = f", and at most {MOST_WINDOW}" if length == MOST_WINDOW else ""
        return f"the model's context{most}: documents are packed into windows, nothing is truncated"
    if longest <= length:
        return (
            f"the longest row has {longest:,} tokens, so nothing is truncated (lengths are multiples of {WIDTH_STEP})"
        )
    by_context = length == question.model.max_positions
    limit = "the model's context" if by_context else "to fit the memory; at most 1 row in 200 is truncated"
    return f"the longest row has {longest:,} tokens and is truncated: {limit}"


def _why_batch_size(fit: Fit, question: PlannedTraining) -> str:
    budget = size_text(question.budget.total_bytes)
    predicted = f"predicted peak {size_text(fit.peak_bytes)} of a budget of {budget} at {fit.micro_batch.tokens} tokens"
    return f"{SET}; {predicted}" if question.train.batch_size else f"the fastest size that fits: {predicted}"


def _why_dequantize(fit: Fit, question: PlannedTraining) -> str:
    if fit.dequantize:
        return "dequantized weights fit; on CPU, quantized ones would be dequantized at each use"
    if question.model.quantization_bits is None:
        return "the base is not quantized"
    if question.machine.backend != "cpu":
        return "the GPU multiplies quantized weights directly"
    return "kept quantized to save memory"


def _why_compute_dtype(train: Train, machine: Machine, model: ModelFiles) -> str:
    """The reason for the compute type."""
    if train.compute_dtype is not None:
        return SET
    if train.method == PRETRAIN and machine.backend != "cpu":
        return "compute type; the weights stay in float32"
    if machine.backend == "cpu":
        return "a CPU always computes in float32"
    if compute_dtype_of(train, machine, model) is not None:
        return "this GPU emulates bfloat16, the type of the base; float32 layers were measured to be faster"
    return "the type of the stored base; no other type is known to be faster here"


def _passes(question: PlannedTraining, rows_per_update: int, reasons: dict[str, str]) -> int:
    train, rows = question.train, question.rows
    if train.method != PRETRAIN or train.num_epochs is not None:
        reasons["num_epochs"] = _why_epochs(rows.count, rows_per_update, train)
        return epochs_for(rows.count, rows_per_update, train)
    if train.max_steps is not None:
        reasons["num_epochs"] = "as many as train.max_steps needs"
        return math.ceil(train.max_steps * rows_per_update / max(1, rows.count))
    tokens = int(rows.count * rows.mean_tokens)
    count, reasons["num_epochs"] = passes_for(question.model.parameters, tokens)
    return count


def _why_epochs(rows: int, rows_per_update: int, train: Train) -> str:
    if train.num_epochs is not None:
        return SET
    epochs, per_epoch = epochs_for(rows, rows_per_update, train), updates_per_epoch(rows, rows_per_update)
    is_ended = 0 < (train.max_steps or 0) < epochs * per_epoch
    ended = f", ended by max_steps = {train.max_steps}" if is_ended else ""
    note = "; the step with the best validation is kept" if epochs > usual_epochs(rows) else ""
    return f"{epochs} passes of {per_epoch:,} updates over {rows:,} rows{ended}{note}"


def _max_steps(question: PlannedTraining, rows_per_update: int, epochs: int, reasons: dict[str, str]) -> int | None:
    """The pinned steps, or the steps to reach the wanted tokens; None if the epochs end earlier."""
    train, rows = question.train, question.rows
    reasons["max_steps"] = "not set: num_epochs applies" if train.max_steps is None else SET
    if train.method != PRETRAIN or train.max_steps is not None or train.num_epochs is not None:
        return train.max_steps
    target = wanted_tokens(question.model.parameters)
    update_tokens = int(rows_per_update * rows.mean_tokens)
    steps = math.ceil(target / update_tokens)
    if steps >= total_updates(rows.count, rows_per_update, epochs, None):
        return None
    reasons["max_steps"] = (
        f"{count_text(target)} tokens ({TOKENS_PER_PARAMETER} per parameter), {update_tokens:,} per step"
    )
    return steps


def _learning_rate(question: PlannedTraining, fit: Fit, updates: int, reasons: dict[str, str]) -> float:
    model, train, rows = question.model, question.train, question.rows
    if train.method != PRETRAIN:
        return learning_rate_for(model, question.lora, train.method, fit.rows_per_update, reasons)
    update_tokens = int(fit.rows_per_update * rows.mean_tokens)
    return pretraining_rate(model.parameters, updates * update_tokens, update_tokens, reasons)


def _intervals(question: PlannedTraining, fit: Fit, updates: int, reasons: dict[str, str]) -> dict[str, int]:
    """Warm-up and intervals, in steps. A validation reads no more tokens than training between two validations."""
    trained = "weights" if question.train.method in WHOLE else "adapter"
    log = max(1, min(10, updates // 10))
    interval = max(1, min(500, round(updates / 10 / log) * log))
    fed_tokens = fit.rows_per_update * min(fit.length, question.rows.mean_tokens)
    least = min(updates, math.ceil(question.rows.valid_tokens / fed_tokens / log) * log)
    reasons["warmup_steps"] = f"5 % of {updates:,} steps"
    reasons["save_steps"] = f"every {interval} steps, about a tenth of the run: a crash costs at most that"
    reasons["eval_steps"] = f"about a tenth of the run: each validation is a candidate for the best {trained}"
    if least > interval:
        reasons["eval_steps"] = (
            f"a validation reads {question.rows.valid_tokens:,} tokens; training reads as many between two validations"
        )
    reasons["log_steps"] = f"every {log} steps" if log > 1 else "every step, as there are few"
    steps = {"save_steps": interval, "eval_steps": max(interval, least), "log_steps": log}
    return {"warmup_steps": usual_warmup(updates), **steps}


def learning_rate_for(
    model: ModelFiles, lora: LoraSettings, method: str, rows_per_update: int, reasons: dict[str, str]
) -> float:
    """Learning rate, from scale x rate = 4e-4 up to width 2560, 2e-4 up to 5120, 1e-4 above; times sqrt(batch / 16).

    To first order, Adam's step depends on scale x rate, so both are chosen together (QLoRA, Unsloth and tinker's sweeps
    bracket the values). Below a width of 2048 the rate grows as (2048 / width)^0.781, tinker's fit for Llama.
    It never depends on the memory. Full fine-tuning needs a tenth (LoRA without regret, Thinking Machines 2025).
    """
    width, per_update = model.hidden_size, f"for {rows_per_update} rows per update"
    product = 4e-4 if width <= 2560 else 2e-4 if width <= 5120 else 1e-4
    product *= max(1.0, 2048 / width) ** 0.781 * min(2.0, max(0.5, math.sqrt(rows_per_update / ROWS_PER_UPDATE)))
    if method == "full":
        reasons["learning_rate"] = f"width {width}: a tenth of the rate for LoRA, {per_update}"
        return float(f"{product / FULL_RATE_FACTOR:.2g}")
    rate, scale = float(f"{product / lora.scale:.2g}"), lora.scale
    together = f"scale x rate = {rate * scale:.2g}"
    reasons["learning_rate"] = f"width {width} and LoRA scale {scale:g}: {together}, {per_update}"
    return rate


def pretraining_rate(parameters: int, tokens: int, update_tokens: int, reasons: dict[str, str]) -> float:
    """Learning rate of pretraining: 0.3118 C^-0.125 (arXiv 2401.02954, formula 1), times sqrt(batch / fitted batch)."""
    operations = 6.0 * parameters * tokens
    usual = 0.292 * operations**0.3271
    rate = 0.3118 * operations**-0.125 * min(2.0, max(0.1, math.sqrt(update_tokens / usual)))
    rate = float(f"{min(rate, HIGHEST_PRETRAIN_RATE):.2g}")
    reasons["learning_rate"] = (
        f"{parameters / 1e6:.3g} million parameters and {tokens / 1e6:.3g} million tokens, {update_tokens:,} per "
        "step (DeepSeek's fit)"
    )
    return rate
