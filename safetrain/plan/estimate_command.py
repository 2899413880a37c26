"""The rest of `safetrain estimate`: what ranks bring, and what pretraining takes on one machine or on all."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, duration_text
from safetrain.core.formatting import size_text as size
from safetrain.core.memory.terms import FLOAT32, padded, trained_parameters
from safetrain.core.model.files import ModelFiles, model_of_config, read_model_plan
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.storage import paths
from safetrain.plan.creation.create import InitialWeights, config_of
from safetrain.plan.creation.shapes import PRESETS, AskedShape, parameters_named, shape_for
from safetrain.plan.creation.tokenizers import OWN_IDS
from safetrain.plan.estimate import (
    TrainingOptions,
    asked_run,
    estimate,
    largest_batch,
    print_verdict,
    rows_text,
    titled_table,
)
from safetrain.plan.hyperparameters import ROWS_PER_UPDATE
from safetrain.plan.machines import TrainingPlace, Where, profile_names
from safetrain.plan.pretraining import count_text, finish_text, wanted_tokens
from safetrain.plan.recommend import disk_bytes_of, window_length, windows_per_update
from safetrain.plan.speed import (
    LEAST_GAIN,
    SharedUpdate,
    flops_per_token,
    most_that_pay,
    shared_update,
    time_of,
    wire_bytes,
)

STORE_BYTES_PER_TOKEN = 5  # an id of 32 bits, and whether it is a label (core/data/store.py)
JOULES_PER_KWH, HOUR_SECONDS = 3.6e6, 3600
UNKNOWN = "-"


@dataclass(frozen=True)
class PretrainingEstimate:
    """What pretraining a model would take on a machine; None is what is not known."""

    tokens: int
    length: int  # of a window
    flops: float  # of the whole training
    tokens_per_second: float | None  # of all ranks together
    needed_bytes: int  # for one window at a time, in the way that fits, or that takes least
    rows: int  # windows that fit at a time with stored activations
    rows_recomputed: int
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        """Whether one window does, at the least."""
        return bool(self.rows or self.rows_recomputed)

    @property
    def seconds(self) -> float | None:
        """Time of the whole training."""
        return self.tokens / self.tokens_per_second if self.tokens_per_second else None

    def kwh(self, place: TrainingPlace) -> float | None:
        """Energy of all ranks."""
        return place.ranks * place.watts * self.seconds / JOULES_PER_KWH if place.watts and self.seconds else None

    def usd(self, place: TrainingPlace) -> float | None:
        """Cost of all ranks."""
        price = place.usd_per_hour
        return place.ranks * price * self.seconds / HOUR_SECONDS if price and self.seconds else None


def refuse_contradictions(
    model: Path | None, machine: str | None, pretrain: str | None, tokens_per_parameter: float | None, *,
    all_machines: bool,
) -> None:  # fmt: skip
    """Raise ConfigError where options of pretraining stand without it, or something is named twice."""
    if pretrain is None:
        alone = "--all-machines" if all_machines else "--tokens-per-parameter" if tokens_per_parameter else ""
        if alone:
            raise ConfigError(f"{alone} is about pretraining.", do="add --pretrain, as --pretrain 85m")
    elif model is not None:
        raise ConfigError("A model is named twice.", got=str(model), do="name it only by --pretrain")
    elif machine is not None and all_machines:
        raise ConfigError("One machine or all?", got=f"--machine {machine} --all-machines", do="leave one of them out")


def tell_ranks(
    console: Console, place: TrainingPlace, model: ModelFiles, run: TrainingOptions, rows: int, tokens: int
) -> None:
    """The gain of the ranks of ``place`` for fine-tuning with updates of 16 rows of ``tokens``, or of more ``rows``."""
    trained, rows = trained_parameters(model, run.lora, run.method), max(rows, ROWS_PER_UPDATE)
    flops = rows * tokens * flops_per_token(model, tokens, trained, recompute=run.checkpointing)
    update = shared_update(place.speed, flops, trained, place.machine.backend, rows)
    gradient, ranks, link = FLOAT32 * trained, place.ranks, place.link
    here = f"{link.gbps:g} Gbit/s, {1e6 * link.latency_seconds:g} us a message"
    table = titled_table(
        console, f"an update shared by ranks, linked by {here} (modelled)",
        ("ranks", "each sends, an update", "exchange, s", "update, s", "speed-up"),
    )  # fmt: skip
    each = "Each rank has a machine like this to itself, and all weights: it needs the memory above; its gradient has "
    each += f"{size(gradient)}."
    if update is None:
        traffic = size(wire_bytes(gradient, ranks))
        console.print(f"{each} With {ranks} ranks each sends and receives {traffic} an update.", highlight=False)
        console.print(f"time: {place.speed.source}", highlight=False)
        return
    for count in sorted({2**power for power in range(ranks.bit_length())} | {ranks}):
        time = time_of(update, count, link)
        table.add_row(
            str(count), size(time.wire_bytes), f"{time.exchange_seconds:.3g}", f"{time.seconds:.3g}",
            f"{time.speed_up:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{each} Alone: {place.speed.source}.", highlight=False)
    console.print(_pay_text(update, most_that_pay(update, link)), highlight=False)


def _pay_text(update: SharedUpdate, paying: int) -> str:
    if paying == 1:
        return f"A second rank does not pay: it brings less than {LEAST_GAIN:g} of one rank's speed."
    why = f"an update has {update.rows} rows" if paying == update.rows else "then the rest of an update weighs more"
    return f"Up to {paying} ranks pay: those added bring on average {LEAST_GAIN:g} or more of one rank's speed; {why}."


def tell_pretraining(
    console: Console, name: str, where: Where, tokens_per_parameter: float, keep_checkpoints: int, *, everywhere: bool
) -> bool:
    """What pretraining takes, on one machine, or on all of conf/machine where this one is not known.

    Returns whether it fits.
    """
    model, now = model_to_pretrain(name), datetime.now().astimezone()
    if everywhere or (where.name is None and not where.memory_gb and not paths.MACHINE.is_file()):
        wheres = [dataclasses.replace(where, name=each, memory_gb=None) for each in profile_names()]
        if not wheres:
            raise ConfigError("No machines found.", do="go to the project's root, or --machine")
    else:
        wheres = [where]
    places = [each.place(model, PRETRAIN) for each in wheres]
    told = [(each, estimate_pretraining(model, each, tokens_per_parameter, keep_checkpoints)) for each in places]
    if len(told) > 1:
        _print_places(console, model, told, now)
    else:
        _print_pretraining(console, model, *told[0], tokens_per_parameter, now)
    return any(each.fits for _, each in told)


def model_to_pretrain(name: str) -> ModelFiles:
    """A folder or config.json, or a size as 400m, with the shape that `safetrain create` gives it.

    Raises ConfigError for a name that is neither, ModelError for a folder without a model.
    """
    if Path(name).exists():
        return read_model_plan(Path(name))
    parameters = parameters_named(name)
    if parameters is None:
        raise ConfigError(
            "Unknown model to pretrain.",
            where="--pretrain",
            expected=f"{', '.join(PRESETS)}, another size as 30m, or a model's folder",
            got=name,
        )
    shape = shape_for(AskedShape(parameters=parameters))
    return model_of_config(config_of(shape, OWN_IDS, InitialWeights(shape.hidden, shape.layers, 0)), Path(name))


def estimate_pretraining(
    model: ModelFiles, place: TrainingPlace, tokens_per_parameter: float, keep_checkpoints: int
) -> PretrainingEstimate:
    """Tokens, operations, memory, time and disk; raises ConfigError for a quantized model."""
    length, tokens = window_length(model), wanted_tokens(model.parameters, tokens_per_parameter)
    run = asked_run(model, place.machine.backend, PRETRAIN, 1, recompute=False)
    rows, recomputed = (largest_batch(model, place.machine, each, length) for each in (run, run.cheapest))
    per_token = flops_per_token(model, length, model.parameters, recompute=not rows)
    return PretrainingEstimate(
        tokens, length, per_token * tokens, _tokens_per_second(model, place, tokens, padded(length), per_token),
        estimate(model, place.machine, run if rows else run.cheapest, 1, length).needed_bytes, rows, recomputed,
        disk_bytes_of(model.parameters, keep_checkpoints),
    )  # fmt: skip


def _tokens_per_second(
    model: ModelFiles, place: TrainingPlace, tokens: int, length: int, per_token: float
) -> float | None:
    """Tokens per second of all ranks together."""
    rows, measured = windows_per_update(model, tokens, length), place.speed.step_seconds is not None
    flops = rows * length * per_token
    update = shared_update(place.speed, flops, model.parameters, place.machine.backend, rows)
    if update is None:
        return None
    seconds = update.compute_seconds + update.fixed_seconds
    seconds = seconds if place.ranks == 1 else time_of(update, place.ranks, place.link).seconds
    return update.rows * (place.speed.length if measured else length) / seconds


def _print_pretraining(
    console: Console, model: ModelFiles, place: TrainingPlace, found: PretrainingEstimate, tokens_per_parameter: float,
    now: datetime,
) -> None:  # fmt: skip
    """All of it, for one machine."""
    on = f"{place.ranks} x {place.name}" if place.ranks > 1 else place.name
    backend = place.machine.backend
    console.print(f"{model.folder.name} from scratch, on {on} ({backend})", style="italic", highlight=False)
    source = " (Hoffmann et al. 2022)" if tokens_per_parameter == 20 else ""
    checkpoints = f"{size(found.checkpoint_bytes)} of checkpoints (weights, two moments, the best)"
    power = f"at {(place.watts or 0) * place.ranks:g} W"
    price = f"at {(place.usd_per_hour or 0) * place.ranks:g} USD an hour"
    speed, duration = place.speed.source, "not known"
    if found.seconds is not None:
        end = finish_text(now, found.seconds)
        duration = f"{duration_text(found.seconds)}, finished on {end} if it begins now and never pauses"
        again = "" if found.rows else ", blocks recomputed"
        speed = f"{found.tokens_per_second:,.0f} tokens a second{again} ({speed})"
    lines = {
        "parameters": f"{count_text(model.parameters)}; {model.num_layers} blocks of {model.hidden_size}",
        "tokens wanted": f"{count_text(found.tokens)}, {tokens_per_parameter:g} a parameter{source}",
        "operations": f"{found.flops:.2g}, 6 for each weight and token, and attention",
        "speed": speed,
        "duration": duration,
        "memory": _memory_text(found, place),
        "disk": f"{checkpoints}, {size(STORE_BYTES_PER_TOKEN * found.tokens)} of tokens",
        "energy": _known(found.kwh(place), "{:,.3g} kWh", power, "watts"),
        "cost": _known(found.usd(place), "{:,.0f} USD", price, "usd_per_hour"),
    }
    for name, text in lines.items():
        console.print(f"{name:<15} {text}", highlight=False, markup=False)
    print_verdict(console, fits=found.fits)


def _memory_text(found: PretrainingEstimate, place: TrainingPlace) -> str:
    each, budget = " on each" if place.ranks > 1 else "", size(place.machine.memory_budget_bytes)
    one = f"{size(found.needed_bytes)}{each} of {budget} for a window of {found.length} tokens"
    if not found.fits:
        return f"{one}, blocks recomputed"
    return f"{one}; fit at a time: {rows_text(found.rows)}, recomputed {rows_text(found.rows_recomputed)}"


def _known(value: float | None, form: str, by: str, key: str) -> str:
    return f"not known ({key} and tflops in conf/machine)" if value is None else f"{form.format(value)}, assumed ({by})"


def _print_places(
    console: Console, model: ModelFiles, found: Sequence[tuple[TrainingPlace, PretrainingEstimate]], now: datetime
) -> None:
    """A line for each machine."""
    place, first = found[0]
    together = f", on {place.ranks} of it at {place.link.gbps:g} Gbit/s" if place.ranks > 1 else ""
    console.print(
        f"{model.folder.name} from scratch: {count_text(model.parameters)} parameters, {count_text(first.tokens)} "
        f"tokens, windows of {first.length}; begun now{together}",
        style="italic", highlight=False,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "windows that fit", "tokens/s", "duration", "finished on", "kWh", "USD"):
        table.add_column(name, justify="left" if name in ("machine", "finished on") else "right")
    for each, estimated in found:
        table.add_row(each.name, *_line(each, estimated, now))
    console.print(table)
    console.print(
        "Speeds are assumed (conf/machine: tflops, watts, usd_per_hour), and so is what follows from them; (r): blocks "
        f"recomputed; {UNKNOWN}: not known, or it does not fit. {counted(len(found), 'machine')}.",
        style="dim", highlight=False,
    )  # fmt: skip


def _line(place: TrainingPlace, each: PretrainingEstimate, now: datetime) -> list[str]:
    if not each.fits:
        return ["none", *[UNKNOWN] * 5]
    fits = rows_text(each.rows) if each.rows else f"{rows_text(each.rows_recomputed)} (r)"
    if each.tokens_per_second is None or each.seconds is None:
        return [fits, *[UNKNOWN] * 5]
    kwh, usd = each.kwh(place), each.usd(place)
    return [
        fits,
        f"{each.tokens_per_second:,.0f}",
        duration_text(each.seconds),
        finish_text(now, each.seconds),
        UNKNOWN if kwh is None else f"{kwh:,.3g}",
        UNKNOWN if usd is None else f"{usd:,.0f}",
    ]
