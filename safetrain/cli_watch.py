"""The commands of `safetrain` that look at a run: monitor, report, page and diagnose."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from safetrain.core.errors import AlreadyRunningError, ConfigError
from safetrain.core.formatting import print_text, run_again, similar_path
from safetrain.core.lock import training_lock
from safetrain.core.records.run_state import is_finished
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none
from safetrain.core.storage.paths import POSTMORTEM
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


def page(
    port: Annotated[int | None, Option(min=1, max=65535, help="port; default: the first free one from 8710")] = None,
    browser: Annotated[bool, Option("--browser/--no-browser", help="open it in the browser")] = True,
) -> None:
    """Show this project in the browser: check data, plan, train, watch, compare, ask.

    The page is for you alone: it listens on this machine only, and its address has a secret. It runs the commands that
    you could type. Closing it stops nothing.
    """
    from safetrain.page.server import serve

    try:
        serve(port, opens_browser=browser)
    except OSError as error:
        if port is None:
            raise
        raise ConfigError(f"Port {port} cannot be used: {error.strerror}.", do="leave --port out") from None


def diagnose(
    as_json: Annotated[bool, Option("--json", help="print checkpoints_qlora/postmortem.json")] = False,
) -> None:
    """Explain why the last training run died, even after a reboot."""
    from safetrain.core.postmortem import PostMortem, describe
    from safetrain.guard.postmortem import explain_unclosed

    require_project()

    path = paths.OUTPUT / POSTMORTEM
    try:
        with training_lock(paths.OUTPUT):
            death = explain_unclosed(paths.OUTPUT, run_again()) or read_or_none(path, PostMortem)
    except AlreadyRunningError as running:
        print(running.what, "What follows is about the previous training run.", file=sys.stderr)
        death = read_or_none(path, PostMortem)
    if death is None:
        print("null" if as_json else "No training run has failed here.")
        return
    if as_json:
        print(path.read_text(encoding="utf-8"), end="")
        return
    print_text(describe(death))
    if is_finished(paths.OUTPUT) and paths.SUMMARY.is_file() and paths.SUMMARY.stat().st_mtime > death.ended_seconds:
        print("A training run has finished since then: safetrain result")
