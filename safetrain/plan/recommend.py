"""Chooses the configuration: what the data asks for, what the model wants, what fits. Every value has its reason."""

import dataclasses
import functools
import math

import numpy as np

from safetrain.core.data.row_order import largest_update
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.training_rows import TrainingRows
from safetrain.core.data.windows import TrainRows
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import size_text
from safetrain.core.memory.budget import within_own_limit
from safetrain.core.memory.estimate import require_computable, require_trainable
from safetrain.core.memory.run import in_rectangles
from safetrain.core.memory.terms import FLOAT32, WIDTH_STEP, padded, trained_parameters, unknown_targets
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import DataReport, Machine
from safetrain.core.records.schema import PRETRAIN, WHOLE, Lora, Train
from safetrain.core.records.settings import (
    ALL_LINEAR,
    LargestUpdate,
    LoraSettings,
    Reason,
    Recommendation,
    resolve_lora,
    total_updates,
)
from safetrain.core.storage.files import KEPT_BESIDE
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
from safetrain.plan.pretraining_plan import count_text, passes_for, tokens_to_train, wanted_tokens

MOST_WINDOW = 2048  # tokens: of most published pretrainings of small models
CLOSED_FORM, DRY_RUN = "closed form", "dry run"  # the basis of a plan


def ask(
    data: DataReport,
    machine: Machine,
    model: ModelFiles,
    train: Train,
    lora_pins: Lora,
    rows: RowStatistics,
) -> PlannedTraining:
    """The training that is asked for; pins in ``train`` and ``lora_pins`` that shape memory or length are constraints.

    Raises ConfigError when the pins contradict the model.
    """
    require_trainable(train.method, quantized=model.quantization_bits is not None)
    require_computable(train.compute_dtype, machine.backend)
    within = _within_own_limit(machine, train)
    lora = _lora(data, model, lora_pins, {})
    return PlannedTraining(within, model, lora, train, rows, tuple(_lengths(data, model, train)))


def recommendation_of(question: PlannedTraining, fit: Fit, data: DataReport, lora_pins: Lora) -> Recommendation:
    """The whole configuration around a way to run micro-batches; not measured yet."""
    machine, model, lora, train = question.machine, question.model, question.lora, question.train
    reasons: dict[str, str] = {}
    _lora(data, model, lora_pins, reasons, train.method)
    _explain_fit(fit, question, reasons)
    accumulation = _accumulation(fit, train, reasons)
    count = question.rows.count
    epochs = _passes(question, fit.rows_per_update, reasons)
    max_steps = _max_steps(question, fit.rows_per_update, epochs, reasons)
    updates = total_updates(count, fit.rows_per_update, epochs, max_steps)
    return Recommendation(
        batch_size=fit.candidate.batch_size,
        gradient_accumulation=accumulation,
        max_seq_length=fit.candidate.length,
        learning_rate=_learning_rate(question, fit, updates, reasons),
        num_epochs=epochs,
        max_steps=max_steps,
        **intervals(updates, reasons, train.method),
        dequantize_base=fit.candidate.mode.dequantize_base,
        gradient_checkpointing=fit.candidate.mode.checkpointing,
        compute_dtype=compute_dtype_of(train, machine, model),
        lora=lora,
        largest_update=question.rows.largest(fit.candidate.length, fit.rows_per_update),
        planned_method=train.method,
        planned_optimizer=train.optimizer,
        planned_model=str(model.folder),
        planned_backend=machine.backend,
        reasons=tuple(Reason(key, text) for key, text in reasons.items()),
        predicted_peak_bytes=fit.peak_bytes,
        mlx_limit_bytes=fit.mlx_limit_bytes(machine.memory_budget),
        memory_terms=fit.terms,
        memory_budget_bytes=machine.memory_budget_bytes,
        process_memory_bytes=machine.process_memory_bytes,
        margin_bytes=max(0, fit.needed_bytes - fit.peak_bytes),
        basis=CLOSED_FORM,
        step_seconds=None,
        total_seconds=None,
        disk_bytes=checkpoint_disk_bytes(model, lora, train),
        measured_peak_bytes=None,
        own_order=None,
        measured_footprint_bytes=None,
        verified=False,
    )


def _explain_fit(fit: Fit, question: PlannedTraining, reasons: dict[str, str]) -> None:
    """Add the reasons for length, batch size, recomputing, dequantizing and the type."""
    reasons["max_seq_length"] = _why_length(fit, question)
    reasons["batch_size"] = _why_batch_size(fit, question)
    reasons["gradient_checkpointing"] = _why_recompute(fit, question)
    reasons["dequantize_base"] = _why_dequantize(fit, question)
    reasons["compute_dtype"] = why_compute_dtype(question.train, question.machine, question.model)


