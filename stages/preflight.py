"""Stage 2: check software, machine, data, model, memory and disk; write machine.json and preflight_report.json."""

import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.errors import ConfigError, DataError, MachineError, ModelError, PreflightError, SafetrainError
from safetrain.core.lock import require_no_training
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.terms import backend_of, base_bytes
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.model.shapes import is_known
from safetrain.core.records.reports import (
    DataReport,
    Machine,
    read_data_report,
    read_machine,
    require_data_of,
    write_record,
)
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.plan import preflight
from safetrain.plan.checks import (
    FAIL,
    SKIP,
    Check,
    PreflightReport,
    downgrade,
    render,
    require_known,
    skipped,
    summarise,
)
from safetrain.plan.child import ChildFailed, ran_out_of_memory, room_cap, run_json
from safetrain.plan.choose import PlanInputs, machine_text, plan_by_dry_runs
from safetrain.plan.dry_run import DryRunner
from safetrain.plan.machine import Probe, read_machine_now, settle
from safetrain.plan.probe_cache import cache_path, remember, remembered
from safetrain.plan.recommend import default_disk_bytes
from stages.config import stage

PROBE, DRY_RUN = "safetrain.engine.probe", "safetrain.engine.dry_run"
PROBE_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Examined:
    """What was found; None for what could not be read or measured."""

    checks: list[Check]
    machine: Machine | None


@stage
def main(config: Pipeline) -> None:
    """Fail here rather than at hour three."""
    require_no_training(paths.OUTPUT)
    began, before = time.monotonic(), previous_machine()
    lowered = config.preflight.downgrade or []
    require_known(lowered, preflight.IDS)  # before anything is measured
    found = examine(config, before)
    checks = downgrade(found.checks, lowered)
    report = report_of(checks, found.machine, config, time.monotonic() - began)
    write_record(paths.PREFLIGHT_REPORT, report)
    print(render(report), flush=True)
    if report.exit_code:
        raise failure(report)
    if found.machine is not None and found.machine != before:
        write_record(paths.MACHINE, found.machine)


def examine(config: Pipeline, before: Machine | None) -> Examined:
    """Every check of the level, each after those that it needs."""
    checks = preflight.software_checks()
    model, model_found = examine_model(Path(config.model.path), config.preflight.level)
    own_limit = own_limit_bytes(config.train.memory_limit_gb)
    probe, why_not = ask_engine(model, config.preflight.level, own_limit)
    data, data_found = examine_data(config, model)
    environment = preflight.environment_checks(model.static_bytes if model else 0)
    disk = examine_disk(config, data, model)
    last = [*model_found, *data_found, *environment, disk, preflight.previous_run_check(paths.OUTPUT, paths.SUMMARY)]
    if probe is None:
        checks.append(Check("HW-GPU", "backend", FAIL, True, f"mlx does not work here: {why_not}", "mlx starts",
                            f"python -m {PROBE}", "run 'make clean && make'"))  # fmt: skip
        open_questions = ("HW-RAM", "MODEL-LOAD", "MODEL-TRAIN", "MEM-STATIC", "MEM-FIT")
        return Examined([*checks, *last, *preflight.not_checked(open_questions, "mlx does not work")], None)
    machine = settle(read_machine_now(probe), before)
    checks += [*preflight.engine_checks(machine, probe), *last]
    if model is None:
        checks += preflight.not_checked(("MODEL-LOAD", "MODEL-TRAIN", "MEM-FIT"), "there is no whole model")
        return Examined(checks, machine)
    checks += [preflight.load_check(probe, config.preflight.level), preflight.train_check(model, probe)]
    static = preflight.static_check(model, machine)
    if checks[-1].status == FAIL:  # nothing is measured of what cannot be trained
        fit = skipped("MEM-FIT", "training fits", "the model cannot be trained")
    else:
        fit = examine_fit(config, data, machine, model, static)
    return Examined([*checks, static, fit], machine)


def examine_model(folder: Path, level: str) -> tuple[ModelFiles | None, list[Check]]:
    """The model's files; a failed check where they are not whole."""
    try:
        model = read_model_files(folder)
    except ModelError as error:
        return None, [from_error("MODEL-FILES", "model complete", error)]
    return model, preflight.model_checks(model, level)


def examine_data(config: Pipeline, model: ModelFiles | None) -> tuple[DataReport | None, list[Check]]:
    """What validate_data has found; a failed check where it has not run or found no rows."""
    try:
        data = read_data_report(paths.DATA_REPORT)
        require_data_of(data, config.data.path)
    except (ConfigError, DataError) as error:
        return None, [from_error("DATA-FILES", "data", error)]
    limits = [config.train.max_seq_length, model.max_positions if model else None]
    return data, preflight.data_checks(data, min((limit for limit in limits if limit), default=None))


def from_error(identifier: str, name: str, error: SafetrainError) -> Check:
    """A failed check that says what the error says."""
    parts = [part for part in (error.what.rstrip("."), error.where, error.got) if part]
    return Check(identifier, name, FAIL, True, "; ".join(parts), error.expected, "", error.do)


