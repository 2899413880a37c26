"""The command `safetrain monitor`: look at a training from another terminal. It reads records, and changes nothing."""

import io
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safetrain.core.errors import ConfigError
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, Group

    from safetrain.watch.monitor_chart import Glyphs
    from safetrain.watch.monitor_view import MonitorView

LOOK_SECONDS = 0.2  # between looks at the terminal's size
NO_BRAILLE = ("linux", "vt100", "vt220")
NO_CURSOR = ("dumb", "unknown")  # terminals in which nothing can be drawn over
LAST_COLUMNS, LAST_LINES = 100, 40  # of the last state where nothing runs, at the most


def monitor(
    refresh: Annotated[float, typer.Option(min=0.2, max=3600, help="seconds between two looks at the records")] = 5.0,
    plain: Annotated[bool, typer.Option("--plain", help="a line of text for each look, for a script or a log")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each look")] = False,
    once: Annotated[bool, typer.Option("--once", help="look once, and end")] = False,
    output: Annotated[Path, typer.Option(help="the folder of the run")] = paths.OUTPUT,
) -> None:
    """Watch a training from a second terminal, or see how it ended.

    Losses, speed, memory, phase and its age, checkpoints, time left. Ctrl-C leaves; the training never notices.
    Where no training runs, its last state is shown.
    """
    from safetrain.watch.monitor_files import RunReader
    from safetrain.watch.monitor_lines import json_line, plain_line
    from safetrain.watch.monitor_view import view_of

    if plain and as_json:
        raise ConfigError("--plain and --json are two ways to print.", do="leave one of them out")
    is_project_s = output.name == paths.OUTPUT.name and (output.parent / "params.yaml").is_file()
    if not output.is_dir() and not is_project_s:  # which the first run makes
        if output != paths.OUTPUT:
            raise ConfigError("There is no such folder.", where=str(output), do="name the folder of a run: --output")
        raise ConfigError("There is no safetrain project here.", where=str(Path.cwd()), do="go to the project's root")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have letters that this terminal has not
    reader = RunReader(output)

    def look() -> "MonitorView":
        return view_of(reader.read())

    def look_whole() -> "MonitorView":
        return view_of(reader.read(most_seconds=math.inf))

    try:
        if plain or as_json or not sys.stdout.isatty() or os.environ.get("TERM") in NO_CURSOR:
            _print_lines(look_whole, json_line if as_json else plain_line, refresh, once=once)
        else:
            _watch(look, look_whole, refresh, once=once)
    except Terminated:
        raise
    except KeyboardInterrupt:  # how one leaves
        return


def _print_lines(
    look: "Callable[[], MonitorView]", line_of: "Callable[[MonitorView], str]", refresh: float, *, once: bool
) -> None:
    """A line for each look, until the training has ended, which is the last line."""
    from safetrain.core.protocol.liveness import GONE_LOOKS

    seen, ended = look(), 0
    print(line_of(seen), flush=True)
    if once or not seen.state.is_running:
        return
    while ended < GONE_LOOKS:
        time.sleep(min(refresh, 1.0) if ended else refresh)
        seen = look()
        ended = 0 if seen.state.is_running else ended + 1
        if seen.state.is_running or ended == GONE_LOOKS:
            print(line_of(seen), flush=True)


def _watch(
    look: "Callable[[], MonitorView]", look_whole: "Callable[[], MonitorView]", refresh: float, *, once: bool
) -> None:
    """Draw anew at each look, and when the terminal has another size, until somebody leaves."""
    from rich.console import Console
    from rich.live import Live

    from safetrain.watch.monitor_lines import plain_line

    console = Console(highlight=False, markup=False, emoji=False)
    view = look_whole() if once else look()
    if once or not (view.state.is_running or view.curves.unread_bytes):
        _print_last(console, look_whole())
        return
    glyphs = glyphs_of(console)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                size = _size()
                live.update(_drawn(view, size, glyphs), refresh=True)
                if not view.curves.unread_bytes:
                    _wait(refresh, size)
                view = look()
    finally:
        print(plain_line(view), flush=True)


def _wait(seconds: float, size: tuple[int, int]) -> None:
    """Until it is time for another look, or the terminal's size is another."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and _size() == size:
        time.sleep(min(LOOK_SECONDS, left))


def _size() -> tuple[int, int]:
    found = shutil.get_terminal_size()
    return found.columns, found.lines


def _print_last(console: "Console", view: "MonitorView") -> None:
    """The last state of what no longer runs."""
    from safetrain.watch.monitor_lines import plain_line
    from safetrain.watch.monitor_state import State

    if view.state is State.NOTHING:
        print("nothing has been trained here yet: dvc repro, or safetrain run")
        return
    columns, lines = _size()
    if columns < 20:
        print(plain_line(view))
        return
    console.print(_drawn(view, (min(columns, LAST_COLUMNS), min(max(lines - 2, 24), LAST_LINES)), glyphs_of(console)))


def _drawn(view: "MonitorView", size: tuple[int, int], glyphs: "Glyphs") -> "Group":
    from safetrain.watch.monitor_screen import screen_of

    return screen_of(view, *size, glyphs)


def glyphs_of(console: "Console") -> "Glyphs":
    """Letters that the terminal has: Linux's own console knows no braille."""
    from safetrain.watch.monitor_chart import ASCII, UNICODE

    utf8 = console.encoding.lower().replace("-", "").startswith("utf8")
    return UNICODE if utf8 and os.environ.get("TERM") not in NO_BRAILLE else ASCII
