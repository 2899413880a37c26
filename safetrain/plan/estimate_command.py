"""The command `safetrain estimate`: where the questions of what ranks bring and of pretraining are put together."""

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from safetrain.core.errors import ConfigError
from safetrain.core.memory.terms import trained_parameters
from safetrain.core.model.files import ModelFiles
from safetrain.core.records.reports import Machine, read_machine
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.storage import paths
from safetrain.plan.hyperparameters import ROWS_PER_UPDATE
from safetrain.plan.pretraining_estimate import TrainingPlace, estimate_pretraining, model_to_pretrain
from safetrain.plan.pretraining_text import print_places, print_pretraining
from safetrain.plan.rank_text import print_ranks
from safetrain.plan.rank_times import Link, SharedUpdate, measured_update, modelled_update
from safetrain.plan.training_flops import flops_per_token
from safetrain.plan.training_speed import Speed, speed_here, speed_of_profile
from safetrain.plan.what_if import TrainingOptions, machine_of, profile_names, read_profile, with_memory

HERE = "this machine"
FLOAT32 = 4


@dataclass(frozen=True)
class Where:
    """The machine that is asked about: a name of conf/machine, None for this one; and how many, linked how."""

    name: str | None
    macos_26: bool
    memory_gb: float | None
    ranks: int | None
    link: Link

    @property
    def told(self) -> str:
        """What it is called."""
        return self.name or HERE

    def machine(self) -> Machine:
        """Raises ConfigError where it is not known."""
        found = (
            machine_of(read_profile(self.name), macos_26=self.macos_26) if self.name else read_machine(paths.MACHINE)
        )
        return with_memory(found, self.memory_gb) if self.memory_gb else found

    def speed(self, model: ModelFiles, machine: Machine, method: str) -> Speed:
        """How fast it trains."""
        return speed_of_profile(read_profile(self.name)) if self.name else speed_here(model, machine, method)


def tell_ranks(
    console: Console, where: Where, model: ModelFiles, machine: Machine, run: TrainingOptions, rows: int, tokens: int
) -> None:
    """What ``where.ranks`` bring to a fine-tuning, on updates of 16 rows of ``tokens``, or of ``rows`` where more."""
    trained = trained_parameters(model, run.lora, run.method)
    speed = where.speed(model, machine, run.method)
    shared = _update(model, machine, run, speed, trained, max(rows, ROWS_PER_UPDATE), tokens)
    print_ranks(console, shared, FLOAT32 * trained, where.ranks or 1, where.link, speed)


def _update(
    model: ModelFiles, machine: Machine, run: TrainingOptions, speed: Speed, trained: int, rows: int, tokens: int
) -> SharedUpdate | None:
    gradient = FLOAT32 * trained
    if speed.step_seconds is not None:
        return measured_update(speed.step_seconds, trained, machine.backend, speed.rows, gradient)
    if speed.tflops is None:
        return None
    flops = rows * tokens * flops_per_token(model, tokens, trained, recompute=run.checkpointing)
    return modelled_update(flops, speed.tflops, trained, machine.backend, rows, gradient)


def tell_pretraining(
    console: Console, name: str, where: Where, tokens_per_parameter: float, keep_checkpoints: int, *, everywhere: bool
) -> bool:
    """What pretraining takes, on one machine, or on all of conf/machine where this one is not known.

    Returns whether it fits.
    """
    model, now = model_to_pretrain(name), datetime.now().astimezone()
    if everywhere or (where.name is None and not where.memory_gb and not paths.MACHINE.is_file()):
        places = [_place_of(profile, where) for profile in profile_names()]
        if not places:
            raise ConfigError("There are no machines to ask about here.", do="go to the project's root, or --machine")
        told = [(each, estimate_pretraining(model, each, tokens_per_parameter, keep_checkpoints)) for each in places]
        print_places(console, model, told, now)
        return any(each.fits for _, each in told)
    place = _place(where, model)
    found = estimate_pretraining(model, place, tokens_per_parameter, keep_checkpoints)
    print_pretraining(console, model, place, found, tokens_per_parameter, now)
    return found.fits


def _place_of(name: str, where: Where) -> TrainingPlace:
    """A machine of conf/machine; as many of it as ``where`` says."""
    profile = read_profile(name)
    machine, speed = machine_of(profile, macos_26=where.macos_26), speed_of_profile(profile)
    return TrainingPlace(name, machine, speed, profile.watts, profile.usd_per_hour, where.ranks or 1, where.link)


def _place(where: Where, model: ModelFiles) -> TrainingPlace:
    machine = where.machine()
    if where.name is not None:
        return dataclasses.replace(_place_of(where.name, where), machine=machine)
    speed = where.speed(model, machine, PRETRAIN)
    return TrainingPlace(where.told, machine, speed, ranks=where.ranks or 1, link=where.link)


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
        raise ConfigError("A model is named twice.", got=str(model), do="name it by --pretrain alone")
    elif machine is not None and all_machines:
        raise ConfigError("One machine or all?", got=f"--machine {machine} --all-machines", do="leave one of them out")
