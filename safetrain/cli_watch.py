"""The commands of `safetrain` that look at a run and change nothing: monitor, report, track."""

import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safetrain.cli_project import console, require_project
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import print_text, similar_path
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_new

if TYPE_CHECKING:
    from safetrain.watch.monitor import MonitorView

    Look = Callable[[], MonitorView]
    LineOf = Callable[[MonitorView], str]

NO_SCREEN = ("dumb", "unknown", "linux", "vt100", "vt220")  # values of TERM: no cursor to move, or no braille letters
GONE_LOOKS = 3  # in a row without a training before it has ended: two processes or stages have a gap between them
COMPARISON = paths.OUTPUT / "compare.html"
TRACK_HELP = """Send a run to W&B, MLflow or TensorBoard.

Sends steps, settings and scores, but no rows or answers. Each time, the tracker gets a new run."""

track = typer.Typer(no_args_is_help=True, help=TRACK_HELP)

Name = Annotated[str, typer.Option(help="name of the run; default: the tracker's choice")]


def monitor(
    refresh: Annotated[float, typer.Option(min=0.2, max=3600, help="seconds between readings")] = 5.0,
    plain: Annotated[bool, typer.Option("--plain", help="a line of text for each reading, for a log")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each reading, for a script")] = False,
    once: Annotated[bool, typer.Option("--once", help="read once, and end")] = False,
    output: Annotated[Path, typer.Option(help="folder of the run")] = paths.OUTPUT,
) -> None:
    """Watch a training from a second terminal, or see how it ended.

    Shows losses, speed, memory, the current phase, checkpoints and time left. Ctrl-C leaves; training continues.
    """
    from safetrain.core.run_folder import RunReader
    from safetrain.watch.monitor import json_line, look_at
    from safetrain.watch.monitor_screen import plain_line

    if plain and as_json:
        raise ConfigError("Use either --plain or --json.", do="leave one of them out")
    if not output.is_dir() and output == paths.OUTPUT:
        require_project()
    elif not output.is_dir():
        do = similar_path(output) or "name the folder of a run: --output"
        raise ConfigError("The folder does not exist.", where=str(output), do=do)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal lacks
    reader, project = RunReader(output), output.resolve().parent
    is_drawn = sys.stdout.isatty() and os.environ.get("TERM") not in NO_SCREEN and "utf" in sys.stdout.encoding.lower()
    show = _draw if is_drawn and not plain and not as_json else _print_lines
    try:
        show(lambda: look_at(reader, project), json_line if as_json else plain_line, refresh, once)
    except Terminated:
        raise
    except KeyboardInterrupt:  # the user leaves
        return


def _print_lines(look: "Look", line_of: "LineOf", refresh: float, once: bool) -> None:
    """Print a line for each look, until the training has ended; that is the last line."""
    view, gone = look(), 0
    print(line_of(view), flush=True)
    while not once and (view.state.is_running or 0 < gone < GONE_LOOKS):
        time.sleep(min(refresh, 1.0) if gone else refresh)
        view = look()
        gone = 0 if view.state.is_running else gone + 1
        if gone in (0, GONE_LOOKS):
            print(line_of(view), flush=True)


def _draw(look: "Look", line_of: "LineOf", refresh: float, once: bool) -> None:
    """Draw until the user leaves; once, if nothing runs."""
    from rich.console import Console
    from rich.live import Live

    from safetrain.watch.monitor_screen import MonitorScreen

    screen = Console(highlight=False, markup=False, emoji=False)
    view = look()
    if once or not view.state.is_running:
        screen.print(MonitorScreen(view), height=min(max(screen.height - 1, 16), 40))
        return
    try:
        with Live(MonitorScreen(view), console=screen, screen=True, refresh_per_second=1) as live:
            while True:
                time.sleep(refresh)
                view = look()
                live.update(MonitorScreen(view), refresh=True)
    finally:
        print_text(line_of(view).replace("  ", "\n"))


def report(
    out: Annotated[Path | None, typer.Option(help="write here; default: checkpoints_qlora/report.html")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="REV|EXP", help="compare with a commit or experiment; twice: compare both"),
    ] = None,
) -> None:
    """Write a page about the last run, or about two runs side by side.

    The page is one file that loads nothing. --compare writes checkpoints_qlora/compare.html instead.
    """
    from safetrain.core.run_folder import read_run
    from safetrain.watch.report import compare as write_comparison
    from safetrain.watch.report import write_report

    require_project()
    if compare and len(compare) > 2:
        raise ConfigError("Only two runs can be compared.", got=", ".join(compare), do="give --compare once or twice")
    usual = COMPARISON if compare else paths.REPORT
    target = out or usual
    if target.suffix != ".html" or target.is_dir():
        page = target / usual.name if target.is_dir() else target.with_name(f"{target.stem or 'report'}.html")
        raise ConfigError("The report is an HTML page.", where=str(target), do=f"name a file: --out {page}")
    if target.resolve() != usual.resolve():  # the default page is overwritten each time
        require_new(target, "name another file, or remove this one first")
    if compare:
        write_comparison(compare, target)
    else:
        write_report(read_run(), target)
    print(f"{target}: open it in a browser")


@track.command("wandb")
def track_wandb(
    project: Annotated[str, typer.Option(help="default: $WANDB_PROJECT, else safetrain")] = "",
    name: Name = "",
) -> None:
    """Send to Weights & Biases; WANDB_MODE=offline needs no account."""
    _track("wandb", project, name)


@track.command("mlflow")
def track_mlflow(
    uri: Annotated[str, typer.Option(help="default: $MLFLOW_TRACKING_URI, else a database file here")] = "",
    name: Name = "",
) -> None:
    """Send to MLflow: a server, or a database file here."""
    _track("mlflow", uri, name)


@track.command("tensorboard")
def track_tensorboard(
    into: Annotated[str, typer.Option(help="default: checkpoints_qlora/trackers/tensorboard")] = "",
    name: Name = "",
) -> None:
    """Write event files for TensorBoard."""
    _track("tensorboard", into, name)


def _track(tracker: str, place: str, name: str) -> None:
    from safetrain.core.run_folder import read_run
    from safetrain.watch import trackers

    require_project()
    if "/" in name or name in (".", ".."):
        raise ConfigError("The name of a run is a folder's name.", got=name, do="choose one without a slash")
    with console().status(f"sending to {tracker}"):
        line = trackers.export(tracker, read_run(), place, name)
    print_text(line)
