"""Fine-tune a language model on the machine you have, without losing a run.

The pipeline itself is `dvc repro`; its values are in params.yaml.
"""

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from safetrain.cli_evaluate import evaluate
from safetrain.cli_exchange import export, import_
from safetrain.cli_models import card, convert, fetch, fuse
from safetrain.cli_monitor import monitor
from safetrain.cli_talk import ask, chat, serve
from safetrain.core.errors import AlreadyRunningError, ConfigError, DataError, MachineError, SafetrainError
from safetrain.core.formatting import counted, printable
from safetrain.core.signals import Terminated, handling, terminate
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import POSTMORTEM
from safetrain.core.tracebacks import with_traceback
from safetrain.plan.child import run_to_its_end

STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")

if TYPE_CHECKING:
    from rich.console import Console


class Commands(TyperGroup):
    """Ends as the stages do on SIGTERM, and where nobody reads on, as in `… | head`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and write all that it has printed."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
            sys.exit(128 + signal.SIGPIPE)
        except Terminated:  # typer takes it for Ctrl-C
            sys.exit(128 + signal.SIGTERM)


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)


for command in (monitor, ask, chat, serve, evaluate, fetch, convert, fuse, card):
    app.command()(command)
app.add_typer(export, name="export")
app.add_typer(import_, name="import")


def main() -> None:
    """The console command."""
    try:
        with handling({signal.SIGTERM: terminate}):
            app()
    except SafetrainError as error:
        print(f"error: {printable(with_traceback(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except PermissionError as error:
        _refused("No permission", error)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        _refused("Nothing can be written there", error)


def _refused(what: str, error: OSError) -> None:
    where = f"\n  where:    {printable(str(error.filename))}" if error.filename else ""
    print(f"error: {what}: {error.strerror}.{where}\n  do:       choose another folder", file=sys.stderr)
    sys.exit(1)


@app.command()
def validate(
    files: Annotated[list[str] | None, typer.Argument(help="files or folders of data; default: data.path")] = None,
    model: Annotated[Path | None, typer.Option(help="model folder; default: model.path of params.yaml")] = None,
    show_mask: Annotated[
        int | None, typer.Option(help="show so many rows with what is trained marked; -1: all", min=-1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    fix: Annotated[Path | None, typer.Option(help="write a repaired copy here, and a log of all changes")] = None,
    drop_bad: Annotated[bool, typer.Option("--drop-bad", help="--fix leaves out rows that cannot be read")] = False,
    keep_mojibake: Annotated[bool, typer.Option("--keep-mojibake", help="--fix leaves wrongly decoded text")] = False,
    encoding: Annotated[str | None, typer.Option(help="--fix reads the file in it, as windows-1252")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="your own key of a part, as prompt=frage; again for the others")
    ] = None,
) -> None:
    """Say what validation finds in the rows of any file: exit 0 nothing or warnings, 1 errors, 2 it could not be said.

    What is a label, how grave a finding is, your own keys (data.columns): params.yaml decides, where there is one.
    --columns prompt=frage --columns completion=antwort names them for this once. With --fix, a file or a folder is
    copied and repaired instead: exit 0 written, 1 rows cannot be read (see --drop-bad).
    """
    from safetrain.plan import validate_command as command
    from safetrain.watch.progress import still_working

    try:
        decided = command.decided_by(_params().data if Path("params.yaml").is_file() else None, columns or ())
        named = command.paths_of(files or [_params().data.path])
        if fix is not None:
            command.refuse_with_fix(show_mask, as_json=as_json)
            with still_working("rows are read and repaired"):
                sys.exit(command.fix(named, fix, decided, encoding, drop_bad=drop_bad, keep_mojibake=keep_mojibake))
        command.refuse_without_fix(encoding, drop_bad=drop_bad, keep_mojibake=keep_mojibake)
        with still_working("rows are read and compared"):
            sys.exit(command.tell(
                _console(plain=True), named, model or _model_of_params(), decided, show_mask,
                as_json=as_json, usual_model=model is None,
            ))  # fmt: skip
    except SafetrainError as error:
        print(f"error: {printable(with_traceback(error))}", file=sys.stderr)
        sys.exit(1 if fix is not None and isinstance(error, DataError) else 2)


@app.command()
def discard() -> None:
    """Throw an interrupted training away: its checkpoints and training_state.json. The adapter stays."""
    from safetrain.core.lock import training_lock
    from safetrain.core.storage.run_files import discard_run
    from safetrain.guard.postmortem import close_marker

    _require_project()
    with training_lock("default", paths.OUTPUT):
        removed = discard_run(paths.OUTPUT, damaged_too=True)
        close_marker(paths.OUTPUT)
        (paths.OUTPUT / POSTMORTEM).unlink(missing_ok=True)  # it says what is kept, and nothing is
    print(f"removed {counted(removed, 'checkpoint')}; the next training starts from the beginning")


@app.command()
def diagnose(
    auto: Annotated[bool, typer.Option("--auto", help="repeat the fatal batch without asking")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print checkpoints_qlora/postmortem.json")] = False,
) -> None:
    """Say why the last training ended, also after a reboot; on consent, repeat its last batch to find what fits."""
    from safetrain.core.lock import training_lock
    from safetrain.guard.postmortem import describe, explain_unclosed, is_finished, read_postmortem
    from safetrain.guard.replay import can_replay, replay

    _require_project()
    try:
        with training_lock("default", paths.OUTPUT):
            found = explain_unclosed(paths.OUTPUT, "dvc repro") or read_postmortem(paths.OUTPUT)
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


@app.command()
def estimate(
    model: Annotated[Path | None, typer.Argument(help="model folder or config.json; default: model.path")] = None,
    machine: Annotated[str | None, typer.Option(help="a machine of conf/machine, as m1-8gb")] = None,
    macos_26: Annotated[bool, typer.Option("--macos-26", help="under macOS 26, where it may use more")] = False,
    memory_gb: Annotated[float | None, typer.Option(min=0.1, help="a budget of so many GiB instead")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a micro-batch")] = 1,
    tokens: Annotated[int, typer.Option(min=8, help="tokens of its longest row")] = 512,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank")] = 16,
    recompute: Annotated[bool, typer.Option("--recompute", help="train.gradient_checkpointing=true")] = False,
    method: Annotated[str, typer.Option(help="lora, dora or full")] = "lora",
    num_layers: Annotated[int | None, typer.Option(min=1, help="trained blocks, from the top; default: all")] = None,
    accumulate: Annotated[bool, typer.Option(help="an update of several micro-batches, as is recommended")] = True,
    optimizer: Annotated[str, typer.Option(help="adam, adamw, adafactor, muon or sgd")] = "adam",
    optimizer_state_bits: Annotated[int, typer.Option(help="32 or 16")] = 32,
    compute_dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as planned")] = None,
) -> None:
    """Say what training a model takes, here or on a machine you do not have; exit 1 when it does not fit.

    No weights are read.
    """
    from safetrain.core.model.files import read_model_plan
    from safetrain.core.records.reports import read_machine
    from safetrain.plan import estimate_text
    from safetrain.plan.hyperparameters import usual_dtype
    from safetrain.plan.what_if import asked_run, machine_of, read_profile, with_memory

    found = read_model_plan(model or _model_of_params())
    there = machine_of(read_profile(machine), macos_26=macos_26) if machine else read_machine(paths.MACHINE)
    there = with_memory(there, memory_gb) if memory_gb else there
    run = asked_run(
        found, there.backend, method, rank, recompute=recompute, num_layers=num_layers, accumulate=accumulate,
        optimizer=optimizer, optimizer_state_bits=optimizer_state_bits,
        compute_dtype=compute_dtype or usual_dtype(there, found),
    )  # fmt: skip
    name = machine or "this machine"
    fits = estimate_text.print_estimate(_console(), found, there, name, run, batch_size, tokens)
    sys.exit(0 if fits else 1)


@app.command()
def info(
    model: Annotated[Path | None, typer.Argument(help="model folder or config.json; default: model.path")] = None,
) -> None:
    """Say what a model is: parameters, shapes, sizes, and the least memory that training it takes."""
    from safetrain.core.model.files import read_model_plan
    from safetrain.plan.estimate_text import print_info

    print_info(_console(), read_model_plan(model or _model_of_params()))


@app.command()
def preflight(
    level: Annotated[str | None, typer.Option(help="quick, probe or certify; default: preflight.level")] = None,
    downgrade: Annotated[list[str] | None, typer.Option(help="a check that only warns, as DISK-FREE")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="a warning is a failure")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print preflight_report.json alone")] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides: model.path=models/NAME …")] = None,
) -> None:
    """Check machine, data, model, memory and disk: exit 0 when all is well, 1 when not, 2 when it could not be said."""
    _require_project()
    words = [f"preflight.level={level}"] if level else []
    words += [f"preflight.downgrade=[{','.join(downgrade)}]"] if downgrade else []
    words += ["preflight.strict=true"] if strict else []
    before = _written(paths.PREFLIGHT_REPORT)
    command = [sys.executable, "-m", "stages.preflight", *words, *(overrides or [])]
    code = run_to_its_end(command, subprocess.DEVNULL if as_json else None)
    if as_json and _written(paths.PREFLIGHT_REPORT) != before:
        print(paths.PREFLIGHT_REPORT.read_text(encoding="utf-8"), end="")
    sys.exit(code)


def _written(path: Path) -> int:
    """When, in nanoseconds; 0 where there is no such file."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def _require_project() -> None:
    if not Path("params.yaml").is_file():
        raise ConfigError("There is no safetrain project here.", where=str(Path.cwd()), do="go to the project's root")


