"""`safetrain info` and `safetrain estimate`: memory and time of a training run, here or on a described machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.formatting import counted, duration_text
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.estimate import MARGIN, with_margin
from safetrain.core.memory.terms import FLOAT32, padded, trained_parameters
from safetrain.core.model.files import ModelFiles, model_of_config, read_model_plan
from safetrain.core.model.shapes import is_known
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.plan.candidates import ROWS_PER_UPDATE, window_length, windows_per_update
from safetrain.plan.creation.create import InitialWeights, config_of
from safetrain.plan.creation.shapes import PRESETS, ShapeRequest, parameters_named, shape_for
from safetrain.plan.creation.tokenizers import OWN_IDS
from safetrain.plan.estimate import BATCHES, Estimate, estimate_of, remedies, what_would_fit
from safetrain.plan.machine import ANY_CPU, ANY_GPU, TrainingPlace
from safetrain.plan.recommend import disk_bytes_of
from safetrain.plan.speed import (
    TOKENS_PER_PARAMETER,
    count_text,
    exchange_seconds,
    finish_text,
    flops_per_token,
    shared_update,
    update_seconds,
    wanted_tokens,
    wire_bytes,
)

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
RECOMPUTED = "train.gradient_checkpointing=true"
STORE_BYTES_PER_TOKEN = 5  # a 32-bit token ID and a label flag (core/data/store.py)
JOULES_PER_KWH, HOUR_SECONDS = 3.6e6, 3600
UNKNOWN = "-"


def print_info(console: Console, model: ModelFiles) -> None:
    """Print parameters, shapes and sizes, and the minimum memory for training on one row, by the closed form."""
    on_gpu, on_cpu = (estimate_of(model, machine).cheapest for machine in (ANY_GPU, ANY_CPU))
    _print_model(console, on_gpu)
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} for keys and values"
    context = f"context {model.max_positions:,} tokens" if model.max_positions else "context unknown"
    console.print(f"{heads}; feed-forward {model.intermediate_size:,}, vocabulary {model.vocab_size:,}; {context}")
    if not is_known(model.model_type):
        console.print("unknown architecture: a dry run measures its memory (preflight.level=certify)")
        return
    table = _titled_table(console, "one row, LoRA rank 16, blocks recomputed", ("tokens", "memory on a GPU", "on CPU"))
    for tokens in _lengths(model):
        table.add_row(f"{tokens:,}", *(size(each.but(tokens=tokens).needed_bytes) for each in (on_gpu, on_cpu)))
    console.print(table)


def print_estimate(console: Console, estimate: Estimate, name: str) -> bool:
    """Print a run's memory term by term, then the batch that fits at each length. Returns whether the run fits."""
    model, machine, planned = estimate.model, estimate.machine, estimate
    _print_model(console, estimate)
    if not is_known(model.model_type):
        raise ModelError(
            f"The architecture {model.model_type} is unknown: its memory cannot be estimated.",
            got=f"weights of {size(model.static_bytes)}",
            do="safetrain preflight --level certify, which makes a dry run",
        )
    planned = estimate.as_planned
    rank = f" rank {estimate.lora.rank}" if estimate.method not in WHOLE else ""
    quantized = "" if planned == estimate else ", base left quantized (dequantized, it does not fit)"
    run = f"{estimate.rows} x {estimate.tokens} tokens, {estimate.method}{rank}{quantized}"
    here = f"{name} ({machine.backend}, budget {size(machine.memory_budget_bytes)})"
    _print_terms(console, planned, f"{run}, on {here}")
    if not planned.fits:
        print_remedies(console, estimate)
    _print_grid(console, estimate)
    if machine.backend != "cpu":
        console.print("(closed form; its terms for GPUs are reasoned, not measured)", style="dim")
    return planned.fits


def print_remedies(console: Console, estimate: Estimate) -> None:
    """Print changes step by step, up to the first that fits; if none does, print what else would fit."""
    steps = remedies(estimate)
    table = _titled_table(console, "what to change; each step includes those above it")
    for key, run in steps:
        table.add_row(key, size(run.needed_bytes), "fits" if run.fits else "does not fit")
    console.print(table)
    if steps and steps[-1][1].fits:
        keys = dict(key.partition("=")[::2] for key, _ in steps)  # the last value of each key
        console.print(f"do: set {' '.join(f'{key}={value}' for key, value in keys.items())}")
        return
    other = " or ".join(what_would_fit(estimate.cheapest.but(rows=1, accumulates=True)))
    console.print(f"do: use {other}; {RECOMPUTED} in each case")


