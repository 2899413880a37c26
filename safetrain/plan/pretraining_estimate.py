"""What pretraining a model would take on a machine, before there is either of them."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError
from safetrain.core.memory.terms import FLOAT32, padded
from safetrain.core.model.files import ModelFiles, model_of_config, read_model_plan
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import PRETRAIN
from safetrain.plan.creation.create import config_of
from safetrain.plan.creation.shapes import PRESETS, AskedShape, parameters_named, shape_for
from safetrain.plan.creation.tokenizers import OWN_IDS
from safetrain.plan.creation.weights import InitialWeights
from safetrain.plan.hyperparameters import tokens_per_update
from safetrain.plan.pretraining_plan import STORE_BYTES_PER_TOKEN, wanted_tokens
from safetrain.plan.rank_times import Link, SharedUpdate, measured_update, modelled_update, time_of
from safetrain.plan.recommend import disk_bytes_of
from safetrain.plan.training_flops import flops_per_token
from safetrain.plan.training_speed import Speed
from safetrain.plan.what_if import TrainingOptions, asked_run, estimate, largest_batch

MOST_CONTEXT = 2048  # tokens of a window, as recommend_config chooses
JOULES_PER_KWH, HOUR_SECONDS = 3.6e6, 3600


@dataclass(frozen=True)
class TrainingPlace:
    """A machine, how fast it is, and what an hour there costs; ranks: so many of them, linked."""

    name: str
    machine: Machine
    speed: Speed
    watts: float | None = None
    usd_per_hour: float | None = None
    ranks: int = 1
    link: Link | None = None


@dataclass(frozen=True)
class PretrainingEstimate:
    """What is known of it; None is what is not."""

    tokens: int
    length: int  # of a window
    flops: float  # of the whole training
    tokens_per_second: float | None
    seconds: float | None
    needed_bytes: int  # for one window at a time, in the way that fits, or that takes least
    rows: int  # windows that fit at a time with stored activations
    rows_recomputed: int
    checkpoint_bytes: int
    store_bytes: int
    kwh: float | None
    usd: float | None

    @property
    def fits(self) -> bool:
        """Whether one window does, at the least."""
        return bool(self.rows or self.rows_recomputed)

    @property
    def recomputes(self) -> bool:
        """Whether it fits only so."""
        return not self.rows


def model_to_pretrain(name: str) -> ModelFiles:
    """A folder or config.json, or a size as 400m, with the shape that `safetrain create` gives it.

    Raises ConfigError for a name that is neither, ModelError for a folder that is no model.
    """
    if Path(name).exists():
        return read_model_plan(Path(name))
    parameters = parameters_named(name)
    if parameters is None:
        raise ConfigError(
            "There is no such model to pretrain.",
            where="--pretrain",
            expected=f"{', '.join(PRESETS)}, another size as 30m, or a model's folder",
            got=name,
        )
    shape = shape_for(AskedShape(parameters=parameters))
    return model_of_config(config_of(shape, OWN_IDS, InitialWeights(shape.hidden, shape.layers, 0)), Path(name))


def estimate_pretraining(
    model: ModelFiles, place: TrainingPlace, tokens_per_parameter: float, keep_checkpoints: int
) -> PretrainingEstimate:
    """Tokens, operations, memory, time, disk, energy and cost; raises ConfigError for a quantized model."""
    length = min(model.max_positions or MOST_CONTEXT, MOST_CONTEXT)
    tokens = wanted_tokens(model.parameters, tokens_per_parameter)
    kept, recomputed = (_run(model, place.machine, recompute=recompute) for recompute in (False, True))
    rows, rows_recomputed = (largest_batch(model, place.machine, run, length) for run in (kept, recomputed))
    run = kept if rows else recomputed
    per_token = flops_per_token(model, length, model.parameters, recompute=not rows)
    speed = _tokens_per_second(model, place, tokens, length, per_token)
    seconds = tokens / speed if speed else None
    return PretrainingEstimate(
        tokens, length, per_token * tokens, speed, seconds,
        estimate(model, place.machine, run, 1, length).needed_bytes, rows, rows_recomputed,
        disk_bytes_of(model.parameters, keep_checkpoints), STORE_BYTES_PER_TOKEN * tokens,
        None if place.watts is None or seconds is None else place.ranks * place.watts * seconds / JOULES_PER_KWH,
        None if place.usd_per_hour is None or seconds is None
        else place.ranks * place.usd_per_hour * seconds / HOUR_SECONDS,
    )  # fmt: skip


def _run(model: ModelFiles, machine: Machine, *, recompute: bool) -> TrainingOptions:
    run = asked_run(model, machine.backend, PRETRAIN, 1, recompute=recompute)
    return dataclasses.replace(run, dequantize=False)


def _tokens_per_second(
    model: ModelFiles, place: TrainingPlace, tokens: int, length: int, per_token: float
) -> float | None:
    """Of all ranks together."""
    shared = shared_update(model, place, tokens, padded(length), per_token)
    if shared is None:
        return None
    update, update_tokens = shared
    if place.ranks == 1 or place.link is None:
        return update_tokens / (update.compute_seconds + update.fixed_seconds)
    return update_tokens / time_of(update, place.ranks, place.link).seconds


def shared_update(
    model: ModelFiles, place: TrainingPlace, tokens: int, length: int, per_token: float
) -> tuple[SharedUpdate, int] | None:
    """An update of a pretraining of ``tokens``, and its own; None where nothing is known of the machine's speed."""
    speed, trained, backend = place.speed, model.parameters, place.machine.backend
    gradient = FLOAT32 * trained
    if speed.step_seconds is not None:
        return measured_update(speed.step_seconds, trained, backend, speed.rows, gradient), speed.rows * speed.length
    if speed.tflops is None:
        return None
    rows = 2 ** max(0, round(math.log2(tokens_per_update(trained, tokens) / length)))  # as recommend_config plans
    update = modelled_update(rows * length * per_token, speed.tflops, trained, backend, rows, gradient)
    return update, rows * length
