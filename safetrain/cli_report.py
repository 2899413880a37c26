"""The command `safetrain report`: one page about a run, or about two."""

from pathlib import Path
from typing import Annotated

import typer

from safetrain.cli_project import require_project
from safetrain.core.errors import ConfigError
from safetrain.core.storage import paths

COMPARISON = paths.OUTPUT / "compare.html"


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
    from safetrain.watch.compare import compare as write_comparison
    from safetrain.watch.report import write_report

    require_project()
    if compare and len(compare) > 2:
        raise ConfigError("Only two runs can be compared.", got=", ".join(compare), do="give --compare once or twice")
    usual = COMPARISON if compare else paths.REPORT
    target = usual if out is None else _target(out, usual)
    if compare:
        print(write_comparison(compare, target))
    else:
        write_report(read_run(), target)
    print(f"{target}: open it in a browser")


def _target(out: Path, usual: Path) -> Path:
    """The file that --out names: a new one, or the ``usual`` one, which is written again each time."""
    from safetrain.core.storage.files import require_new

    if out.is_dir():
        raise ConfigError("This is a folder.", where=str(out), do=f"name a file: --out {out / 'report.html'}")
    if out.suffix != ".html":
        raise ConfigError(
            "The report is an HTML page.", where=str(out), expected="a name that ends with .html", got=out.name,
            do=f"--out {out.with_name(out.stem or 'report')}.html",
        )  # fmt: skip
    if out.resolve() != usual.resolve():
        require_new(out, "name another file, or remove this one first")
    return out
