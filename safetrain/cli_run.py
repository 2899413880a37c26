"""The commands of `safetrain` about the training: run, result, diagnose, discard."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from safetrain.cli_complete import overrides
from safetrain.cli_project import params, require_project
from safetrain.core.again import RUN, ran_by
from safetrain.core.errors import AlreadyRunningError, ConfigError
from safetrain.core.formatting import counted, printable
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import POSTMORTEM

STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")


def run(
    overrides: Annotated[
        list[str] | None, typer.Argument(autocompletion=overrides, help="Hydra overrides: experiment=minimal …")
    ] = None,
) -> None:
    """Run the whole pipeline once, from your data to the pictures.

    The six stages in order, without DVC, with overrides and overlays: safetrain run experiment=minimal.
    """
    from safetrain.plan.child import run_to_its_end

    if not Path("dvc.yaml").is_file():
        raise ConfigError("There is no dvc.yaml here.", where=str(Path.cwd()), do="go to the project's root")
    os.environ[RUN] = shlex.join(["safetrain", "run", *(overrides or [])])  # to be named after a death
    for stage in STAGES:
        print(f"\n== {stage}", flush=True)
        code = run_to_its_end([sys.executable, "-m", f"stages.{stage}", *(overrides or [])])
        if code != 0:
            print(f"error: the stage {stage} ended with exit code {code}", file=sys.stderr)
            sys.exit(code)
    print(_told())


def _told() -> str:
    """What the finished run learnt, and what to try next."""
    from safetrain.core.records.reports import read_data_report
    from safetrain.watch.result import EXAMPLE, describe_result

    try:
        data = read_data_report(paths.DATA_REPORT).source
    except ConfigError:  # gone, or another version's: the scores stand without it
        data = EXAMPLE
    return printable(describe_result(paths.EVALUATION, paths.SUMMARY, paths.ADAPTERS, ran_by(), data))


def result(
    gate: Annotated[bool, typer.Option("--gate", help="only say whether it is better than its base")] = False,
) -> None:
    """Say what was learnt, and what to try next.

    With --gate: exit 0 better than its base, 1 not better, 2 it forgets, or it cannot be said; gate in params.yaml has
    the thresholds.
    """
    from safetrain.core.records.schema import gate_of
    from safetrain.core.records.scoring import Thresholds
    from safetrain.watch import result as finished

    if not gate:
        require_project()
        print(_told())
        return
    try:
        asked = gate_of(dict(params().get("gate") or {}))
    except ConfigError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    limits = Thresholds(asked.least_gain, asked.least_exact_match, asked.most_forgotten)
    verdict = finished.gate(paths.EVALUATION, paths.ADAPTERS, limits)
    print("\n".join([verdict.title, *verdict.reasons]))
    sys.exit(verdict.exit_code)


def diagnose(
    auto: Annotated[bool, typer.Option("--auto", help="repeat the fatal batch without asking")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print checkpoints_qlora/postmortem.json")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(help="a zip for a bug report: no rows, no answers, no names, no secrets"),
    ] = None,
) -> None:
    """Say why the last training ended, also after a reboot.

    On consent, its last batch is repeated, to find what fits.
    """
    require_project()
    if bundle is not None:
        _bundle(bundle)
        return
    from safetrain.core.lock import training_lock
    from safetrain.guard.postmortem import describe, explain_unclosed, is_finished, read_postmortem
    from safetrain.guard.replay import can_replay, replay

    try:
        with training_lock("default", paths.OUTPUT):
            found = explain_unclosed(paths.OUTPUT, ran_by()) or read_postmortem(paths.OUTPUT)
    except AlreadyRunningError as running:
        print(str(running).splitlines()[0], "What follows is about the one before.", file=sys.stderr)
        found = read_postmortem(paths.OUTPUT)
    if found is None:
        print("null" if as_json else "no training has ended badly here")
        return
    if as_json:
        print((paths.OUTPUT / POSTMORTEM).read_text(encoding="utf-8"), end="")
        return
    print(describe(found))
    if is_finished(paths.OUTPUT) and paths.SUMMARY.is_file() and paths.SUMMARY.stat().st_mtime > found.ended_seconds:
        print("since then a training has finished: safetrain result")
    if not can_replay(found) or found.replay is not None:
        return
    question = "repeat that batch in a process of its own, to see which part of it dies and what fits?"
    if not auto and not sys.stdin.isatty():
        print("'safetrain diagnose --auto' repeats that batch and finds the largest part of it that fits")
    elif auto or typer.confirm(question):
        with training_lock("default", paths.OUTPUT) as locks:
            command = (sys.executable, "-m", "safetrain.engine.replay")
            print(describe(replay(command, paths.OUTPUT, locks, found, lambda text: print(text, flush=True))))


def _bundle(out: Path) -> None:
    """Write it, and say what is in it before anybody sends it. A training may run: nothing is locked."""
    from safetrain.plan.report import read_system
    from safetrain.watch.bundle import write_bundle
    from safetrain.watch.redaction import Redaction, names_here

    written = write_bundle(out, read_system(), Redaction(names_here()))
    for item in written.items:
        print(f"  {len(item.text.encode()) / 1024:>7.1f} KiB  {item.name:<24} {item.about}")
    print(
        f"{written.path} is written: {counted(len(written.items), 'file')}, {written.size_bytes / 1024:.1f} KiB packed"
    )
    print(f"Look at it before you send it: unzip -p {written.path} | less")


def discard() -> None:
    """Throw an interrupted training away; the adapter stays.

    What goes: its checkpoints and training_state.json.
    """
    from safetrain.core.lock import training_lock
    from safetrain.core.storage.run_files import discard_run
    from safetrain.guard.postmortem import close_marker

    require_project()
    with training_lock("default", paths.OUTPUT):
        removed = discard_run(paths.OUTPUT, damaged_too=True)
        close_marker(paths.OUTPUT)
        (paths.OUTPUT / POSTMORTEM).unlink(missing_ok=True)  # it says what is kept, and nothing is
    print(f"removed {counted(removed, 'checkpoint')}; the next training starts from the beginning")