def _why_length(fit: Fit, question: PlannedTraining) -> str:
    longest, length = question.longest_row, fit.candidate.length
    if question.train.max_seq_length is not None:
        return "set by you"
    if question.train.method == PRETRAIN:
        most = f", and at most {MOST_WINDOW}" if length == MOST_WINDOW else ""
        return f"the model's context{most}: documents follow one another in windows of it, nothing is cut off"
    if longest <= length:
        return f"the longest row has {longest} tokens: none is cut (lengths are multiples of {WIDTH_STEP})"
    limit = (
        "the model's context" if length == question.model.max_positions else "what fits; at most 1 row in 200 is cut"
    )
    return f"the longest row has {longest} tokens and is cut: {limit}"


def _why_batch_size(fit: Fit, question: PlannedTraining) -> str:
    budget = question.machine.memory_budget
    predicted = f"predicted peak {size_text(fit.peak_bytes)} of a budget of {size_text(budget.total_bytes)}"
    predicted += f" at {fit.shape.tokens} tokens"
    if not fit.may_fit(budget):
        return f"the least there is, and it does not fit; train.oversize asks for it: {predicted}"
    if question.train.batch_size:
        return f"set by you; {predicted}"
    return f"the fastest that fits: {predicted}"


def _why_recompute(fit: Fit, question: PlannedTraining) -> str:
    if question.train.gradient_checkpointing is not None:
        return "set by you"
    if not fit.candidate.mode.checkpointing:
        return "not needed: stored activations fit"
    return "less memory for a third more time"


def _why_dequantize(fit: Fit, question: PlannedTraining) -> str:
    if question.train.dequantize_base is not None:
        return "set by you"
    if fit.candidate.mode.dequantize_base:
        return "the dequantized weights fit, and on CPU quantized ones are dequantized again at each use"
    if question.model.quantization_bits is None:
        return "the base is not quantized"
    if question.machine.backend != "cpu":
        return "the GPU multiplies quantized weights directly"
    return "left quantized, the rest fits"


def updates_of(chosen: Recommendation, count: int) -> int:
    """Optimizer updates of the whole training, ``count`` rows a pass."""
    return total_updates(count, chosen.batch_size * chosen.gradient_accumulation, chosen.num_epochs, chosen.max_steps)


def _accumulation(fit: Fit, train: Train, reasons: dict[str, str]) -> int:
    """Micro-batches of an update, with the reason."""
    rows, batch_size = fit.rows_per_update, fit.candidate.batch_size
    together = f"{batch_size} x {rows // batch_size} = {rows} rows per update"
    usual = "8 to 32 is the range in which LoRA trains well"
    if train.method == PRETRAIN:
        usual = f"{rows * fit.candidate.length} tokens, by the operations of the whole training (DeepSeek's fit)"
    reasons["gradient_accumulation"] = f"{together}; {'set by you' if train.gradient_accumulation else usual}"
    return rows // batch_size


def _within_own_limit(machine: Machine, train: Train) -> Machine:
    """The machine under train.memory_limit_gb, which does not count the memory of a CUDA device."""
    if machine.backend == "cuda":
        return machine
    budget = within_own_limit(machine.memory_budget_bytes, train.memory_limit_gb)
    return dataclasses.replace(machine, memory_budget_bytes=budget)