def _print_model(console: Console, estimate: Estimate) -> None:
    """Print the model in one line."""
    model = estimate.model
    bits = f"{model.quantization_bits} bits" if model.quantization_bits else "not quantized"
    trained = trained_parameters(model, estimate.lora, estimate.method)
    weights = f"{model.parameters / 1e6:,.1f}M parameters, {bits}, {size(model.static_bytes)} of weights"
    blocks = f"{model.num_layers} blocks of width {model.hidden_size}"
    console.print(f"{model.model_type}: {weights}, {blocks}; {trained / 1e6:.1f}M trained")


def _titled_table(console: Console, title: str, columns: tuple[str, ...] = ()) -> Table:
    """Print a title and return an empty table; rich would wrap a table's own title at the table's width."""
    console.print(f"\n{title}", style="italic")
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _print_terms(console: Console, run: Estimate, title: str) -> None:
    """Print the memory of one training run, term by term."""
    table = _titled_table(console, title)
    table.add_column("")
    table.add_column("", justify="right")
    for term in run.terms:
        table.add_row(term.name, size(term.size_bytes))
    table.add_row("predicted peak of mlx", size(run.peak_bytes), style="bold")
    margin = size(with_margin(run.terms) - run.peak_bytes)
    table.add_row(f"margin, {100 * (MARGIN - 1):.0f} % of the estimate", margin)
    table.add_row("process around it", size(run.machine.process_memory_bytes))
    table.add_row("needed", size(run.needed_bytes), style="bold")
    table.add_row("budget", size(run.machine.memory_budget_bytes))
    console.print(table)
    _print_verdict(console, fits=run.fits)


def _print_verdict(console: Console, *, fits: bool) -> None:
    console.print("it fits" if fits else "it does not fit", style="bold green" if fits else "bold red")


def _print_grid(console: Console, estimate: Estimate) -> None:
    """Print the largest micro-batch for each length."""
    columns = ("tokens per row", "activations kept", "recomputed")
    table = _titled_table(console, "rows that fit at a time", columns)
    stored = estimate.but(checkpointing=False)
    ways = (stored, stored.but(dequantize=False), estimate.cheapest)
    for tokens in _lengths(estimate.model):
        dequantized, quantized, recomputed = (each.but(tokens=tokens).largest_batch for each in ways)
        table.add_row(str(tokens), _rows_text(max(dequantized, quantized)), _rows_text(recomputed))
    console.print(table)


def _lengths(model: ModelFiles) -> list[int]:
    return [tokens for tokens in LENGTHS if model.max_positions is None or tokens <= model.max_positions]


def _rows_text(rows: int) -> str:
    """The number of rows as text; "or more" at the largest size that is tried."""
    return "-" if rows == 0 else f"{rows} or more" if rows == BATCHES[0] else str(rows)


def print_ranks(console: Console, place: TrainingPlace, run: Estimate) -> None:
    """Print the speed-up from the ranks of ``place``, for steps of 16 rows, or more if requested."""
    model, ranks, link, rows = run.model, place.ranks, place.link, max(run.rows, ROWS_PER_UPDATE)
    trained = trained_parameters(model, run.lora, run.method)
    flops = rows * run.tokens * flops_per_token(model, run.tokens, trained, recompute=run.checkpointing)
    speed = place.speed(model, run.method)
    update = shared_update(speed, flops, trained, place.machine.backend, rows)
    here = f"{link.gbps:g} Gbit/s, {1e6 * link.latency_seconds:g} us per message"
    table = _titled_table(
        console, f"one update shared by ranks, linked at {here} (modelled)",
        ("ranks", "each sends per update", "exchange, s", "update, s", "speed-up"),
    )  # fmt: skip
    gradient = FLOAT32 * trained
    each = "Each rank has a machine like this to itself, and all weights: it needs the memory above; its gradient has "
    each += f"{size(gradient)}."
    if update is None:
        traffic = size(wire_bytes(gradient, ranks))
        console.print(f"{each} With {ranks} ranks each sends and receives {traffic} per update.")
        console.print(f"time: {speed.source}")
        return
    alone = update_seconds(update, 1, link)
    for count in sorted({2**power for power in range(ranks.bit_length())} | {ranks}):
        exchange, seconds = exchange_seconds(gradient, count, link), update_seconds(update, count, link)
        sent = size(wire_bytes(gradient, count))
        table.add_row(str(count), sent, f"{exchange:.3g}", f"{seconds:.3g}", f"{alone / seconds:.2f}")
    console.print(table)
    console.print(f"{each} Speed of one rank: {speed.source}.")