def _console(*, plain: bool = False) -> "Console":
    """Of rich, which by itself ends with 1 where nobody reads on. ``plain``: texts are shown as they are."""
    from rich.console import Console

    class Told(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Told(soft_wrap=True, highlight=not plain, markup=not plain)


def _model_of_params() -> Path:
    """model.path of params.yaml."""
    return Path(_params().model.path)


def _params() -> Any:
    """params.yaml as it stands, without overlays."""
    from omegaconf import OmegaConf

    _require_project()
    return OmegaConf.load("params.yaml")


@app.command()
def result(
    gate: Annotated[bool, typer.Option("--gate", help="only say whether it is better than its base")] = False,
) -> None:
    """Say what the last run learnt and what to try next.

    With --gate: exit 0 better than its base, 1 not better, 2 it forgets, or it cannot be said; gate in params.yaml has
    the thresholds.
    """
    from safetrain.core.records.schema import gate_of
    from safetrain.core.records.scoring import Thresholds
    from safetrain.watch import result as finished

    if not gate:
        print(printable(finished.describe_result(paths.EVALUATION, paths.SUMMARY, paths.ADAPTERS)))
        return
    try:
        asked = gate_of(dict(_params().get("gate") or {}))
    except ConfigError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    limits = Thresholds(asked.least_gain, asked.least_exact_match, asked.most_forgotten)
    verdict = finished.gate(paths.EVALUATION, paths.ADAPTERS, limits)
    print("\n".join([verdict.title, *verdict.reasons]))
    sys.exit(verdict.exit_code)


@app.command()
def selftest(
    model: Annotated[Path, typer.Argument(help="model folder")] = Path("models/encyclopedia-3m"),
    rows: Annotated[int, typer.Option(min=1, max=64, help="random rows")] = 4,
    tokens: Annotated[int, typer.Option(min=8, max=8192, help="tokens of the longest")] = 64,
    report: Annotated[bool, typer.Option("--report", help="measure this machine: a block of text to paste")] = False,
) -> None:
    """Run one real forward and backward pass of a model on this machine and check loss and gradient."""
    if report:
        _report(model)
        return
    from safetrain.core.model.files import read_model_files
    from safetrain.plan.selftest import selftest as run_selftest

    files = read_model_files(model)
    if files.max_positions is not None and tokens > files.max_positions:
        raise ConfigError(f"--tokens is {tokens}.", expected=f"at most {files.max_positions}, the model's context")
    verdicts = run_selftest("safetrain.engine.selftest", model, rows, tokens, _own_limit())
    for verdict in verdicts:
        print(f"{'[ok]  ' if verdict.passed else '[FAIL]'} {verdict.name:<9}{verdict.found}")
    if not all(verdict.passed for verdict in verdicts):
        raise MachineError(
            "The self-test failed: this backend computes something else than mlx-lm's own layers.",
            where=str(model),
            do="try another mlx version, and report these figures; do not train with this",
        )
    print("the self-test passed")


def _own_limit() -> int | None:
    """train.memory_limit_gb of params.yaml in bytes; None where there is none."""
    from safetrain.core.memory.budget import own_limit_bytes

    return own_limit_bytes(_params().train.memory_limit_gb) if Path("params.yaml").is_file() else None


def _report(model: Path) -> None:
    """Print what this machine does with what could only be reasoned elsewhere."""
    from safetrain.plan.report import collect
    from safetrain.plan.report_text import block

    print("About a minute; Ctrl-C prints what there is by then.", file=sys.stderr)
    print(block(collect("safetrain.engine.report", model, lambda section: print(f"  {section} …", file=sys.stderr))))
    print("Please paste this block into an issue.", file=sys.stderr)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides: experiment=minimal …")] = None,
) -> None:
    """Run the six stages in order without DVC, with overrides and overlays: safetrain run experiment=minimal."""
    if not Path("dvc.yaml").is_file():
        raise ConfigError("There is no dvc.yaml here.", where=str(Path.cwd()), do="go to the project's root")
    os.environ["SAFETRAIN_RUN"] = shlex.join(["safetrain", "run", *(overrides or [])])  # to be named after a death
    for stage in STAGES:
        print(f"\n== {stage}", flush=True)
        code = run_to_its_end([sys.executable, "-m", f"stages.{stage}", *(overrides or [])])
        if code != 0:
            print(f"error: the stage {stage} ended with exit code {code}", file=sys.stderr)
            sys.exit(code)


if __name__ == "__main__":
    main()
