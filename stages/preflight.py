"""Stage 2: check software, machine, data, model and disk; write machine.json and today's preflight_report.json."""

from dataclasses import replace
from pathlib import Path

from safetrain.core import paths
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.lock import require_no_training
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.reports import Machine, read_data_report, read_machine, write_record
from safetrain.core.schema import Pipeline
from safetrain.plan import preflight
from safetrain.plan.child import ChildFailed, run_json
from safetrain.plan.machine import Probe, read_machine_now, settle
from safetrain.plan.probe_cache import cache_path, remember, remembered
from stages.config import stage

PROBE = "safetrain.engine.probe"
PROBE_TIMEOUT_SECONDS = 600
DISK_WANTED_BYTES = 2**30


@stage
def main(config: Pipeline) -> None:
    """Fail here rather than at hour three."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    data = read_data_report(paths.DATA_REPORT)
    probe = probe_engine(model)
    before = previous_machine()
    machine = settle(read_machine_now(probe), before)
    checks = [
        *preflight.software_checks(),
        *preflight.machine_checks(machine, probe),
        preflight.data_check(data),
        *preflight.model_checks(model, probe),
        preflight.memory_check(model, machine),
        preflight.disk_check(paths.OUTPUT, DISK_WANTED_BYTES),
    ]
    report = preflight.summarise(checks, machine, paths.OUTPUT)
    write_record(paths.PREFLIGHT_REPORT, report)
    print(preflight.render(checks, report))
    if report.critical_failures:
        failed = [check.name for check in checks if check.critical and check.status == preflight.FAIL]
        raise MachineError(f"Critical checks failed: {', '.join(failed)}.", do="see the remedies above")
    if machine != before:
        write_record(paths.MACHINE, machine)


def probe_engine(model: ModelFiles) -> Probe:
    """Ask the engine in a child of its own; whether the model loads is asked once for this model and installation.

    A model larger than the memory that is left is not loaded: the checks say so, and the machine does not swap.
    """
    path = cache_path(model.fingerprint)
    known = remembered(path)
    if known is not None and known.backend != "cuda":
        return known
    try:
        probe = Probe(**run_json(PROBE, [], PROBE_TIMEOUT_SECONDS))
    except ChildFailed as error:
        raise MachineError(
            f"mlx does not work here: {error}", where=f"python -m {PROBE}", do="run 'make' again"
        ) from None
    if known is not None:  # free GPU memory is asked every time
        return replace(probe, loads=known.loads, load_seconds=known.load_seconds)
    if model.static_bytes >= read_machine_now(probe).memory_budget_bytes:
        return probe
    try:
        probe = Probe(**run_json(PROBE, [str(model.folder)], PROBE_TIMEOUT_SECONDS))
    except ChildFailed as error:
        return replace(probe, loads=False, load_error=str(error))
    remember(path, probe)
    return probe


def previous_machine() -> Machine | None:
    """machine.json as an earlier run left it, None when there is none or it has another form."""
    try:
        return read_machine(paths.MACHINE)
    except ConfigError:
        return None


if __name__ == "__main__":
    main()
