"""What `safetrain estimate` prints."""

import dataclasses

from rich.console import Console
from rich.table import Table

from safetrain.core.errors import ModelError
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.estimate import MARGIN
from safetrain.core.memory.terms import trained_parameters
from safetrain.core.model.files import ModelFiles
from safetrain.core.model.shapes import is_known
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import WHOLE
from safetrain.plan.what_if import (
    ANY_CPU,
    ANY_GPU,
    BATCHES,
    LENGTHS,
    Estimate,
    TrainingOptions,
    as_planned,
    asked_run,
    cheapest,
    estimate,
    largest_batch,
    remedies,
    would_fit,
)

RECOMPUTED = "train.gradient_checkpointing=true"


def print_estimate(
    console: Console, model: ModelFiles, machine: Machine, name: str, run: TrainingOptions, batch_size: int, tokens: int
) -> bool:
    """One shape term by term, then what fits at each length. Returns whether the shape fits."""
    print_model(console, model, run)
    if not is_known(model.model_type):
        raise ModelError(
            f"The architecture {model.model_type} has no closed form: what its layers keep is not guessed.",
            got=f"weights of {size(model.static_bytes)}",
            do="python -m stages.preflight preflight.level=certify, which makes a dry run",
        )
    here = f"{name} ({machine.backend}, budget {size(machine.memory_budget_bytes)})"
    shape = f"{batch_size} x {tokens} tokens, {run.method}" + (
        f" rank {run.lora.rank}" if run.method not in WHOLE else ""
    )
    planned = as_planned(model, machine, run, batch_size, tokens)
    found = estimate(model, machine, planned, batch_size, tokens)
    shape += "" if planned == run else ", base left quantized (dequantized, it does not fit)"
    print_terms(console, found, f"{shape}, on {here}")
    if not found.fits:
        print_remedies(console, model, machine, run, batch_size, tokens)
    print_grid(console, model, machine, run)
    if machine.backend != "cpu":
        console.print("(closed form; its terms for GPUs are reasoned, not measured)", style="dim")
    return found.fits


def print_remedies(
    console: Console, model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> None:
    """What to change, step by step, down to the first that fits."""
    found = remedies(model, machine, run, batch_size, tokens)
    table = _table(console, "what to change, each step with those above it")
    for step in found:
        fits = "fits" if step.estimate.fits else "does not fit"
        table.add_row(step.keys[-1], size(step.estimate.needed_bytes), fits)
    console.print(table)
    if found and found[-1].estimate.fits:
        console.print(f"do: {' '.join(found[-1].keys)}", highlight=False)
        return
    other = " or ".join(would_fit(model, machine, run, tokens))
    console.print(f"do: use {other}; {RECOMPUTED} in each case", highlight=False)


def print_info(console: Console, model: ModelFiles) -> None:
    """Parameters, shapes, sizes; and the least that training one row of it takes, by the closed form."""
    on_gpu, on_cpu = (cheapest(asked_run(model, name, "lora", 16, recompute=True)) for name in ("gpu", "cpu"))
    print_model(console, model, on_gpu)
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} for keys and values"
    context = f"context {model.max_positions:,} tokens" if model.max_positions else "context not said"
    console.print(f"{heads}; feed-forward {model.intermediate_size:,}, vocabulary {model.vocab_size:,}; {context}")
    if not is_known(model.model_type):
        console.print("unknown architecture: a dry run measures its memory (preflight.level=certify)")
        return
    table = _table(console, "one row, LoRA rank 16, blocks recomputed")
    for name in ("tokens", "memory on a GPU", "on CPU"):
        table.add_column(name, justify="right")
    for tokens in [n for n in LENGTHS if model.max_positions is None or n <= model.max_positions]:
        there = (estimate(model, ANY_GPU, on_gpu, 1, tokens), estimate(model, ANY_CPU, on_cpu, 1, tokens))
        table.add_row(f"{tokens:,}", *(size(each.needed_bytes) for each in there))
    console.print(table)


def print_model(console: Console, model: ModelFiles, run: TrainingOptions) -> None:
    """The model in one line."""
    bits = f"{model.quantization_bits} bits" if model.quantization_bits else "not quantized"
    trained = trained_parameters(model, run.lora, run.method)
    weights = f"{model.parameters / 1e6:,.1f}M parameters, {bits}, {size(model.static_bytes)} of weights"
    blocks = f"{model.num_layers} blocks of width {model.hidden_size}"
    console.print(f"{model.model_type}: {weights}, {blocks}; {trained / 1e6:.1f}M trained", highlight=False)


def _table(console: Console, title: str) -> Table:
    """A plain table under its title, which is printed at once: a table's own wraps at the table's width."""
    console.print(f"\n{title}", style="italic", highlight=False)
    return Table(box=None, pad_edge=False)


def print_terms(console: Console, found: Estimate, title: str) -> None:
    """One shape, term by term."""
    table = _table(console, title)
    table.add_column("")
    table.add_column("", justify="right")
    for term in found.terms:
        table.add_row(term.name, size(term.size_bytes))
    table.add_row("predicted peak of mlx", size(found.peak_bytes), style="bold")
    table.add_row(f"margin, {100 * (MARGIN - 1):.0f} % of what is estimated", size(found.margin_bytes))
    table.add_row("process around it", size(found.budget.process_bytes))
    table.add_row("needed", size(found.needed_bytes), style="bold")
    table.add_row("budget", size(found.budget.total_bytes))
    console.print(table)
    console.print("it fits" if found.fits else "it does not fit", style="bold green" if found.fits else "bold red")


def print_grid(console: Console, model: ModelFiles, machine: Machine, run: TrainingOptions) -> None:
    """The largest micro-batch for each length."""
    table = _table(console, "rows that fit at a time")
    for name in ("tokens per row", "activations kept", "recomputed"):
        table.add_column(name, justify="right")
    lengths = [n for n in LENGTHS if model.max_positions is None or n <= model.max_positions]
    for tokens in lengths:
        kept_run = dataclasses.replace(run, checkpointing=False)
        ways = (kept_run, dataclasses.replace(kept_run, dequantize=False), cheapest(run))
        dequantized, quantized, recomputed = (largest_batch(model, machine, each, tokens) for each in ways)
        kept = max(dequantized, quantized)
        table.add_row(str(tokens), rows_text(kept), rows_text(recomputed))
    console.print(table)


def rows_text(rows: int) -> str:
    """The number, none, or that more than the largest that was tried may fit."""
    return "-" if rows == 0 else f"{rows} or more" if rows == BATCHES[0] else str(rows)