@dataclass(frozen=True)
class PretrainingEstimate:
    """Time, memory and cost of pretraining a model at a place; fields are None if unknown."""

    place: TrainingPlace
    tokens: int
    length: int  # of a window
    flops: float  # of the whole training
    tokens_per_second: float | None  # of all ranks together
    seconds: float | None  # of the whole training
    kwh: float | None  # of all ranks
    usd: float | None
    speed_source: str
    needed_bytes: int  # for one window, with stored activations if they fit, else recomputed
    rows: int  # windows that fit at a time with stored activations
    rows_recomputed: int
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        """Whether at least one window fits."""
        return bool(self.rows or self.rows_recomputed)


def print_pretraining(
    console: Console, name: str, places: Sequence[TrainingPlace], tokens_per_parameter: float, keep_checkpoints: int
) -> bool:
    """Print the estimate: details for one place, a line each for several. Returns whether any fits."""
    model, now = model_to_pretrain(name), datetime.now().astimezone()
    estimates = [estimate_pretraining(model, each, tokens_per_parameter, keep_checkpoints) for each in places]
    if len(estimates) > 1:
        _print_places(console, model, estimates, now)
    else:
        _print_pretraining(console, model, estimates[0], tokens_per_parameter, now)
    return any(each.fits for each in estimates)


def model_to_pretrain(name: str) -> ModelFiles:
    """The model of a folder or config.json, or of a size such as 400m with the shape that `safetrain create` uses.

    Raises ConfigError for any other name, ModelError for a folder without a model.
    """
    if Path(name).exists():
        return read_model_plan(Path(name))
    parameters = parameters_named(name)
    if parameters is None:
        raise ConfigError(
            "Unknown model to pretrain.",
            where="--pretrain",
            expected=f"{', '.join(PRESETS)}, another size such as 30m, or a model's folder",
            got=name,
        )
    shape = shape_for(ShapeRequest(parameters=parameters))
    return model_of_config(config_of(shape, OWN_IDS, InitialWeights(shape.hidden, shape.layers, 0)), Path(name))


def estimate_pretraining(
    model: ModelFiles, place: TrainingPlace, tokens_per_parameter: float, keep_checkpoints: int
) -> PretrainingEstimate:
    """Estimate tokens, operations, memory, time and disk; raises ConfigError for a quantized model."""
    length, tokens = window_length(model), wanted_tokens(model.parameters, tokens_per_parameter)
    window = estimate_of(model, place.machine, PRETRAIN, tokens=length)
    rows, recomputed = window.largest_batch, window.cheapest.largest_batch
    per_token = flops_per_token(model, length, model.parameters, recompute=not rows)
    speed, windows = place.speed(model, PRETRAIN), windows_per_update(model, tokens, padded(length))
    flops = windows * padded(length) * per_token
    update, per_second = shared_update(speed, flops, model.parameters, place.machine.backend, windows), None
    if update is not None:
        fed = speed.length if speed.step_seconds is not None else padded(length)
        per_second = update.rows * fed / update_seconds(update, place.ranks, place.link)
    seconds = tokens / per_second if per_second else None
    kwh = place.of_all("watts") * (seconds or 0) / JOULES_PER_KWH or None
    usd = place.of_all("usd_per_hour") * (seconds or 0) / HOUR_SECONDS or None
    return PretrainingEstimate(
        place, tokens, length, per_token * tokens, per_second, seconds, kwh, usd, speed.source,
        (window if rows else window.cheapest).needed_bytes, rows, recomputed,
        disk_bytes_of(model.parameters, keep_checkpoints),
    )  # fmt: skip


