"""What `safetrain estimate --pretrain` prints."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from safetrain.core.formatting import counted, duration_text
from safetrain.core.formatting import size_text as size
from safetrain.core.model.files import ModelFiles
from safetrain.plan.estimate_text import rows_text
from safetrain.plan.pretraining_estimate import PretrainingEstimate, TrainingPlace
from safetrain.plan.pretraining_plan import count_text, finish_text

UNKNOWN = "-"


def print_pretraining(
    console: Console, model: ModelFiles, place: TrainingPlace, found: PretrainingEstimate, tokens_per_parameter: float,
    now: datetime,
) -> None:  # fmt: skip
    """All of it, for one machine."""
    machine = place.machine
    on = f"{place.ranks} x {place.name}" if place.ranks > 1 else place.name
    console.print(f"{model.folder.name} from scratch, on {on} ({machine.backend})", style="italic", highlight=False)
    wanted = f"{tokens_per_parameter:g} a parameter"
    wanted += " (Hoffmann et al. 2022)" if tokens_per_parameter == 20 else ""
    disk = f"{size(found.checkpoint_bytes)} of checkpoints (weights, two moments, the best), "
    power = f"at {(place.watts or 0) * place.ranks:g} W"
    price = f"at {(place.usd_per_hour or 0) * place.ranks:g} USD an hour"
    lines = {
        "parameters": f"{count_text(model.parameters)}; {model.num_layers} blocks of {model.hidden_size}",
        "tokens wanted": f"{count_text(found.tokens)}, {wanted}",
        "operations": f"{found.flops:.2g}, 6 for each weight and token, and attention",
        "speed": _speed_text(found, place),
        "duration": _duration_text(found, now),
        "memory": _memory_text(found, place),
        "disk": disk + f"{size(found.store_bytes)} of tokens",
        "energy": _known(found.kwh, "{:,.3g} kWh", power, "watts"),
        "cost": _known(found.usd, "{:,.0f} USD", price, "usd_per_hour"),
    }
    for name, text in lines.items():
        console.print(f"{name:<15} {text}", highlight=False, markup=False)
    console.print("it fits" if found.fits else "it does not fit", style="bold green" if found.fits else "bold red")


def _speed_text(found: PretrainingEstimate, place: TrainingPlace) -> str:
    if found.tokens_per_second is None:
        return place.speed.source
    again = ", blocks recomputed" if found.recomputes else ""
    return f"{found.tokens_per_second:,.0f} tokens a second{again} ({place.speed.source})"


def _duration_text(found: PretrainingEstimate, now: datetime) -> str:
    if found.seconds is None:
        return "not known"
    end = finish_text(now, found.seconds)
    return f"{duration_text(found.seconds)}, finished on {end} if it begins now and never pauses"


def _memory_text(found: PretrainingEstimate, place: TrainingPlace) -> str:
    each = " on each" if place.ranks > 1 else ""
    one = (
        f"{size(found.needed_bytes)}{each} of {size(place.machine.memory_budget_bytes)} for a window of {found.length}"
    )
    if not found.fits:
        return f"{one} tokens, blocks recomputed"
    return f"{one} tokens; fit at a time: {rows_text(found.rows)}, recomputed {rows_text(found.rows_recomputed)}"


def _known(value: float | None, form: str, by: str, key: str) -> str:
    return f"not known ({key} and tflops in conf/machine)" if value is None else f"{form.format(value)}, assumed ({by})"


def print_places(
    console: Console, model: ModelFiles, found: Sequence[tuple[TrainingPlace, PretrainingEstimate]], now: datetime
) -> None:
    """A line for each machine."""
    first = found[0][1]
    console.print(
        f"{model.folder.name} from scratch: {count_text(model.parameters)} parameters, {count_text(first.tokens)} "
        f"tokens, windows of {first.length}; begun now{_together(found[0][0])}",
        style="italic", highlight=False,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "windows that fit", "tokens/s", "duration", "finished on", "kWh", "USD"):
        table.add_column(name, justify="left" if name in ("machine", "finished on") else "right")
    for place, each in found:
        table.add_row(place.name, *_line(each, now))
    console.print(table)
    console.print(
        "Speeds are assumed (conf/machine: tflops, watts, usd_per_hour), and so is what follows from them; (r): blocks "
        f"recomputed; {UNKNOWN}: not known, or it does not fit. {counted(len(found), 'machine')}.",
        style="dim", highlight=False,
    )  # fmt: skip


def _together(place: TrainingPlace) -> str:
    return "" if place.ranks == 1 or place.link is None else f", on {place.ranks} of it at {place.link.gbps:g} Gbit/s"


def _line(each: PretrainingEstimate, now: datetime) -> list[str]:
    if not each.fits:
        return ["none", *[UNKNOWN] * 5]
    fits = f"{rows_text(each.rows_recomputed)} (r)" if each.recomputes else rows_text(each.rows)
    if each.tokens_per_second is None or each.seconds is None:
        return [fits, *[UNKNOWN] * 5]
    return [
        fits,
        f"{each.tokens_per_second:,.0f}",
        duration_text(each.seconds),
        finish_text(now, each.seconds),
        UNKNOWN if each.kwh is None else f"{each.kwh:,.3g}",
        UNKNOWN if each.usd is None else f"{each.usd:,.0f}",
    ]
