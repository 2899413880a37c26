"""The configuration around a way to run micro-batches, with a reason for every value."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.data.windows import TrainRows
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.memory.budget import own_limit_bytes, within_data_limit
from safetrain.core.memory.estimate import in_rectangles, require_computable, require_trainable
from safetrain.core.memory.terms import FLOAT32, WIDTH_STEP, padded, trained_parameters, unknown_targets
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.run_state import KEPT_BESIDE
from safetrain.core.records.schema import PRETRAIN, WHOLE, Lora, Train
from safetrain.core.records.settings import (
    ALL_LINEAR,
    LargestUpdate,
    LoraSettings,
    Recommendation,
    resolve_lora,
    total_updates,
)
from safetrain.plan.candidates import Fit, PlannedTraining, RowStatistics
from safetrain.plan.hyperparameters import (
    compute_dtype_of,
    epochs_for,
    intervals,
    learning_rate_for,
    pretraining_rate,
    tokens_per_update,
    why_compute_dtype,
)
from safetrain.plan.pretraining import TOKENS_PER_PARAMETER, count_text, passes_for, tokens_to_train, wanted_tokens

MOST_WINDOW = 2048  # tokens: of most published pretrainings of small models
CLOSED_FORM, DRY_RUN = "closed form", "dry run"  # the basis of a plan
SET = "set by you"


def ask(
    data: DataReport, machine: Machine, model: ModelFiles, train: Train, lora_pins: Lora, rows: RowStatistics
) -> PlannedTraining:
    """The training to plan; pins in ``train`` and ``lora_pins`` that shape memory or length are constraints.

    Raises ConfigError when the pins contradict the model.
    """
    require_trainable(train.method, quantized=model.quantization_bits is not None)
    require_computable(train.compute_dtype, machine.backend)
    if machine.backend != "cuda":  # train.memory_limit_gb does not count the memory of a CUDA device
        budget = within_data_limit(machine.memory_budget_bytes, own_limit_bytes(train.memory_limit_gb))
        machine = dataclasses.replace(machine, memory_budget_bytes=budget)
    lora, reasons = _lora(data, model, lora_pins)
    reasons = {} if train.method in WHOLE else reasons
    return PlannedTraining(machine, model, lora, reasons, train, rows, tuple(_lengths(data, model, train)))


def recommendation_of(question: PlannedTraining, fit: Fit) -> Recommendation:
    """The whole configuration around a way to run micro-batches; not measured yet."""
    machine, model, train, lora = question.machine, question.model, question.train, question.lora
    reasons = {**question.why_lora, **_reasons_of_fit(fit, question)}
    epochs = _passes(question, fit.rows_per_update, reasons)
    max_steps = _max_steps(question, fit.rows_per_update, epochs, reasons)
    updates = total_updates(question.rows.count, fit.rows_per_update, epochs, max_steps)
    return Recommendation(
        batch_size=fit.batch_size,
        gradient_accumulation=fit.rows_per_update // fit.batch_size,
        max_seq_length=fit.length,
        learning_rate=_learning_rate(question, fit, updates, reasons),
        num_epochs=epochs,
        max_steps=max_steps,
        **intervals(updates, reasons, train.method),
        dequantize_base=fit.dequantize_base,
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
        mlx_limit_bytes=fit.mlx_limit_bytes(machine.memory_budget),
        memory_terms=fit.terms,
        memory_budget_bytes=machine.memory_budget_bytes,
        process_memory_bytes=machine.process_memory_bytes,
        margin_bytes=max(0, fit.needed_bytes - fit.peak_bytes),
        basis=CLOSED_FORM,
        step_seconds=None,
        total_seconds=None,
        disk_bytes=disk_bytes_of(trained_parameters(model, lora, train.method), train.keep_checkpoints),
        measured_peak_bytes=None,
        own_order=None,
        measured_footprint_bytes=None,
        verified=False,
    )


def recommendation_lines(recommendation: Recommendation, rows: TrainingRows) -> Iterator[str]:
    """What `recommend_config` prints: every value with its reason, what it takes, and what the length cuts off."""
    for name, reason in recommendation.reasons.items():
        section, _, key = name.rpartition(".")
        value = getattr(recommendation.lora if section else recommendation, key)
        text = ", ".join(value) if isinstance(value, tuple) else "null" if value is None else value
        yield f"{name:<22} {text!s:<12} {reason}"
    peak, measured = recommendation.predicted_peak_bytes, recommendation.measured_peak_bytes
    whole, budget = peak + recommendation.process_memory_bytes, recommendation.memory_budget_bytes
    yield f"predicted: mlx {size_text(peak)}, the process {size_text(whole)} of {size_text(budget)} (closed form)"
    if measured is None:
        yield "not measured: no dry run was made"
    else:
        process = size_text(recommendation.measured_footprint_bytes or measured)
        above = f"{100 * (peak / measured - 1):+.0f} %"
        yield f"measured in a dry run: mlx {size_text(measured)}, the process {process}; the closed form says {above}"
    if recommendation.total_seconds is not None:
        in_all = duration_text(recommendation.total_seconds)
        yield f"about {recommendation.step_seconds:.2f} s an update, {in_all} in all"
    if recommendation.planned_method != PRETRAIN:
        yield from cut_lines(rows, recommendation.max_seq_length)


def cut_lines(rows: TrainingRows, length: int) -> Iterator[str]:
    """The rows, tokens and labels that the length cuts; empty if it cuts no row."""
    for name, before in (("train", rows.train.documents), ("valid", rows.valid)):
        cut = before.cut(length)
        if not cut.cut_rows:
            continue
        tokens, rest = (int(each.lengths.sum(dtype=np.int64)) for each in (before, cut))
        labels = int(before.label_counts.sum(dtype=np.int64))
        yield (
            f"{name}: {length} tokens cut {cut.cut_rows} of {len(before)} rows, {100 * (1 - rest / tokens):.2f} % of "
            f"the tokens, {100 * cut.lost_labels / max(1, labels):.2f} % of those that are trained on"
        )


def rows_of(data: DataReport, machine: Machine, train: Train, model: ModelFiles, rows: TrainingRows) -> RowStatistics:
    """The figures of the rows that memory and speed depend on."""
    mean = max(1.0, data.train.tokens / data.train.rows - 1)
    count = min(data.train.rows, train.max_examples or data.train.rows)
    rectangles = in_rectangles(model, machine.backend)

    @functools.cache
    def cut(length: int) -> tuple[TrainRows, TokenRows]:
        shorter = rows.in_windows(length) if train.method == PRETRAIN else rows.cut(length)
        return shorter.train, shorter.valid

    @functools.cache
    def largest(length: int, rows_per_update: int) -> LargestUpdate:
        both = cut(length)
        epochs = 1 if train.method == PRETRAIN else epochs_for(len(both[0]), rows_per_update, train, {})
        return largest_update(*both, rows_per_update, epochs, train.max_steps, rectangles=rectangles)

    if train.method == PRETRAIN:  # every window is full
        length = window_length(model, train)
        tokens = int(rows.train.documents.lengths.sum(dtype=np.int64))
        usual = windows_per_update(model, tokens_to_train(model.parameters, tokens, train), length)
        return RowStatistics(length, float(length), largest, -(-(tokens - 1) // length), usual)
    return RowStatistics(data.longest_row, mean, largest, count)


def window_length(model: ModelFiles, train: Train | None = None) -> int:
    """Tokens that a window of pretraining feeds: the pin, else the model's context, up to MOST_WINDOW."""
    pinned = train.max_seq_length if train is not None else None
    return pinned or min(model.max_positions or MOST_WINDOW, MOST_WINDOW)


