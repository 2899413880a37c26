"""What would fit, if the run that was asked for does not: errors, and changes with the memory that they then need."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from safetrain.core.errors import MachineError
from safetrain.core.formatting import run_again, size_text
from safetrain.core.memory.estimate import does_not_fit, with_margin
from safetrain.core.memory.terms import WIDTH_STEP
from safetrain.core.records.schema import WHOLE
from safetrain.plan.candidates import Estimate, PlannedTraining

SHORTEST_ROWS = 64
FEWER_BITS = (4, 3, 2)
BITS_OF_SCALES = 0.5  # per weight: two 16-bit numbers for 64 weights


def nothing_passed(question: PlannedTraining) -> MachineError:
    """The error if no dry run stayed within the budget."""
    return MachineError(
        "No configuration fits: every dry run ran out of memory.",
        expected=f"a process within the budget of {size_text(question.run.machine.memory_budget_bytes)}",
        do=f"close other programs or raise train.memory_limit_gb, and run '{run_again()}' again; or shorten rows "
        "(train.max_seq_length)",
    )


def nothing_fits(question: PlannedTraining, fits: list[Estimate]) -> MachineError:
    """The error if no candidate is predicted to fit: what the smallest one needs, and what would fit instead."""
    least = min(fits, key=lambda fit: fit.peak_bytes)
    tokens, budget = least.micro_batch.tokens, question.run.machine.memory_budget
    instead, needed = what_would_fit(least.but(tokens=tokens, largest=None)), with_margin(least.terms)
    return does_not_fit(least.terms, least.rows, tokens, budget, needed, instead)


def what_would_fit(run: Estimate) -> list[str]:
    """Changes that each make a training run fit, with the memory it then needs.

    Changes that only cost time come first and are enough if they can be; else each text adds one of the others to them.
    """
    keys = dict[str, str]()
    for key, value, changes in _slower(run):
        keys[key], run = value, run.but(**changes)
        if run.fits:
            break
    slower, folder = [f"{key}={value}" for key, value in keys.items()], run.model.folder
    if run.fits:
        return [f"{' '.join(slower)} ({size_text(run.needed_bytes)})"]
    lengths = range((run.tokens - 1) // WIDTH_STEP * WIDTH_STEP, SHORTEST_ROWS - 1, -WIDTH_STEP)
    bits = FEWER_BITS if run.model.quantization_bits is None and run.method not in WHOLE else ()
    ways = (
        ((f"train.max_seq_length={tokens}", run.but(tokens=tokens)) for tokens in lengths),
        ((f"safetrain convert {folder} {folder}-{each}bit --bits {each}", _quantized(run, each)) for each in bits),
    )
    fitting = (next(((change, fit) for change, fit in way if fit.fits), None) for way in ways)
    texts = [f"{' '.join([*slower, each[0]])} ({size_text(each[1].needed_bytes)})" for each in fitting if each]
    return texts or ["a smaller base model or a machine with more memory"]


def _slower(run: Estimate) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield changes that cost only time: key, value, and the changed fields of the training run."""
    rows = run.rows
    while rows > 1:
        rows //= 2
        yield "train.batch_size", str(rows), {"rows": rows}
    if run.dequantize and run.model.quantization_bits is not None:
        yield "train.dequantize_base", "false", {"dequantize": False}
    if not run.checkpointing:
        yield "train.gradient_checkpointing", "true", {"checkpointing": True}
    if run.compute_dtype == "float32" and run.machine.backend != "cpu":
        yield "train.compute_dtype", "bfloat16", {"compute_dtype": "bfloat16"}
    if not run.stream and run.method not in WHOLE:
        yield "train.stream_base", "true", {"stream": True}


def _quantized(run: Estimate, bits: int) -> Estimate:
    """The training run with its float base quantized."""
    scales = BITS_OF_SCALES * (2 if run.compute_dtype == "float32" else 1)
    size = int(run.model.parameters * (bits + scales) / 8)
    model = dataclasses.replace(run.model, static_bytes=size, quantization_bits=bits)
    if run.compute_dtype is not None:  # the size is final: no tensor counts as cast
        model = dataclasses.replace(model, tensors=tuple(dataclasses.replace(t, dtype="U32") for t in model.tensors))
    return run.but(model=model, dequantize=False)
