"""`safetrain estimate` and `info`: the memory of a training on this or another machine, by a model's headers."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.memory.estimate import (
    MARGIN,
    predicted_peak,
    require_computable,
    require_trainable,
    total_bytes,
    with_margin,
)
from safetrain.core.memory.terms import Backend, Shape, backend_of, padded, trained_parameters
from safetrain.core.model.files import ModelFiles
from safetrain.core.model.shapes import is_known
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import CHOICES, WHOLE, Train, describe_allowed
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, MemoryTerm
from safetrain.plan.candidates import Shortage, what_would_fit
from safetrain.plan.machines import ANY_CPU, ANY_GPU

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (64, 32, 16, 8, 4, 2, 1)
LEAST_RANK, HALVED_BLOCKS, SHORTEST_ROWS = 8, 2, 128  # as far down as the remedies go
RECOMPUTED = "train.gradient_checkpointing=true"


@dataclass(frozen=True)
class TrainingOptions:
    """How a training is to run, as far as memory is concerned."""

    lora: LoraSettings
    method: str
    checkpointing: bool
    dequantize: bool
    accumulates: bool = True  # an update has several micro-batches
    optimizer: str = "adam"
    compute_dtype: str | None = None  # None: as the base is stored

    @property
    def cheapest(self) -> "TrainingOptions":
        """The same training with as little memory as it can take."""
        return dataclasses.replace(self, checkpointing=True, dequantize=False)


@dataclass(frozen=True)
class Estimate:
    """What one shape is predicted to need."""

    terms: tuple[MemoryTerm, ...]
    budget: MemoryBudget

    @property
    def needed_bytes(self) -> int:
        """Peak memory with its margin and the process around it, in bytes."""
        return with_margin(self.terms) + self.budget.process_bytes

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return with_margin(self.terms) <= self.budget.mlx_bytes


def asked_run(
    model: ModelFiles, backend: str, method: str = "lora", rank: int = 16, *, recompute: bool = False,
    num_layers: int | None = None, accumulate: bool = True, optimizer: str = "adam", compute_dtype: str | None = None,
) -> TrainingOptions:  # fmt: skip
    """A requested run, its base dequantized on a CPU; raises ConfigError for what cannot be trained so."""
    for key, value in (("method", method), ("optimizer", optimizer), ("compute_dtype", compute_dtype)):
        _require_choice(key, value)
    require_computable(compute_dtype, backend)
    if num_layers is not None and num_layers > model.num_layers:
        raise ConfigError(f"--num-layers is {num_layers}.", expected=f"at most {model.num_layers}, the model's blocks")
    require_trainable(method, quantized=model.quantization_bits is not None)
    lora = LoraSettings(rank, 2.0, 0.0, num_layers or model.num_layers, (ALL_LINEAR,))
    dequantize = backend == "cpu" and model.quantization_bits is not None
    return TrainingOptions(lora, method, recompute, dequantize, accumulate, optimizer, compute_dtype)


def _require_choice(key: str, value: str | None) -> None:
    """Raise ConfigError for an option with a value that the key ``train.<key>`` does not admit."""
    choices = next(field for field in dataclasses.fields(Train) if field.name == key).metadata[CHOICES]
    allowed = describe_allowed("train", key)
    if value not in choices and not (value is None and allowed.endswith("or null")):
        raise ConfigError(f"Unknown value: --{key.replace('_', '-')} {value}.", expected=allowed)


def estimate(model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int) -> Estimate:
    """The memory of micro-batches of this shape, term by term."""
    shape = Shape(batch_size, padded(tokens), run.accumulates)
    return Estimate(predicted_peak(model, run.lora, shape, _backend(model, machine, run)), machine.memory_budget)


def _backend(model: ModelFiles, machine: Machine, run: TrainingOptions) -> Backend:
    return backend_of(
        model, machine.backend, run.dequantize, run.method, checkpointing=run.checkpointing,
        optimizer=run.optimizer, compute_dtype=run.compute_dtype,
    )  # fmt: skip


def as_planned(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> TrainingOptions:
    """The run with its base left quantized where it fits only so, as recommend_config would choose."""
    quantized = dataclasses.replace(run, dequantize=False)
    dequantized_fits = estimate(model, machine, run, batch_size, tokens).fits
    return run if dequantized_fits or not estimate(model, machine, quantized, batch_size, tokens).fits else quantized


def largest_batch(model: ModelFiles, machine: Machine, run: TrainingOptions, tokens: int) -> int:
    """The largest micro-batch of rows this long that fits, 0 if none does."""
    return next((size for size in BATCHES if estimate(model, machine, run, size, tokens).fits), 0)


def remedies(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> list[tuple[list[str], Estimate]]:
    """What to change where a shape does not fit: step by step, each with the keys of all before it, until it fits.

    In the order of what they cost: fewer rows at a time, a base left quantized, recomputed blocks and a slower type
    cost time; a lower rank, fewer blocks and shorter rows cost what can be learnt.
    """
    found, keys = list[tuple[list[str], Estimate]](), dict[str, str]()
    for key, value, less, rows, length in _steps(model, machine, run, batch_size, tokens):
        keys[key] = value
        found.append(([f"{name}={text}" for name, text in keys.items()], estimate(model, machine, less, rows, length)))
        if found[-1][1].fits:
            break
    return found


def _steps(
    model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> Iterator[tuple[str, str, TrainingOptions, int, int]]:
    """Key and value of each step, and what the training is then."""
    while batch_size > 1:
        batch_size //= 2
        yield "train.batch_size", str(batch_size), run, batch_size, tokens
    if run.dequantize and model.quantization_bits is not None:
        run = dataclasses.replace(run, dequantize=False)
        yield "train.dequantize_base", "false", run, batch_size, tokens
    if not run.checkpointing:
        run = dataclasses.replace(run, checkpointing=True)
        yield "train.gradient_checkpointing", "true", run, batch_size, tokens
    if run.compute_dtype == "float32" and machine.backend != "cpu":
        run = dataclasses.replace(run, compute_dtype="bfloat16")
        yield "train.compute_dtype", "bfloat16", run, batch_size, tokens
    while run.method not in WHOLE and run.lora.rank > LEAST_RANK:
        run = dataclasses.replace(run, lora=dataclasses.replace(run.lora, rank=max(LEAST_RANK, run.lora.rank // 2)))
        yield "lora.rank", str(run.lora.rank), run, batch_size, tokens
    for _ in range(HALVED_BLOCKS):
        run = dataclasses.replace(run, lora=dataclasses.replace(run.lora, num_layers=max(1, run.lora.num_layers // 2)))
        yield "lora.num_layers", str(run.lora.num_layers), run, batch_size, tokens
    while tokens > SHORTEST_ROWS:
        tokens = max(SHORTEST_ROWS, tokens // 2)
        yield "train.max_seq_length", str(tokens), run, batch_size, tokens


def print_estimate(
    console: Console, model: ModelFiles, machine: Machine, name: str, run: TrainingOptions, batch_size: int, tokens: int
) -> bool:
    """One shape term by term, then what fits at each length. Returns whether the shape fits."""
    _print_model(console, model, run)
    if not is_known(model.model_type):
        raise ModelError(
            f"The architecture {model.model_type} has no closed form: what its layers keep is not guessed.",
            got=f"weights of {size(model.static_bytes)}",
            do="python -m stages.preflight preflight.level=certify, which makes a dry run",
        )
    planned = as_planned(model, machine, run, batch_size, tokens)
    found = estimate(model, machine, planned, batch_size, tokens)
    rank = f" rank {run.lora.rank}" if run.method not in WHOLE else ""
    quantized = "" if planned == run else ", base left quantized (dequantized, it does not fit)"
    here = f"{name} ({machine.backend}, budget {size(machine.memory_budget_bytes)})"
    _print_terms(console, found, f"{batch_size} x {tokens} tokens, {run.method}{rank}{quantized}, on {here}")
    if not found.fits:
        print_remedies(console, model, machine, run, batch_size, tokens)
    _print_grid(console, model, machine, run)
    if machine.backend != "cpu":
        console.print("(closed form; its terms for GPUs are reasoned, not measured)", style="dim")
    return found.fits


def print_remedies(
    console: Console, model: ModelFiles, machine: Machine, run: TrainingOptions, batch_size: int, tokens: int
) -> None:
    """What to change, step by step, down to the first that fits; where none does, what else would fit."""
    found = remedies(model, machine, run, batch_size, tokens)
    table = titled_table(console, "what to change, each step with those above it")
    for keys, needed in found:
        table.add_row(keys[-1], size(needed.needed_bytes), "fits" if needed.fits else "does not fit")
    console.print(table)
    if found and found[-1][1].fits:
        console.print(f"do: {' '.join(found[-1][0])}", highlight=False)
        return
    backend = _backend(model, machine, run.cheapest)
    shortage = Shortage(model, run.lora, Shape(1, padded(tokens), True), backend, machine.memory_budget)
    other = " or ".join(what_would_fit(shortage))
    console.print(f"do: use {other}; {RECOMPUTED} in each case", highlight=False)


def print_info(console: Console, model: ModelFiles) -> None:
    """Parameters, shapes, sizes; and the least that training one row of it takes, by the closed form."""
    on_gpu, on_cpu = (asked_run(model, name, "lora", 16, recompute=True).cheapest for name in ("gpu", "cpu"))
    _print_model(console, model, on_gpu)
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} for keys and values"
    context = f"context {model.max_positions:,} tokens" if model.max_positions else "context not said"
    console.print(f"{heads}; feed-forward {model.intermediate_size:,}, vocabulary {model.vocab_size:,}; {context}")
    if not is_known(model.model_type):
        console.print("unknown architecture: a dry run measures its memory (preflight.level=certify)")
        return
    table = titled_table(console, "one row, LoRA rank 16, blocks recomputed", ("tokens", "memory on a GPU", "on CPU"))
    for tokens in _lengths(model):
        there = (estimate(model, ANY_GPU, on_gpu, 1, tokens), estimate(model, ANY_CPU, on_cpu, 1, tokens))
        table.add_row(f"{tokens:,}", *(size(each.needed_bytes) for each in there))
    console.print(table)


def _print_model(console: Console, model: ModelFiles, run: TrainingOptions) -> None:
    """The model in one line."""
    bits = f"{model.quantization_bits} bits" if model.quantization_bits else "not quantized"
    trained = trained_parameters(model, run.lora, run.method)
    weights = f"{model.parameters / 1e6:,.1f}M parameters, {bits}, {size(model.static_bytes)} of weights"
    blocks = f"{model.num_layers} blocks of width {model.hidden_size}"
    console.print(f"{model.model_type}: {weights}, {blocks}; {trained / 1e6:.1f}M trained", highlight=False)


def titled_table(console: Console, title: str, columns: tuple[str, ...] = ()) -> Table:
    """A plain table under its title, which is printed at once: a table's own wraps at the table's width."""
    console.print(f"\n{title}", style="italic", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _print_terms(console: Console, found: Estimate, title: str) -> None:
    """One shape, term by term."""
    table = titled_table(console, title)
    table.add_column("")
    table.add_column("", justify="right")
    peak = total_bytes(found.terms)
    for term in found.terms:
        table.add_row(term.name, size(term.size_bytes))
    table.add_row("predicted peak of mlx", size(peak), style="bold")
    margin = size(with_margin(found.terms) - peak)
    table.add_row(f"margin, {100 * (MARGIN - 1):.0f} % of what is estimated", margin)
    table.add_row("process around it", size(found.budget.process_bytes))
    table.add_row("needed", size(found.needed_bytes), style="bold")
    table.add_row("budget", size(found.budget.total_bytes))
    console.print(table)
    print_verdict(console, fits=found.fits)


def print_verdict(console: Console, *, fits: bool) -> None:
    """Whether it fits."""
    console.print("it fits" if fits else "it does not fit", style="bold green" if fits else "bold red")


def _print_grid(console: Console, model: ModelFiles, machine: Machine, run: TrainingOptions) -> None:
    """The largest micro-batch for each length."""
    columns = ("tokens per row", "activations kept", "recomputed")
    table = titled_table(console, "rows that fit at a time", columns)
    stored = dataclasses.replace(run, checkpointing=False)
    ways = (stored, dataclasses.replace(stored, dequantize=False), run.cheapest)
    for tokens in _lengths(model):
        dequantized, quantized, recomputed = (largest_batch(model, machine, each, tokens) for each in ways)
        table.add_row(str(tokens), rows_text(max(dequantized, quantized)), rows_text(recomputed))
    console.print(table)


def _lengths(model: ModelFiles) -> list[int]:
    return [tokens for tokens in LENGTHS if model.max_positions is None or tokens <= model.max_positions]


def rows_text(rows: int) -> str:
    """The number, none, or that more than the largest that was tried may fit."""
    return "-" if rows == 0 else f"{rows} or more" if rows == BATCHES[0] else str(rows)
