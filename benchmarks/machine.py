"""Where a result was measured, and the file it goes to."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path

from safetrain.core.files import write_text
from safetrain.plan.machine import chip_name

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, what: str, header: list[str], rows: list[list[object]]) -> None:
    """Write a Markdown table to benchmarks/results and print it."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("mlx", "mlx-lm"))
    where = f"{platform.system()}, {chip_name()}, {versions}, Python {platform.python_version()}"
    lines = [f"# {what}", "", f"{datetime.now(UTC):%Y-%m-%d}, {where}. Run again: `python -m benchmarks.{name}`", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    text = "\n".join(lines) + "\n"
    write_text(RESULTS / f"{name}.md", text)
    print(text)
