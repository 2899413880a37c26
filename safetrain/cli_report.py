"""The command `safetrain report`: one page about a run, or two runs side by side."""

from collections.abc import Sequence
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
        list[str] | None, typer.Option(metavar="REV|EXP", help="beside this commit or experiment; twice: these two")
    ] = None,
) -> None:
    """Write a page about the last run, or about two side by side.

    Result, answers, curves, memory, data, configuration and its reasons, and after a death the verdict. It is one file
    that loads nothing. --compare writes checkpoints_qlora/compare.html instead: two runs side by side,
    differences first.
    """
    from safetrain.watch.report_page.rendering import write_report
    from safetrain.watch.report_page.run_records import FolderFiles, read_records

    require_project()
    usual = COMPARISON if compare else paths.REPORT
    target = usual if out is None else _target(out, usual)
    if compare:
        _compare(compare, target)
    else:
        write_report(read_records(FolderFiles(Path())), target)
    print(f"{target}: open it in a browser")


def _target(out: Path, usual: Path) -> Path:
    """Where somebody wants the page: a new file, or the ``usual`` one, which is written anew each time."""
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


def _compare(revisions: Sequence[str], target: Path) -> None:
    """What DVC and Git have of ``revisions``; of one alone beside what is in the folder now."""
    from safetrain.core.storage.files import write_text
    from safetrain.watch.report_page.comparing import compare_page_of
    from safetrain.watch.report_page.rendering import render
    from safetrain.watch.report_page.revisions import FETCH, RevisionFiles
    from safetrain.watch.report_page.run_records import FolderFiles, read_records
    from safetrain.watch.report_page.shown import AbsentPart

    if len(revisions) > 2:
        raise ConfigError("Two runs can be compared.", got=", ".join(revisions), do="name --compare once or twice")
    opened = [RevisionFiles(Path(), revision) for revision in revisions]
    runs = [read_records(files) for files in opened]
    runs += [read_records(FolderFiles(Path(), "this folder"))] if len(runs) == 1 else []
    lost = [(files.name, file) for files in opened for file in files.lost]
    absent = [AbsentPart(f"{name}: DVC has no {file} of it, in its cache or at all.", FETCH) for name, file in lost]
    page = compare_page_of(runs[0], runs[1], absent)
    write_text(target, render(page))
    print(page.verdict)
