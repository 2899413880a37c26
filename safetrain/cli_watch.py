"""The commands of `safetrain` that look at a run: monitor and report."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import print_text, similar_path
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths
from safetrain.project import require_project

if TYPE_CHECKING:
    from rich.console import Console

    from safetrain.watch.run_folder import RunReader

GONE_LOOKS = 3  # readings in a row without a process mean that the run has ended: there are gaps between processes


def monitor(
    refresh: Annotated[float, Option(min=0.2, max=3600, help="seconds between readings")] = 5.0,
    plain: Annotated[bool, Option("--plain", help="print a line of text per reading, for a log")] = False,
    once: Annotated[bool, Option("--once", help="read once, and exit")] = False,
    output: Annotated[Path, Option(help="folder of the run")] = paths.OUTPUT,
) -> None:
    """Watch a training run from a second terminal, or see how it ended.

    Shows losses, speed, memory, the current phase, checkpoints and time left. Ctrl-C leaves; training continues.
    """
    from rich.console import Console

    from safetrain.watch.run_folder import RunReader

    if not output.is_dir() and output == paths.OUTPUT:
        require_project()
    elif not output.is_dir():
        do = similar_path(output) or "name the folder of a run: --output"
        raise ConfigError("The folder does not exist.", where=output, do=do)
    reader, screen = RunReader(output), Console(highlight=False, markup=False, emoji=False)
    try:
        if plain or not sys.stdout.isatty() or screen.is_dumb_terminal or screen.options.ascii_only:
            _print_lines(reader, refresh, once)
        else:
            _draw(reader, refresh, once, screen)
    except Terminated:
        raise
    except KeyboardInterrupt:  # the user leaves
        return


def _print_lines(reader: "RunReader", refresh: float, once: bool) -> None:
    """Print a line for each reading until the training has ended; the last line says so."""
    from safetrain.watch.monitor import look_at, plain_line

    gone = GONE_LOOKS - 1
    while True:
        view = look_at(reader)
        gone = 0 if view.state.is_running else gone + 1
        if gone in (0, GONE_LOOKS):
            print(plain_line(view), flush=True)
        if once or gone == GONE_LOOKS:
            return
        time.sleep(min(refresh, 1.0) if gone else refresh)


def _draw(reader: "RunReader", refresh: float, once: bool, screen: "Console") -> None:
    """Draw until the user leaves, or only once if nothing is running."""
    from rich.live import Live

    from safetrain.watch.monitor import look_at, plain_line, screen_of

    view = look_at(reader)
    if once or not view.state.is_running:
        screen.print(screen_of(view))
        return
    try:
        with Live(screen_of(view), console=screen, screen=True, refresh_per_second=1) as live:
            while True:
                time.sleep(refresh)
                view = look_at(reader)
                live.update(screen_of(view), refresh=True)
    finally:
        print_text(plain_line(view).replace("  ", "\n"))


def report() -> None:
    """Write checkpoints_qlora/report.html, a page about the last run: one self-contained file."""
    from safetrain.watch.report import write_report
    from safetrain.watch.run_folder import read_evaluated

    require_project()
    write_report(read_evaluated(), paths.REPORT)
    print(f"{paths.REPORT}: open it in a browser")