def examine_disk(config: Pipeline, data: DataReport | None, model: ModelFiles | None) -> Check:
    """Room for what a training with these settings writes."""
    if data is None or model is None:
        return skipped("DISK-FREE", "disk", "what is needed depends on data and model", critical=True)
    try:
        needed = default_disk_bytes(data, model, config.train, config.lora)
    except ConfigError as error:
        return from_error("DISK-FREE", "disk", error)
    return preflight.disk_check(paths.OUTPUT, needed)


def examine_fit(config: Pipeline, data: DataReport | None, machine: Machine, model: ModelFiles, static: Check) -> Check:
    """Whether a training fits: by the closed form, or by a dry run with the model itself."""
    if data is None or static.status == FAIL:
        why = "there are no data" if data is None else "the weights do not fit"
        return skipped("MEM-FIT", "training fits", why, critical=True)
    measured = config.preflight.level == "certify"
    if not is_known(model.model_type) and not measured:
        return skipped("MEM-FIT", "training fits", "of an unknown architecture a dry run decides: recommend_config")
    try:
        rows = load_training_rows(model.folder, config.train.max_examples)
        inputs = PlanInputs(data, machine, model, rows)
        if not measured:
            return preflight.closed_form_check(inputs, config.train, config.lora)
        runner = DryRunner(DRY_RUN, machine_text(machine), say)
        plan = plan_by_dry_runs(inputs, config.train, config.lora, runner)
    except (ConfigError, DataError, ModelError, MachineError) as error:
        return from_error("MEM-FIT", "training fits", error)
    return preflight.fit_check(plan, oversize=config.train.oversize, by_dry_run=True)


def say(text: str) -> None:
    """To the terminal, at once, beside the report."""
    print(text, file=sys.stderr, flush=True)


def report_of(checks: list[Check], machine: Machine | None, config: Pipeline, seconds: float) -> PreflightReport:
    """The verdicts with today's readings."""
    memory, folder = psutil.virtual_memory(), paths.OUTPUT if paths.OUTPUT.is_dir() else Path()
    return summarise(
        checks,
        config.preflight.level,
        seconds,
        memory.available,
        machine.total_memory_bytes if machine else memory.total,
        shutil.disk_usage(folder).free,
        strict=config.preflight.strict,
    )


def failure(report: PreflightReport) -> PreflightError:
    """What ends the pipeline, by name."""
    failed = [check.id for check in report.checks if check.status == FAIL]
    unanswered = [check.id for check in report.checks if check.status == SKIP and check.critical]
    if report.exit_code == 2:
        return PreflightError(2, f"Could not be checked: {', '.join(unanswered)}.", do="see what is said of them above")
    if not failed:
        return PreflightError(1, "There are warnings, and preflight.strict is set.", do="see the remedies above")
    matter_of_judgement = all(name.startswith(("HW-RAM", "ENV-", "MEM-STATIC", "DISK-")) for name in failed)
    anyway = f", or take it as a warning: preflight.downgrade=[{','.join(failed)}]" if matter_of_judgement else ""
    return PreflightError(1, f"Checks failed: {', '.join(failed)}.", do=f"see the remedies above{anyway}")


def ask_engine(model: ModelFiles | None, level: str, own_limit: int | None = None) -> tuple[Probe | None, str]:
    """Ask the engine in a child of its own; whether the model loads and trains once for this model and installation.

    A model larger than the memory that is left is not loaded: the checks say so, and the machine does not swap.
    Gives None and the reason where mlx does not work.
    """
    path = cache_path(model.fingerprint) if model else None
    known = remembered(path) if path else None
    if known is not None and known.backend != "cuda":
        return known, ""
    try:
        probe = Probe(**run_json(PROBE, [], PROBE_TIMEOUT_SECONDS))
    except ChildFailed as error:
        return None, str(error)
    if known is not None:  # free GPU memory is asked every time
        return replace(probe, loads=known.loads, load_seconds=known.load_seconds, trains=known.trains), ""
    if model is None or path is None or level == "quick":
        return probe, ""
    opened_bytes = base_bytes(model, backend_of(model, probe.backend, dequantize_base=False))
    if opened_bytes >= read_machine_now(probe).memory_budget.mlx_bytes:
        return probe, ""
    try:
        asked = [str(model.folder), *([] if own_limit is None else [str(own_limit)])]
        probe = Probe(**run_json(PROBE, asked, PROBE_TIMEOUT_SECONDS, room_cap(own_limit)))
    except ChildFailed as error:
        if ran_out_of_memory(str(error)):
            return probe, ""
        return replace(probe, loads=False, load_error=str(error)), ""
    remember(path, probe)
    return probe, ""


def previous_machine() -> Machine | None:
    """machine.json as an earlier run left it, None when there is none or it has another form."""
    try:
        return read_machine(paths.MACHINE)
    except ConfigError:
        return None


if __name__ == "__main__":
    main()