def _print_pretraining(
    console: Console, model: ModelFiles, estimate: PretrainingEstimate, tokens_per_parameter: float, now: datetime
) -> None:
    """Print all details for one place."""
    place = estimate.place
    on = f"{place.ranks} x {place.name}" if place.ranks > 1 else place.name
    title = f"{model.folder.name} from scratch, on {on} ({place.machine.backend})"
    console.print(title, style="italic")
    source = " (Hoffmann et al. 2022)" if tokens_per_parameter == TOKENS_PER_PARAMETER else ""
    checkpoints = f"{size(estimate.checkpoint_bytes)} of checkpoints (weights, two moments, the best weights)"
    power = f"at {place.of_all('watts'):g} W"
    price = f"at {place.of_all('usd_per_hour'):g} USD per hour"
    speed, duration = estimate.speed_source, "unknown"
    if estimate.seconds is not None:
        end = finish_text(now, estimate.seconds)
        duration = f"{duration_text(estimate.seconds)}, finished on {end} if it starts now and never pauses"
        again = "" if estimate.rows else ", blocks recomputed"
        speed = f"{estimate.tokens_per_second:,.0f} tokens a second{again} ({speed})"
    lines = {
        "parameters": f"{count_text(model.parameters)}; {model.num_layers} blocks of {model.hidden_size}",
        "tokens wanted": f"{count_text(estimate.tokens)}, {tokens_per_parameter:g} per parameter{source}",
        "operations": f"{estimate.flops:.2g}, 6 per weight and token, plus attention",
        "speed": speed,
        "duration": duration,
        "memory": _memory_text(estimate),
        "disk": f"{checkpoints}, {size(STORE_BYTES_PER_TOKEN * estimate.tokens)} of tokens",
        "energy": _known(estimate.kwh, "{:,.3g} kWh", power, "watts"),
        "cost": _known(estimate.usd, "{:,.0f} USD", price, "usd_per_hour"),
    }
    for name, text in lines.items():
        console.print(f"{name:<15} {text}", markup=False)
    _print_verdict(console, fits=estimate.fits)


def _memory_text(estimate: PretrainingEstimate) -> str:
    each, budget = " on each" if estimate.place.ranks > 1 else "", size(estimate.place.machine.memory_budget_bytes)
    one = f"{size(estimate.needed_bytes)}{each} of {budget} for a window of {estimate.length} tokens"
    if not estimate.fits:
        return f"{one}, blocks recomputed"
    return f"{one}; fit at a time: {_rows_text(estimate.rows)}, recomputed {_rows_text(estimate.rows_recomputed)}"


def _known(value: float | None, form: str, by: str, key: str) -> str:
    return f"unknown ({key}, tflops: see conf/machine)" if value is None else f"{form.format(value)}, assumed ({by})"


def _print_places(console: Console, model: ModelFiles, estimates: Sequence[PretrainingEstimate], now: datetime) -> None:
    """Print a line for each place."""
    first, place = estimates[0], estimates[0].place
    together = f", on {place.ranks} of each, linked at {place.link.gbps:g} Gbit/s" if place.ranks > 1 else ""
    console.print(
        f"{model.folder.name} from scratch: {count_text(model.parameters)} parameters, {count_text(first.tokens)} "
        f"tokens, windows of {first.length}; starting now{together}",
        style="italic",
    )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "windows that fit", "tokens/s", "duration", "finished on", "kWh", "USD"):
        table.add_column(name, justify="left" if name in ("machine", "finished on") else "right")
    for each in estimates:
        table.add_row(each.place.name, *_line(each, now))
    console.print(table)
    console.print(
        "Speeds are assumed (conf/machine: tflops, watts, usd_per_hour), so these are estimates; (r): blocks "
        f"recomputed; {UNKNOWN}: unknown, or it does not fit. {counted(len(estimates), 'machine')}.",
        style="dim",
    )  # fmt: skip


def _line(estimate: PretrainingEstimate, now: datetime) -> list[str]:
    if not estimate.fits:
        return ["none", *[UNKNOWN] * 5]
    fits = _rows_text(estimate.rows) if estimate.rows else f"{_rows_text(estimate.rows_recomputed)} (r)"
    if estimate.tokens_per_second is None or estimate.seconds is None:
        return [fits, *[UNKNOWN] * 5]
    when = [duration_text(estimate.seconds), finish_text(now, estimate.seconds)]
    kwh = UNKNOWN if estimate.kwh is None else f"{estimate.kwh:,.3g}"
    usd = UNKNOWN if estimate.usd is None else f"{estimate.usd:,.0f}"
    return [fits, f"{estimate.tokens_per_second:,.0f}", *when, kwh, usd]