def windows_per_update(model: ModelFiles, tokens: int, length: int) -> int:
    """Windows per update of a pretraining on ``tokens`` tokens; a power of two."""
    return 2 ** max(0, round(math.log2(tokens_per_update(model.parameters, tokens) / length)))


def default_disk_bytes(data: DataReport, model: ModelFiles, train: Train, pins: Lora) -> int:
    """Disk for a training with these pins and the recommended adapter; raises ConfigError as ``ask`` does."""
    lora, _ = _lora(data, model, pins)
    return disk_bytes_of(trained_parameters(model, lora, train.method), train.keep_checkpoints)


def disk_bytes_of(trained: int, keep_checkpoints: int) -> int:
    """Disk for the checkpoints of ``trained`` float32 weights with two moments, and for the best weights."""
    checkpoints = keep_checkpoints + KEPT_BESIDE
    return (checkpoints * 4 + 1) * FLOAT32 * trained + checkpoints * 2**20


def _reasons_of_fit(fit: Fit, question: PlannedTraining) -> dict[str, str]:
    """The reasons for length, batch size, recomputing, dequantizing, the type and accumulation."""
    train, model = question.train, question.model
    recompute = "less memory for a third more time" if fit.checkpointing else "not needed: stored activations fit"
    rows, usual = fit.rows_per_update, "8 to 32 is the range in which LoRA trains well"
    if train.method == PRETRAIN:
        usual = f"{rows * fit.length} tokens, by the operations of the whole training (DeepSeek's fit)"
    together = f"{fit.batch_size} x {rows // fit.batch_size} = {rows} rows per update"
    return {
        "max_seq_length": _why_length(fit, question),
        "batch_size": _why_batch_size(fit, question),
        "gradient_checkpointing": recompute if train.gradient_checkpointing is None else SET,
        "dequantize_base": _why_dequantize(fit, question) if train.dequantize_base is None else SET,
        "compute_dtype": why_compute_dtype(train, question.machine, model),
        "gradient_accumulation": f"{together}; {SET if train.gradient_accumulation else usual}",
    }


def _why_length(fit: Fit, question: PlannedTraining) -> str:
    longest, length = question.rows.longest_row, fit.length
    if question.train.max_seq_length is not None:
        return SET
    if question.train.method == PRETRAIN:
        most = f", and at most {MOST_WINDOW}" if length == MOST_WINDOW else ""
        return f"the model's context{most}: documents follow one another in windows of it, nothing is cut off"
    if longest <= length:
        return f"the longest row has {longest:,} tokens: none is cut (lengths are multiples of {WIDTH_STEP})"
    by_context = length == question.model.max_positions
    limit = "the model's context" if by_context else "what fits; at most 1 row in 200 is cut"
    return f"the longest row has {longest:,} tokens and is cut: {limit}"


