"""Runs the checks before a training, each after those that it needs; plan/preflight.py has the checks themselves."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError, SafetrainError
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.model.shapes import is_known
from safetrain.core.records.reports import DataReport, Machine, read_data_report, require_data_of
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.schema import PRETRAIN, Lora, Train
from safetrain.core.storage import paths
from safetrain.plan import preflight
from safetrain.plan.checks import FAIL, Check, PreflightReport, skipped, summarise
from safetrain.plan.dry_run import DryRunner
from safetrain.plan.hosts import host_checks, is_shared, room_checks
from safetrain.plan.machine import ask_engine, read_machine_now, settle
from safetrain.plan.recommend import default_disk_bytes
from safetrain.plan.search import PlanInputs, machine_text, plan_run


@dataclass(frozen=True)
class Asked:
    """What is checked, how thoroughly, and by which modules of the engine."""

    model: Path
    data: str
    train: Train
    lora: Lora
    level: str
    probe: str
    dry_run: str
    say: Callable[[str], None]
    tracker: str | None = None


@dataclass(frozen=True)
class Examined:
    """What was found; no machine where mlx does not work."""

    checks: list[Check]
    machine: Machine | None


def examine(asked: Asked, before: Machine | None) -> Examined:
    """Every check of the level; ``before`` is the machine as it was last found."""
    train, checks = asked.train, preflight.software_checks()
    model, model_found = _model(asked)
    probe, why_not = ask_engine(asked.probe, model, asked.level, own_limit_bytes(train.memory_limit_gb))
    data, rows, data_found = _data(asked, model)
    last = [*model_found, *data_found, *preflight.environment_checks(model.static_bytes if model else 0)]
    last += [_disk(asked, data, model), preflight.previous_run_check(paths.OUTPUT, _identity(asked, model, rows))]
    hosts_found, hosts = host_checks(train, asked.model) if is_shared(train) else ([], None)
    last += [*hosts_found, *preflight.tracker_checks(asked.tracker)]
    if probe is None:
        checks.append(Check("HW-GPU", "backend", FAIL, True, f"mlx does not work here: {why_not}", "mlx starts",
                            f"python -m {asked.probe}", "run 'make clean && make'"))  # fmt: skip
        open_questions = ("HW-RAM", "MODEL-LOAD", "MODEL-TRAIN", "MEM-STATIC", "MEM-FIT")
        return Examined([*checks, *last, *preflight.not_checked(open_questions, "mlx does not work")], None)
    machine = settle(read_machine_now(probe), before)
    checks += [*preflight.engine_checks(machine, probe), *last]
    if model is None:
        checks += preflight.not_checked(("MODEL-LOAD", "MODEL-TRAIN", "MEM-FIT"), "there is no whole model")
        return Examined(checks, machine)
    trains, static = preflight.train_check(model, probe), preflight.static_check(model, machine)
    checks += [preflight.load_check(probe, asked.level), trains, static]
    if data is None or rows is None or FAIL in (trains.status, static.status):
        why = "there are no data" if data is None else "the weights do not fit, or cannot be trained"
        return Examined([*checks, skipped("MEM-FIT", "training fits", why, critical=trains.status != FAIL)], machine)
    inputs = PlanInputs(data, machine, model, rows)
    checks.append(_fit(asked, inputs))
    try:
        checks += room_checks(hosts, inputs, train, asked.lora) if hosts and is_known(model.model_type) else []
    except ConfigError as error:
        checks.append(_from_error("RANKS-ROOM", "memory for ranks", error))
    return Examined(checks, machine)


def report_of(found: Examined, checks: list[Check], level: str, seconds: float, *, strict: bool) -> PreflightReport:
    """The verdicts with today's readings; ``checks``: those found, some of them downgraded by a person."""
    memory, folder = psutil.virtual_memory(), paths.OUTPUT if paths.OUTPUT.is_dir() else Path()
    total = found.machine.total_memory_bytes if found.machine else memory.total
    return summarise(checks, level, seconds, memory.available, total, shutil.disk_usage(folder).free, strict=strict)


def _model(asked: Asked) -> tuple[ModelFiles | None, list[Check]]:
    """The model's files; a failed check where they are not whole."""
    try:
        model = read_model_files(asked.model)
    except ModelError as error:
        return None, [_from_error("MODEL-FILES", "model complete", error)]
    return model, preflight.model_checks(model, asked.level)


def _data(asked: Asked, model: ModelFiles | None) -> tuple[DataReport | None, TrainingRows | None, list[Check]]:
    """What validate_data has found, and the rows; a failed check where it has not run or found no rows."""
    try:
        data = read_data_report(paths.DATA_REPORT)
        require_data_of(data, asked.data)
        rows = load_training_rows(model.folder, asked.train.max_examples) if model else None
    except (ConfigError, DataError) as error:
        return None, None, [_from_error("DATA-FILES", "data", error)]
    limits = [asked.train.max_seq_length, model.max_positions if model else None]
    if asked.train.method == PRETRAIN:  # windows cut nothing off
        limits = []
    return data, rows, preflight.data_checks(data, min((limit for limit in limits if limit), default=None))


def _identity(asked: Asked, model: ModelFiles | None, rows: TrainingRows | None) -> RunIdentity | None:
    """Of the training that is planned; None where it starts over anyway, or it is not known."""
    if model is None or rows is None or asked.train.restart:
        return None
    return RunIdentity(model.fingerprint, rows.train_digest, rows.valid_digest, "")


def _disk(asked: Asked, data: DataReport | None, model: ModelFiles | None) -> Check:
    """Room for what a training with these settings writes."""
    if data is None or model is None:
        return skipped("DISK-FREE", "disk", "what is needed depends on data and model", critical=True)
    try:
        needed = default_disk_bytes(data, model, asked.train, asked.lora)
    except ConfigError as error:
        return _from_error("DISK-FREE", "disk", error)
    return preflight.disk_check(paths.OUTPUT, needed)


def _fit(asked: Asked, inputs: PlanInputs) -> Check:
    """Whether the training that recommend_config plans fits: by a dry run that is remembered, or made at certify."""
    measured = asked.level == "certify"
    if not is_known(inputs.model.model_type) and not measured:
        return skipped("MEM-FIT", "training fits", "of an unknown architecture a dry run decides: recommend_config")
    runner = DryRunner(asked.dry_run if measured else "", machine_text(inputs.machine), asked.say)
    try:
        plan = plan_run(inputs, asked.train, asked.lora, runner)
    except (ConfigError, DataError, ModelError, MachineError) as error:
        return _from_error("MEM-FIT", "training fits", error)
    return preflight.fit_check(plan, oversize=asked.train.oversize, by_dry_run=measured)


def _from_error(identifier: str, name: str, error: SafetrainError) -> Check:
    """A failed check that says what the error says."""
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, name, FAIL, True, "; ".join(parts), error.expected, "", error.do)
