"""Runs the checks before a training, each after those that it needs; plan/preflight.py has the checks themselves."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError, SafetrainError
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.model.shapes import is_known
from safetrain.core.records.hostfile import Hosts
from safetrain.core.records.reports import DataReport, Machine, read_data_report, require_data_of
from safetrain.core.records.run_state import RunIdentity
from safetrain.core.records.schema import PRETRAIN, Lora, Pipeline, Train
from safetrain.core.storage import paths
from safetrain.plan import preflight
from safetrain.plan.checks import FAIL, Check, skipped
from safetrain.plan.dry_run import DryRunner
from safetrain.plan.hosts import host_checks, is_shared, room_checks
from safetrain.plan.machine import ask_engine, read_machine_now, settle
from safetrain.plan.recommend import default_disk_bytes
from safetrain.plan.search import PlanInputs, machine_text, plan_run


def examine(
    config: Pipeline, before: Machine | None, probe_module: str, dry_run_module: str, say: Callable[[str], None]
) -> tuple[list[Check], Machine | None]:
    """Every check of preflight.level, and the machine, None where mlx does not work.

    ``before`` is the machine as it was last found; the modules are the engine's.
    """
    train, lora, level = config.train, config.lora, config.preflight.level
    checks = preflight.software_checks()
    model, model_found = _model(Path(config.model.path), level)
    probe, why_not = ask_engine(probe_module, model, level, own_limit_bytes(train.memory_limit_gb))
    data, rows, data_found = _data(config, model)
    last = [*model_found, *data_found, *preflight.environment_checks(model.static_bytes if model else 0)]
    last += [_disk(train, lora, data, model), preflight.previous_run_check(paths.OUTPUT, _identity(train, model, rows))]
    hosts_found, hosts = host_checks(train, Path(config.model.path)) if is_shared(train) else ([], None)
    last += [*hosts_found, *preflight.tracker_checks(config.watch.export)]
    if probe is None:
        checks.append(Check("HW-GPU", "backend", FAIL, True, f"mlx does not work here: {why_not}", "mlx starts",
                            f"python -m {probe_module}", "run 'make clean && make'"))  # fmt: skip
        open_questions = ("HW-RAM", "MODEL-LOAD", "MODEL-TRAIN", "MEM-STATIC", "MEM-FIT")
        return [*checks, *last, *_open(open_questions, "mlx does not work")], None
    machine = settle(read_machine_now(probe), before)
    checks += [*preflight.engine_checks(machine, probe), *last]
    if model is None:
        checks += _open(("MODEL-LOAD", "MODEL-TRAIN", "MEM-FIT"), "there is no whole model")
        return checks, machine
    checks += [preflight.load_check(probe, level), preflight.train_check(model, probe)]
    checks.append(preflight.static_check(model, machine))
    if data is None or rows is None or FAIL in (each.status for each in checks[-2:]):
        why = "there are no data" if data is None else "the weights do not fit, or cannot be trained"
        return [*checks, skipped("MEM-FIT", "training fits", why, critical=checks[-2].status != FAIL)], machine
    runner = DryRunner(dry_run_module if level == "certify" else "", machine_text(machine), say)
    return [*checks, *_fit_checks(train, lora, PlanInputs(data, machine, model, rows), runner, hosts)], machine


def _model(folder: Path, level: str) -> tuple[ModelFiles | None, list[Check]]:
    """The model's files; a failed check where they are not whole."""
    try:
        model = read_model_files(folder)
    except ModelError as error:
        return None, [_from_error("MODEL-FILES", "model complete", error)]
    return model, preflight.model_checks(model, level)


def _data(config: Pipeline, model: ModelFiles | None) -> tuple[DataReport | None, TrainingRows | None, list[Check]]:
    """What validate_data has found, and the rows; a failed check where it has not run or found no rows."""
    try:
        data = read_data_report(paths.DATA_REPORT)
        require_data_of(data, config.data.path)
        rows = load_training_rows(model.folder, config.train.max_examples) if model else None
    except (ConfigError, DataError) as error:
        return None, None, [_from_error("DATA-FILES", "data", error)]
    limits = [config.train.max_seq_length, model.max_positions if model else None]
    if config.train.method == PRETRAIN:  # windows cut nothing off
        limits = []
    return data, rows, preflight.data_checks(data, min((limit for limit in limits if limit), default=None))


def _identity(train: Train, model: ModelFiles | None, rows: TrainingRows | None) -> RunIdentity | None:
    """Of the training that is planned; None where it starts over anyway, or it is not known."""
    if model is None or rows is None or train.restart:
        return None
    return RunIdentity(model.fingerprint, rows.train_digest, rows.valid_digest, "")


def _disk(train: Train, lora: Lora, data: DataReport | None, model: ModelFiles | None) -> Check:
    """Room for what a training with these settings writes."""
    if data is None or model is None:
        return skipped("DISK-FREE", "disk", "what is needed depends on data and model", critical=True)
    try:
        needed = default_disk_bytes(data, model, train, lora)
    except ConfigError as error:
        return _from_error("DISK-FREE", "disk", error)
    return preflight.disk_check(paths.OUTPUT, needed)


def _fit_checks(
    train: Train, lora: Lora, inputs: PlanInputs, runner: DryRunner, hosts: Hosts | None
) -> Iterator[Check]:
    """Whether what recommend_config plans fits, by a dry run that is remembered, or is made now; and that of ranks."""
    known = is_known(inputs.model.model_type)
    if known or runner.module:
        try:
            plan = plan_run(inputs, train, lora, runner)
            yield preflight.fit_check(plan, oversize=train.oversize, by_dry_run=bool(runner.module))
        except (ConfigError, DataError, ModelError, MachineError) as error:
            yield _from_error("MEM-FIT", "training fits", error)
    else:
        yield skipped("MEM-FIT", "training fits", "of an unknown architecture a dry run decides: recommend_config")
    try:
        yield from room_checks(hosts, inputs, train, lora) if hosts and known else ()
    except ConfigError as error:
        yield _from_error("RANKS-ROOM", "memory for ranks", error)


def _open(identifiers: Sequence[str], why: str) -> list[Check]:
    """Questions of this level that something else left open."""
    return [skipped(identifier, identifier, why, critical=True) for identifier in identifiers]


def _from_error(identifier: str, name: str, error: SafetrainError) -> Check:
    """A failed check that says what the error says."""
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, name, FAIL, True, "; ".join(parts), error.expected, "", error.do)
