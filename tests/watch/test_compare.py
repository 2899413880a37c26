"""Two runs side by side: differences come first."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.run_folder import Run, RunReader
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.watch.compare import write_comparison
from tests.support.settings import SETTINGS
from tests.watch.made_run import data_report, evaluation, make_run, sample
from tests.watch.test_report import Parsed


def run(folder: Path, name: str, gain: float = 1.5, rows: int = 40, base: str = "models/tiny", **changes: float) -> Run:
    settings = dataclasses.replace(SETTINGS, **changes)  # type: ignore[arg-type]
    make_run(folder / name, found=evaluation((sample("What?"),), gain), settings=settings, base_model=base)
    write_record(folder / name / paths.DATA_REPORT, data_report(rows=rows))
    return RunReader(folder / name / paths.OUTPUT, name).read()


def compared(folder: Path, first: Run, second: Run) -> str:
    write_comparison(first, second, folder / "compare.html")
    return Parsed((folder / "compare.html").read_text()).text


def test_what_differs_comes_first(tmp_path: Path) -> None:
    text = compared(tmp_path, run(tmp_path, "first", 0.5, learning_rate=1e-4), run(tmp_path, "second", rows=50))
    assert text.index("gain over the base, nats per label 0.5 ± 0.25 1.5 ± 0.25") < text.index("The same in both")
    assert text.index("train.learning_rate 0.0001 0.005") < text.index("The same in both") < text.index("test rows 9 9")
    for part in ("test loss of the tuned model 2.5 1.5", "train: rows, tokens, labels 40, 400, 100 50, 400, 100"):
        assert part in text, part
    bare = dataclasses.replace(run(tmp_path, "third"), name="bare", evaluation=None, summary=None)
    text = compared(tmp_path, bare, run(tmp_path, "fourth"))
    for part in ("bare: it has no evaluation.", "bare: no training has finished", "best validation loss – 0.45"):
        assert part in text, part


def test_the_command_writes_where_it_is_told_and_over_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("safetrain.watch.report.pictures", lambda _run: {})  # they take a second
    usual, named = (CliRunner().invoke(app, ["report", *words]) for words in ((), ("--out", "out/mine.html")))
    assert usual.exit_code == named.exit_code == 0, usual.output + named.output
    assert (tmp_path / "out/mine.html").read_bytes() == (tmp_path / paths.REPORT).read_bytes()
    Path("gone.html").symlink_to("nowhere")
    refused = {("--out", "out"): "is an HTML page", ("--compare", "HEAD"): "not a DVC project",
               ("--out", "params.yaml"): "is an HTML page", ("--out", "out/mine.html"): "already exists",
               ("--out", "gone.html"): "already exists", ("--compare", "a") * 3: "Only two runs"}  # fmt: skip
    for words, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert CliRunner().invoke(app, ["report", "--out", str(paths.REPORT)]).exit_code == 0
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="not a safetrain project"):
        CliRunner().invoke(app, ["report"], catch_exceptions=False)
