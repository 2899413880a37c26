"""Stage 2: check software, machine, data, model and disk; write machine.json and today's preflight_report.json."""

from pathlib import Path

from safetrain.core import paths
from safetrain.core.child import ChildFailed, run_json
from safetrain.core.errors import ConfigError, MachineError
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.reports import Machine, read_data_report, read_machine, write_record
from safetrain.core.schema import Pipeline
from safetrain.plan import preflight
from safetrain.plan.machine import Probe, read_machine_now, settle
from safetrain.plan.probe_cache import cache_path, remember, remembered
from stages.config import stage

PROBE_TIMEOUT_SECONDS = 600
DISK_WANTED_BYTES = 2**30


@stage
def main(config: Pipeline) -> None:
    """Fail here rather than at hour three."""
    model = read_model_files(Path(config.model.path))
    data = read_data_report(paths.DATA_REPORT)
    probe = probe_engine(model)
    machine = settle(read_machine_now(probe), previous_machine())
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
    if machine != previous_machine():
        write_record(paths.MACHINE, machine)


def probe_engine(model: ModelFiles) -> Probe:
    """Ask the engine in a child of its own, once for this model and installation."""
    path = cache_path(model.fingerprint)
    probe = remembered(path)
    if probe is None:
        try:
            answer = run_json("safetrain.engine.probe", [str(model.folder)], PROBE_TIMEOUT_SECONDS)
        except ChildFailed as error:
            raise MachineError(
                f"mlx does not work here: {error}", where="python -m safetrain.engine.probe", do="run 'make' again"
            ) from None
        probe = Probe(**answer)
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
