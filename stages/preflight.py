"""Stage 2: check software, machine, data, model, memory and disk; write machine.json and preflight_report.json."""

import functools
import sys
import time
from dataclasses import replace
from pathlib import Path

from safetrain.core.formatting import print_text
from safetrain.core.lock import require_no_training
from safetrain.core.records.adapter_files import start_of
from safetrain.core.records.reports import Machine
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none, write_record
from safetrain.plan.check_report import downgrade, failure, render, require_known, summarise
from safetrain.plan.preflight import examine, tools_check
from safetrain.stage import stage
from safetrain.watch.progress import still_working


@stage
def main(config: Pipeline) -> None:
    """Find problems now, not three hours into training."""
    require_no_training(paths.OUTPUT)
    start_seconds, previous = time.monotonic(), read_or_none(paths.MACHINE, Machine)
    downgraded_ids = config.preflight.downgrade or []
    require_known(downgraded_ids)  # before anything is measured
    say = functools.partial(print_text, stream=sys.stderr)  # the report goes to stdout
    with still_working("checking the machine and the model"):
        checks, machine = examine(config, Path(config.model.path), previous, "safetrain.engine.dry_run", say)
        if machine is not None and config.preflight.level != "quick":
            checks += tools_check(Path(config.model.path), "safetrain.engine.upstream.tool_calls")
    checks = downgrade(checks, downgraded_ids)
    report = summarise(checks, config.preflight.level, time.monotonic() - start_seconds)
    write_record(paths.PREFLIGHT_REPORT, report)
    print_text(render(report))
    if report.exit_code:
        raise failure(report)
    if machine is not None:
        machine = replace(machine, from_adapter=start_of(config.train.from_adapter))
    if machine is not None and machine != previous:
        write_record(paths.MACHINE, machine)


if __name__ == "__main__":
    main()