def rows_of(data: DataReport, machine: Machine, train: Train, model: ModelFiles, rows: TrainingRows) -> RowStatistics:
    """What memory and speed depend on of the rows."""
    mean = max(1.0, data.train.tokens / data.train.rows - 1)
    count = min(data.train.rows, train.max_examples or data.train.rows)
    rectangles = in_rectangles(model, machine.backend)

    @functools.cache
    def cut(length: int) -> tuple[TrainRows, TokenRows]:
        found = rows.in_windows(length) if train.method == PRETRAIN else rows.cut(length)
        return found.train, found.valid

    @functools.cache
    def largest(length: int, rows_per_update: int) -> LargestUpdate:
        both = cut(length)
        epochs = 1 if train.method == PRETRAIN else epochs_for(len(both[0]), rows_per_update, train, {})
        return largest_update(*both, rows_per_update, epochs, train.max_steps, rectangles=rectangles)

    if train.method == PRETRAIN:  # every window is full
        length = _window_length(model, train)
        tokens = int(rows.train.documents.lengths.sum(dtype=np.int64))
        per_update = tokens_per_update(model.parameters, tokens_to_train(model.parameters, tokens, train)) / length
        usual = 2 ** max(0, round(math.log2(per_update)))
        return RowStatistics(length, float(length), largest, -(-(tokens - 1) // length), usual)
    return RowStatistics(data.longest_row, mean, largest, count)


def _lora(
    data: DataReport, model: ModelFiles, pins: Lora, reasons: dict[str, str], method: str = "lora"
) -> LoraSettings:
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
    for key, text in texts.items() if method not in WHOLE else ():
        reasons[f"lora.{key}"] = text if getattr(pins, key) is None else "set by you"
    return resolve_lora(pins, recommended)


def default_disk_bytes(data: DataReport, model: ModelFiles, train: Train, pins: Lora) -> int:
    """Disk for a training with these pins and the recommended adapter; raises ConfigError as ``ask`` does."""
    return checkpoint_disk_bytes(model, _lora(data, model, pins, {}), train)


def checkpoint_disk_bytes(model: ModelFiles, lora: LoraSettings, train: Train) -> int:
    """Disk for a training: checkpoints of float32 weights, the best ones, two moments; and the adapter."""
    return disk_bytes_of(trained_parameters(model, lora, train.method), train.keep_checkpoints)


def disk_bytes_of(trained: int, keep_checkpoints: int) -> int:
    """The same for ``trained`` numbers."""
    kept = keep_checkpoints + KEPT_BESIDE
    return (kept * 4 + 1) * FLOAT32 * trained + kept * 2**20


def _passes(question: PlannedTraining, rows_per_update: int, reasons: dict[str, str]) -> int:
    train, rows = question.train, question.rows
    if train.method != PRETRAIN or train.num_epochs is not None:
        return epochs_for(rows.count, rows_per_update, train, reasons)
    if train.max_steps is not None:
        reasons["num_epochs"] = "as many as train.max_steps needs"
        return math.ceil(train.max_steps * rows_per_update / max(1, rows.count))
    found = passes_for(question.model.parameters, int(rows.count * rows.mean_tokens), train.tokens_per_parameter)
    reasons["num_epochs"] = found.reason
    return found.count


def _max_steps(question: PlannedTraining, rows_per_update: int, epochs: int, reasons: dict[str, str]) -> int | None:
    """The pin, or updates in which a new model sees what it wants; None where the passes end before."""
    train, rows = question.train, question.rows
    reasons["max_steps"] = "num_epochs decides" if train.max_steps is None else "set by you"
    if train.method != PRETRAIN or train.max_steps is not None or train.num_epochs is not None:
        return train.max_steps
    wanted = wanted_tokens(question.model.parameters, train.tokens_per_parameter)
    update_tokens = int(rows_per_update * rows.mean_tokens)
    steps = math.ceil(wanted / update_tokens)
    if steps >= total_updates(rows.count, rows_per_update, epochs, None):
        return None
    reasons["max_steps"] = f"{count_text(wanted)} tokens (train.tokens_per_parameter), {update_tokens:,} an update"
    return steps


def _learning_rate(question: PlannedTraining, fit: Fit, updates: int, reasons: dict[str, str]) -> float:
    model, train, rows = question.model, question.train, question.rows
    if train.method != PRETRAIN:
        return learning_rate_for(model, question.lora, train.method, fit.rows_per_update, reasons)
    update_tokens = int(fit.rows_per_update * rows.mean_tokens)
    return pretraining_rate(model.parameters, updates * update_tokens, update_tokens, reasons)


def _window_length(model: ModelFiles, train: Train) -> int:
    """Tokens that a window of pretraining feeds: the pin, else the model's context, up to MOST_WINDOW."""
    return train.max_seq_length or min(model.max_positions or MOST_WINDOW, MOST_WINDOW)


def _lengths(data: DataReport, model: ModelFiles, train: Train) -> list[int]:
    """Lengths to try: the pin; else one that cuts no row, then one that cuts at most one row in two hundred."""
    limit = model.max_positions or 2**20
    if train.max_seq_length is not None:
        if train.max_seq_length > limit:
            raise ConfigError(
                f"train.max_seq_length is {train.max_seq_length}.", expected=f"at most {limit}, the model's context"
            )
        return [train.max_seq_length]
    if train.method == PRETRAIN:
        return [_window_length(model, train)]
    most = max(data.train.lengths.p99_5, data.valid.lengths.p99_5)
    return [min(padded(length), limit) for length in (data.longest_row, most)]
