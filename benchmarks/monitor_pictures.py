"""Draws what `safetrain monitor` shows of a run, now, as a picture for docs/monitor.md.

    python -m benchmarks.monitor_pictures checkpoints_qlora docs/pictures/monitor_training_80x24.svg --size 80 24

`--later 900` shows the same records as they look that many seconds after.
"""

import argparse
import dataclasses
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

from safetrain.core.storage.files import write_text
from safetrain.watch.monitor import screen_of, view_of
from safetrain.watch.run_folder import read_run

THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def main() -> None:
    """Write one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the folder of the run")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", type=int, nargs=2, default=(80, 24), metavar=("COLUMNS", "LINES"))
    parser.add_argument("--later", type=float, default=0.0)
    parser.add_argument("--theme", choices=THEMES, default="dark")
    asked = parser.parse_args()
    run = read_run(asked.output)
    later = dataclasses.replace(
        run,
        read_at_seconds=run.read_at_seconds + asked.later,
        read_at_monotonic_seconds=run.read_at_monotonic_seconds + asked.later,
    )
    width, height = asked.size
    console = Console(file=io.StringIO(), record=True, width=width, height=height, highlight=False,
                      force_terminal=True, color_system="standard")  # fmt: skip
    console.print(screen_of(view_of(later)))
    drawn = console.export_svg(title="safetrain monitor", theme=THEMES[asked.theme], font_aspect_ratio=0.6)
    write_text(asked.picture, FONT.sub("", drawn))  # which would be fetched from the web


if __name__ == "__main__":
    main()
