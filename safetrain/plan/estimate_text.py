"""What `safetrain estimate` prints."""

from rich.console import Console
from rich.table import Table

from safetrain.core.memory import MARGIN, trained_parameters
from safetrain.core.model_files import ModelFiles
from safetrain.core.reports import Machine
from safetrain.plan.what_if import (
    LENGTHS,
    OLD_TABLE,
    Estimate,
    Run,
    cheapest,
    estimate,
    largest_batch,
    with_memory,
)

GIB = 2**30
MIB = 2**20


def size(size_bytes: float) -> str:
    """In GiB, small ones in MiB."""
    return f"{size_bytes / GIB:,.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"


def print_model(console: Console, model: ModelFiles, run: Run) -> None:
    """The model in one line."""
    bits = f"{model.quantization_bits} bits" if model.quantization_bits else "not quantized"
    trained = trained_parameters(model, run.lora, run.method)
    weights = f"{model.parameters / 1e6:,.1f}M parameters, {bits}, {size(model.static_bytes)} of weights"
    blocks = f"{model.num_layers} blocks of width {model.hidden_size}"
    console.print(f"{model.model_type}: {weights}, {blocks}; {trained / 1e6:.1f}M trained", highlight=False)


def print_terms(console: Console, found: Estimate, title: str) -> None:
    """One shape, term by term."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    for term in found.terms:
        table.add_row(term.name, size(term.size_bytes))
    table.add_row("predicted peak of mlx", size(found.peak_bytes), style="bold")
    table.add_row(f"with {100 * (MARGIN - 1):.0f} % margin and the process", size(found.needed_bytes))
    table.add_row("budget", size(found.budget_bytes))
    console.print(table)
    console.print("it fits" if found.fits else "it does not fit", style="bold green" if found.fits else "bold red")


def print_grid(console: Console, model: ModelFiles, machine: Machine, run: Run) -> None:
    """The largest micro-batch for each length."""
    table = Table(title="rows that fit at a time", title_justify="left", box=None, pad_edge=False)
    for name in ("tokens per row", "activations kept", "recomputed"):
        table.add_column(name, justify="right")
    lengths = [n for n in LENGTHS if model.max_positions is None or n <= model.max_positions]
    for tokens in lengths:
        kept, recomputed = (largest_batch(model, machine, each, tokens) for each in (run, cheapest(run)))
        table.add_row(str(tokens), str(kept or "-"), str(recomputed or "-"))
    console.print(table)


def print_old_table(console: Console, model: ModelFiles, machine: Machine, run: Run) -> None:
    """The table by memory alone, and what this model would need there."""
    table = Table(title="a table by memory alone, for this model", title_justify="left", box=None, pad_edge=False)
    for name in ("memory", "it says", "needed", "verdict"):
        table.add_column(name)
    for row in OLD_TABLE:
        here = with_memory(machine, row.memory_gb)
        tokens = min(row.max_seq_length, model.max_positions or row.max_seq_length)
        found = estimate(model, here, run, row.batch_size, tokens)
        shape = f"{row.batch_size} x {row.gradient_accumulation} rows of {row.max_seq_length}"
        table.add_row(
            f"{row.memory_gb:g} GB", shape, size(found.needed_bytes), verdict(model, here, run, found, tokens)
        )
    console.print(table)


def verdict(model: ModelFiles, machine: Machine, run: Run, found: Estimate, tokens: int) -> str:
    """What is wrong with a row of the old table, if anything."""
    best = largest_batch(model, machine, run, tokens)
    if not found.fits:
        least = largest_batch(model, machine, cheapest(run), tokens)
        return f"does not fit; {least} rows, recomputed, do" if least else "nothing of this length fits"
    spare = 100 * (1 - found.needed_bytes / found.budget_bytes)
    return f"fits, {spare:.0f} % of the memory stays unused; {best} rows fit" if best else "fits"
