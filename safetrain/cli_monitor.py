"""The command `safetrain monitor`: look at a training from another terminal. It reads records and changes nothing."""

import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safetrain.core.errors import ConfigError
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths

if TYPE_CHECKING:
    from safetrain.watch.monitor import MonitorView

NO_BRAILLE, NO_CURSOR = ("linux", "vt100", "vt220"), ("dumb", "unknown")  # values of TERM
GONE_LOOKS = 3  # in a row without a training before it has ended: two processes or stages have a gap between them


def monitor(
    refresh: Annotated[float, typer.Option(min=0.2, max=3600, help="seconds between two readings")] = 5.0,
    plain: Annotated[bool, typer.Option("--plain", help="a line of text for each reading, for a log")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each reading, for a script")] = False,
    once: Annotated[bool, typer.Option("--once", help="read once, and end")] = False,
    output: Annotated[Path, typer.Option(help="folder of the run")] = paths.OUTPUT,
) -> None:
    """Watch a training from a second terminal, or see how it ended.

    Shows losses, speed, memory, the current phase, checkpoints and time left. Ctrl-C leaves; the training goes on.
    """
    from safetrain.core.run_folder import FolderFiles, RunReader
    from safetrain.watch.monitor import json_line, look_at
    from safetrain.watch.monitor_screen import plain_line

    if plain and as_json:
        raise ConfigError("--plain and --json are two ways to print.", do="leave one of them out")
    if not output.is_dir() and not (output.name == paths.OUTPUT.name and (output.parent / "params.yaml").is_file()):
        if output != paths.OUTPUT:
            raise ConfigError("The folder does not exist.", where=str(output), do="name the folder of a run: --output")
        raise ConfigError(
            "This folder is not a safetrain project.", where=str(Path.cwd()), do="go to the project's root"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal does not have
    reader, is_drawn = RunReader(FolderFiles(output)), sys.stdout.isatty() and os.environ.get("TERM") not in NO_CURSOR
    show, project = _draw if is_drawn and not plain and not as_json else _print_lines, output.resolve().parent
    try:
        show(lambda: look_at(reader, project), json_line if as_json else plain_line, refresh, once)
    except Terminated:
        raise
    except KeyboardInterrupt:  # how one leaves
        return


def _print_lines(
    look: "Callable[[], MonitorView]", line_of: "Callable[[MonitorView], str]", refresh: float, once: bool
) -> None:
    """Print a line for each look, until the training has ended; that is the last line."""
    view, gone = look(), 0
    print(line_of(view), flush=True)
    while not once and (view.state.is_running or 0 < gone < GONE_LOOKS):
        time.sleep(min(refresh, 1.0) if gone else refresh)
        view = look()
        gone = 0 if view.state.is_running else gone + 1
        if gone in (0, GONE_LOOKS):
            print(line_of(view), flush=True)


def _draw(
    look: "Callable[[], MonitorView]", line_of: "Callable[[MonitorView], str]", refresh: float, once: bool
) -> None:
    """Draw until the user leaves; once, if nothing runs."""
    from rich.console import Console
    from rich.live import Live

    from safetrain.watch.monitor_screen import MonitorScreen

    console = Console(highlight=False, markup=False, emoji=False)
    braille = console.encoding.lower().startswith("utf") and os.environ.get("TERM") not in NO_BRAILLE
    view = look()
    if once or not view.state.is_running:
        console.print(MonitorScreen(view, braille=braille), height=min(max(console.height - 2, 24), 40))
        return
    try:
        with Live(MonitorScreen(view, braille=braille), console=console, screen=True, refresh_per_second=1) as live:
            while True:
                time.sleep(refresh)
                view = look()
                live.update(MonitorScreen(view, braille=braille), refresh=True)
    finally:
        print(line_of(view), flush=True)
