"""Where a result was measured, and the file it goes to."""

import importlib.metadata
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from safetrain.core.storage.files import write_text
from safetrain.plan.machine import chip_name

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, what: str, header: list[str], rows: list[list[object]], notes: Sequence[str] = ()) -> None:
    """Write a Markdown table, with notes below it, to benchmarks/results and print it."""
    write_text(RESULTS / f"{name}.md", show_result(name, what, header, rows, notes))


def show_result(name: str, what: str, header: list[str], rows: list[list[object]], notes: Sequence[str] = ()) -> str:
    """Print the same without keeping it; returns it."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("mlx", "mlx-lm"))
    where = f"{platform.system()}, {chip_name()}, {versions}, Python {platform.python_version()}"
    lines = [f"# {what}", "", f"{datetime.now(UTC):%Y-%m-%d}, {where}. Run again: `python -m benchmarks.{name}`", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    lines += [line for note in notes for line in ("", note)]
    text = "\n".join(lines) + "\n"
    print(text)
    return text
