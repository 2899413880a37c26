"""Stage 2: check software, machine, data, model, memory and disk; write machine.json and preflight_report.json."""

import functools
import sys
import time
from pathlib import Path

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import printable
from safetrain.core.lock import require_no_training
from safetrain.core.records.reports import Machine, read_machine
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.plan.checks import downgrade, failure, render, require_known
from safetrain.plan.examine import Asked, examine, report_of
from safetrain.plan.preflight import IDS
from stages.config import stage

PROBE, DRY_RUN = "safetrain.engine.probe", "safetrain.engine.dry_run"


@stage
def main(config: Pipeline) -> None:
    """Fail here rather than at hour three."""
    require_no_training(paths.OUTPUT)
    began, before = time.monotonic(), previous_machine()
    level, lowered = config.preflight.level, config.preflight.downgrade or []
    require_known(lowered, IDS)  # before anything is measured
    say = functools.partial(print, file=sys.stderr, flush=True)  # beside the report
    asked = Asked(
        Path(config.model.path), config.data.path, config.train, config.lora, level, PROBE, DRY_RUN, say,
        config.watch.export,
    )  # fmt: skip
    found = examine(asked, before)
    checks, seconds = downgrade(found.checks, lowered), time.monotonic() - began
    report = report_of(found, checks, level, seconds, strict=config.preflight.strict)
    write_record(paths.PREFLIGHT_REPORT, report)
    print(printable(render(report)), flush=True)
    if report.exit_code:
        raise failure(report)
    if found.machine is not None and found.machine != before:
        write_record(paths.MACHINE, found.machine)


def previous_machine() -> Machine | None:
    """machine.json as an earlier run left it, None if it is missing or of another form."""
    try:
        return read_machine(paths.MACHINE)
    except ConfigError:
        return None


if __name__ == "__main__":
    main()
