"""`safetrain estimate`: memory and time of a training run, here or on a described machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from safetrain.core.errors import ModelError
from safetrain.core.formatting import override
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.estimate import MARGIN, read_bytes, require_trainable, with_margin
from safetrain.core.memory.terms import trained_parameters
from safetrain.core.model.files import ModelFiles, model_of_config, read_model_plan
from safetrain.core.model.shapes import FAMILIES, OWN_IDS, PRESETS, config_of
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import WHOLE
from safetrain.core.records.settings import ALL_LINEAR, MEMORY_ONLY, SMALLEST, LoraSettings
from safetrain.plan.candidates import ROWS_PER_UPDATE, Estimate, seconds_of, usual_dtype, what_would_fit
from safetrain.plan.hub import fetched_config

HUB = "hub:"  # before a Hub ID
DISK_BYTES_PER_SECOND = 2.5e9  # assumed for an internal SSD


def estimate_of(
    model: ModelFiles, machine: Machine, rank: int = 16, layers: int | None = None, **changes: Any
) -> Estimate:
    """The estimate for a training run; a CPU dequantizes the base. ``changes``: to SMALLEST.

    Raises ConfigError for a method that cannot train this model.
    """
    lora = LoraSettings(rank, 2.0, 0.0, min(layers or model.num_layers, model.num_layers), (ALL_LINEAR,))
    is_quantized = model.quantization_bits is not None
    usual = {"lora": lora, "compute_dtype": usual_dtype(machine, model)}
    settings = replace(SMALLEST, dequantize_base=machine.backend == "cpu" and is_quantized, **(usual | changes))
    require_trainable(settings.method, quantized=is_quantized)
    return Estimate(model, settings, machine.backend, machine=machine)


def print_estimate(console: Console, run: Estimate, name: str) -> bool:
    """Print a run's memory term by term and, if it does not fit, changes that would. Returns whether the run fits."""
    _print_model(console, run)
    _require_known(run)
    run, note = as_planned(run)
    settings = run.settings
    rank = f" rank {settings.lora.rank}" if settings.method not in WHOLE else ""
    shape = f"{settings.batch_size} x {settings.max_seq_length} tokens"
    here = f"{name} ({run.machine.backend}, budget {size(run.machine.memory_budget_bytes)})"
    # rich would wrap a table's own title at the table's width
    console.print(f"\n{shape}, {settings.method}{rank}{note}, on {here}", style="italic")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    sizes = {
        **run.terms,
        "predicted peak of mlx": run.peak_bytes,
        f"margin, {100 * (MARGIN - 1):.0f} % of the estimate": with_margin(run.terms) - run.peak_bytes,
        "Python and libraries": run.machine.process_memory_bytes,
        "needed": run.needed_bytes,
        "budget": run.machine.memory_budget_bytes,
    }
    for name, size_bytes in sizes.items():
        table.add_row(name, size(size_bytes), style="bold" if name in ("predicted peak of mlx", "needed") else None)
    console.print(table)
    verdict = "it fits" if run.fits else "it may fit: a dry run decides" if run.may_fit else "it does not fit"
    console.print(verdict, style="bold red" if not run.may_fit else "bold green" if run.fits else "bold yellow")
    if settings.stream_base:
        step, speed = read_bytes(run, run.micro_batch), DISK_BYTES_PER_SECOND
        reading = f"{step / speed:.0f} s at {speed / 1e9:g} GB/s, mostly overlapped with computation"
        console.print(f"a step of {ROWS_PER_UPDATE} rows reads {size(step)}: {reading}")
    if not run.fits:
        console.print(f"do: {', or '.join(what_would_fit(run))}")
    if run.machine.backend != "cpu":
        console.print("(closed form; its terms for GPUs are derived, not measured)", style="dim")
    return run.may_fit


def facts_of(run: Estimate) -> dict[str, Any]:
    """The same for programs."""
    _require_known(run)
    run, _ = as_planned(run)
    return {
        "fits": run.fits,
        "may_fit": run.may_fit,
        "needed_bytes": run.needed_bytes,
        "budget_bytes": run.machine.memory_budget_bytes,
        "predicted_peak_bytes": run.peak_bytes,
        "memory_terms": run.terms,
        "settings": {name: getattr(run.settings, name) for name in MEMORY_ONLY},
        "step_seconds": _step_seconds(run),
        "would_fit": [] if run.fits else what_would_fit(run),
    }


def _step_seconds(run: Estimate) -> float | None:
    """Seconds of a step of ROWS_PER_UPDATE full rows, at the speed of a large matrix product; None if it is unknown."""
    if not run.machine.gemm_gflops:
        return None
    rows = run.but(batch_size=ROWS_PER_UPDATE).micro_batch.tokens
    reading = read_bytes(run, run.micro_batch) / DISK_BYTES_PER_SECOND if run.settings.stream_base else 0.0
    return round(max(reading, seconds_of(run, rows)), 3)


def _require_known(run: Estimate) -> None:
    if run.model.model_type not in FAMILIES:
        raise ModelError(
            f"The architecture {run.model.model_type} is unknown: its memory cannot be estimated.",
            got=f"weights of {size(run.model.static_bytes)}",
            do=f"safetrain preflight preflight.level=certify {override('model.path', run.model.folder)}, "
            "which makes a dry run",
        )


def as_planned(run: Estimate) -> tuple[Estimate, str]:
    """The first way that fits of those that recommend_config tries, else the smallest that may; and what it changes."""
    quantized, recomputed = {"dequantize_base": False}, {"gradient_checkpointing": True}
    ways = [
        (run, ""),
        (run.but(**quantized), ", base left quantized (dequantized, it does not fit)"),
        (run.but(**recomputed), ", blocks recomputed (else it does not fit)"),
        (run.cheapest, ", base left quantized and blocks recomputed (else it does not fit)"),
    ]
    streamed = run.cheapest.but(stream_base=True), ", base on disk (in memory, it does not fit)"
    on_disk = [] if run.settings.method in WHOLE else [streamed]
    fitting = [way for way in [*ways, *on_disk] if way[0].fits]
    return next(iter([*fitting, *(way for way in (*reversed(ways), *on_disk) if way[0].may_fit), ways[0]]))


def _print_model(console: Console, run: Estimate) -> None:
    model = run.model
    bits = f"{model.quantization_bits} bits" if model.quantization_bits else "not quantized"
    weights = f"{model.parameters / 1e6:,.1f}M parameters, {bits}, {size(model.static_bytes)} of weights"
    blocks = f"{model.num_layers} blocks of width {model.hidden_size}"
    console.print(f"{model.model_type}: {weights}, {blocks}; {trained_parameters(run) / 1e6:.1f}M trained")


def model_to_estimate(name: Path) -> ModelFiles:
    """The model of a folder or config.json, of ``hub:OWNER/NAME``, or one that model.create makes from a preset.

    Of a model on the Hub, only config.json is fetched. Raises ModelError for any other name.
    """
    if str(name).startswith(HUB):
        return model_of_config(fetched_config(str(name).removeprefix(HUB)), name)
    if str(name) in PRESETS and not name.exists():
        return model_of_config(config_of(PRESETS[str(name)], OWN_IDS), name)
    return read_model_plan(name)