def _why_batch_size(fit: Fit, question: PlannedTraining) -> str:
    budget = size_text(question.budget.total_bytes)
    predicted = f"predicted peak {size_text(fit.peak_bytes)} of a budget of {budget} at {fit.shape.tokens} tokens"
    return f"{SET}; {predicted}" if question.train.batch_size else f"the fastest that fits: {predicted}"


def _why_dequantize(fit: Fit, question: PlannedTraining) -> str:
    if fit.dequantize_base:
        return "the dequantized weights fit, and on CPU quantized ones are dequantized again at each use"
    if question.model.quantization_bits is None:
        return "the base is not quantized"
    if question.machine.backend != "cpu":
        return "the GPU multiplies quantized weights directly"
    return "left quantized, the rest fits"


def _lora(data: DataReport, model: ModelFiles, pins: Lora) -> tuple[LoraSettings, dict[str, str]]:
    """Rank by the size of the data, all layers, all linear layers, scale 2 (alpha = 2 rank); and the reasons."""
    if pins.num_layers is not None and pins.num_layers > model.num_layers:
        raise ConfigError(f"lora.num_layers is {pins.num_layers}.", expected=f"at most {model.num_layers}, the model's")
    unknown = unknown_targets(model, tuple(pins.targets or ()))
    if unknown:
        raise ConfigError(f"lora.targets names layers that the model does not have: {', '.join(unknown)}.")
    rank = 16 if data.train.rows >= 1000 or model.hidden_size < 1024 else 8
    texts = {
        "rank": f"{rank}: enough for {data.train.rows} rows; the learning rate does not depend on it",
        "scale": "2: alpha = 2 x rank; the learning rate is chosen together with it",
        "dropout": "0: few passes over the data do not need it",
        "num_layers": f"all {model.num_layers} blocks: more layers at a low rank beat few at a high one",
        "targets": "all linear layers: only attention learns less (LoRA without regret)",
    }
    reasons = {f"lora.{key}": text if getattr(pins, key) is None else SET for key, text in texts.items()}
    return resolve_lora(pins, LoraSettings(rank, 2.0, 0.0, model.num_layers, (ALL_LINEAR,))), reasons


def _passes(question: PlannedTraining, rows_per_update: int, reasons: dict[str, str]) -> int:
    train, rows = question.train, question.rows
    if train.method != PRETRAIN or train.num_epochs is not None:
        return epochs_for(rows.count, rows_per_update, train, reasons)
    if train.max_steps is not None:
        reasons["num_epochs"] = "as many as train.max_steps needs"
        return math.ceil(train.max_steps * rows_per_update / max(1, rows.count))
    tokens = int(rows.count * rows.mean_tokens)
    count, reasons["num_epochs"] = passes_for(question.model.parameters, tokens)
    return count


def _max_steps(question: PlannedTraining, rows_per_update: int, epochs: int, reasons: dict[str, str]) -> int | None:
    """The pin, or updates in which a new model sees what it wants; None where the passes end before."""
    train, rows = question.train, question.rows
    reasons["max_steps"] = "num_epochs decides" if train.max_steps is None else SET
    if train.method != PRETRAIN or train.max_steps is not None or train.num_epochs is not None:
        return train.max_steps
    target = wanted_tokens(question.model.parameters)
    update_tokens = int(rows_per_update * rows.mean_tokens)
    steps = math.ceil(target / update_tokens)
    if steps >= total_updates(rows.count, rows_per_update, epochs, None):
        return None
    reasons["max_steps"] = (
        f"{count_text(target)} tokens ({TOKENS_PER_PARAMETER} a parameter), {update_tokens:,} an update"
    )
    return steps


def _learning_rate(question: PlannedTraining, fit: Fit, updates: int, reasons: dict[str, str]) -> float:
    model, train, rows = question.model, question.train, question.rows
    if train.method != PRETRAIN:
        return learning_rate_for(model, question.lora, train.method, fit.rows_per_update, reasons)
    update_tokens = int(fit.rows_per_update * rows.mean_tokens)
    return pretraining_rate(model.parameters, updates * update_tokens, update_tokens, reasons)


def _lengths(data: DataReport, model: ModelFiles, train: Train) -> list[int]:
    """Lengths to try: the pin; else one that cuts no row, then one that cuts at most one row in two hundred."""
    limit, pinned = model.max_positions or 2**20, train.max_seq_length
    if pinned is not None and pinned > limit:
        raise ConfigError(f"train.max_seq_length is {pinned}.", expected=f"at most {limit}, the model's context")
    if pinned is not None or train.method == PRETRAIN:
        return [window_length(model, train)]
    most = max(data.train.lengths.p99_5, data.valid.lengths.p99_5)
    return list(dict.fromkeys(min(padded(length), limit) for length in (data.longest_row, most)))
