"""The reasons for length, micro-batch and way of computing, in words."""

from safetrain.core.formatting import size_text
from safetrain.core.memory.terms import WIDTH_STEP
from safetrain.plan.candidates import Fit, PlannedTraining
from safetrain.plan.compute_dtype import why_compute_dtype


def explain_fit(fit: Fit, question: PlannedTraining, reasons: dict[str, str]) -> None:
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
    learnt = " (a training of this model has run out of memory before)" if fit.learnt.death_factor else ""
    return f"the fastest that fits{learnt}: {predicted}"


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
