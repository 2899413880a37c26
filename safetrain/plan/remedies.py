"""What would fit, if the run that was asked for does not: errors, and changes with the memory that they then need."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from safetrain.core.errors import MachineError
from safetrain.core.formatting import run_again, size_text
from safetrain.core.memory.estimate import does_not_fit, with_margin
from safetrain.core.memory.terms import WIDTH_STEP
from safetrain.core.records.schema import WHOLE
from safetrain.plan.candidates import Estimate, PlannedTraining

SHORTEST_ROWS = 64
FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # per weight: two 16-bit numbers for 64 weights
SMALLEST_BASE_MILLIONS = 1.0


def nothing_passed(question: PlannedTraining) -> MachineError:
    """The error if no dry run stayed within the budget."""
    budget, first = (
        size_text(question.machine.memory_budget_bytes),
        f"close other programs and run '{run_again()}' again",
    )
    source, limit = f"the budget of {budget}", question.train.memory_limit_gb
    if limit is not None:
        source, first = f"train.memory_limit_gb={limit:g}", "raise that limit"
    return MachineError(
        "No configuration fits: every dry run ran out of memory.",
        expected=f"a process within {source}",
        do=f"{first}, or shorten rows (train.max_seq_length)",
    )


def nothing_fits(question: PlannedTraining, fits: list[Estimate]) -> MachineError:
    """The error if no candidate is predicted to fit: what the smallest one needs, and what would fit instead."""
    least = min(fits, key=lambda fit: fit.peak_bytes)
    tokens, budget = least.micro_batch.tokens, question.machine.memory_budget
    instead, needed = what_would_fit(least.but(tokens=tokens, largest=None)), with_margin(least.terms)
    return does_not_fit(least.terms, least.rows, tokens, budget, needed, instead, question.train.memory_limit_gb)


def what_would_fit(run: Estimate) -> list[str]:
    """Changes that each make a training run fit, with the memory it then needs.

    Changes that only cost time come first and are enough if they can be; else each text adds one of the others to them.
    """
    keys = dict[str, str]()
    texts, blocks = list[str](), run.lora.num_layers
    for key, value, slower in _slower(run):
        keys[key], run = value, slower
        if run.fits:
            return [_with_memory("", keys, run)]
    lengths = range((run.tokens - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    if shorter := _first(run.but(tokens=tokens) for tokens in lengths):
        texts.append(_with_memory(f"train.max_seq_length={shorter.tokens}", keys, shorter))
    loras = (dataclasses.replace(run.lora, num_layers=count) for count in range(blocks - 1, 0, -1))
    if fewer := _first(run.but(lora=lora) for lora in loras):
        texts.append(_with_memory(f"lora.num_layers={fewer.lora.num_layers}", keys, fewer))
    may_quantize = run.model.quantization_bits is None and run.method not in WHOLE  # quantized weights stay frozen
    if may_quantize and (quantized := _first(_quantized(run, bits) for bits in FEWER_BITS)):
        folder, bits = run.model.folder, quantized.model.quantization_bits
        texts.append(_with_memory(f"safetrain convert {folder} {folder}-{bits}bit --bits {bits}", keys, quantized))
    return texts or [_smaller_base(run)]


def _slower(run: Estimate) -> Iterator[tuple[str, str, Estimate]]:
    """Yield changes that cost only time: key, value, and the training run with all changes so far."""
    while run.rows > 1:
        run = run.but(rows=run.rows // 2)
        yield "train.batch_size", str(run.rows), run
    if run.dequantize and run.model.quantization_bits is not None:
        run = run.but(dequantize=False)
        yield "train.dequantize_base", "false", run
    if not run.checkpointing:
        run = run.but(checkpointing=True)
        yield "train.gradient_checkpointing", "true", run
    if run.compute_dtype == "float32" and run.machine.backend != "cpu":
        run = run.but(compute_dtype="bfloat16")
        yield "train.compute_dtype", "bfloat16", run
    if not run.stream and run.method not in WHOLE:
        yield "train.stream_base", "true", run.but(stream=True)


def _with_memory(change: str, keys: Mapping[str, str], run: Estimate) -> str:
    words = [*(f"{key}={value}" for key, value in keys.items()), *([change] if change else [])]
    return f"{' '.join(words)} ({size_text(run.needed_bytes)})"


def _first(candidates: Iterable[Estimate]) -> Estimate | None:
    return next((each for each in candidates if each.fits), None)


def _quantized(run: Estimate, bits: int) -> Estimate:
    """The training run with its float base quantized."""
    scales = BITS_OF_SCALES * (2 if run.compute_dtype == "float32" else 1)
    size = int(run.model.parameters * (bits + scales) / 8)
    model = dataclasses.replace(run.model, static_bytes=size, quantization_bits=bits)
    if run.compute_dtype is not None:  # the size is final: no tensor counts as cast
        model = dataclasses.replace(model, tensors=tuple(dataclasses.replace(t, dtype="U32") for t in model.tensors))
    return run.but(model=model, dequantize=False)


def _smaller_base(run: Estimate) -> str:
    """Describe a base small enough to fit, by proportion: weights, adapter and activations shrink with it."""
    budget = run.machine.memory_budget
    share = budget.mlx_bytes / max(1, run.needed_bytes - budget.process_bytes)
    millions = share * run.model.parameters / 1e6
    if millions < SMALLEST_BASE_MILLIONS:
        return f"a machine with more memory (Python and mlx take {size_text(budget.process_bytes)})"
    return f"a base model with about {millions:,.0f} million parameters or fewer"
