"""Two runs side by side: what differs comes first, and which is better is said by the intervals alone."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.records.record_files import write_record
from safetrain.core.storage import paths
from safetrain.watch.report_page.comparing import compare_page_of, verdict_on_both
from safetrain.watch.report_page.rendering import render
from safetrain.watch.report_page.run_records import FolderFiles, WholeRun, read_records
from safetrain.watch.report_page.shown import ComparePage
from tests.support.settings import SETTINGS
from tests.watch.made_run import data_report, evaluation, make_run, sample
from tests.watch.test_report_page import Parsed

WRONG = dataclasses.replace(sample("Where?"), tuned="<b>elsewhere</b>")


def run(folder: Path, name: str, gain: float = 1.5, **changes: object) -> WholeRun:
    answers = (sample("What?"), WRONG if gain < 1.5 else sample("Where?"))
    make_run(folder / name, found=evaluation(answers, gain), settings=dataclasses.replace(SETTINGS, **changes))  # type: ignore[arg-type]
    return read_records(FolderFiles(folder / name, name))


def compared(folder: Path) -> ComparePage:
    return compare_page_of(run(folder, "first", 0.5, learning_rate=1e-4), run(folder, "second", 1.5))


def test_what_differs_comes_first(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert [each.name for each in found.configuration] == ["train.learning_rate"]
    assert (found.configuration[0].first, found.configuration[0].second) == ("0.0001", "0.005")
    assert {each.name for each in found.metrics} == {
        "gain over the base, nats per label", "test loss of the tuned model",
    }  # fmt: skip
    assert (found.data, found.environment, found.missing) == ((), (), ())
    assert len(found.same) > 50
    text = Parsed(render(found)).text
    assert text.index("second is better") < text.index("train.learning_rate") < text.index("The same in both")
    assert "Of 2 questions that both records keep, 1 are answered otherwise." in text
    assert "first, not exact ✗ <b>elsewhere</b> second, exact ✓ expected Where?" in text


@pytest.mark.parametrize(
    ("gains", "said"),
    [((0.5, 1.5), "second is better"), ((1.5, 0.5), "first is better"), ((1.5, 1.2), "No difference is shown")],
)
def test_the_verdict_is_by_the_intervals(tmp_path: Path, gains: tuple[float, float], said: str) -> None:
    verdict, _ = verdict_on_both(run(tmp_path, "first", gains[0]), run(tmp_path, "second", gains[1]))
    assert verdict.startswith(said)
    assert f"{gains[0]:.3f} ± 0.25 (first)" in verdict


def test_other_test_rows_cannot_be_compared(tmp_path: Path) -> None:
    first, second = run(tmp_path, "first", 0.5), run(tmp_path, "second")
    write_record(tmp_path / "second" / paths.DATA_REPORT, data_report(rows=50))
    other = read_records(FolderFiles(tmp_path / "second", "second"))
    assert "They were measured on other test rows" in verdict_on_both(first, other)[0]
    assert {each.name for each in compare_page_of(first, other).data} >= {"test: rows", "train: rows"}
    assert "second is better" in verdict_on_both(first, second)[0]


def test_a_part_that_one_of_them_lacks_is_named(tmp_path: Path) -> None:
    first = run(tmp_path, "first")
    (tmp_path / "first" / paths.EVALUATION).unlink()
    found = compare_page_of(read_records(FolderFiles(tmp_path / "first", "first")), first)
    assert found.verdict == "Which one is better cannot be said: not both have been evaluated."
    assert [part.why for part in found.missing] == ["first: it has no evaluation."]


def test_the_command_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    usual, named = (CliRunner().invoke(app, ["report", *words]) for words in ((), ("--out", "out/mine.html")))
    assert usual.exit_code == named.exit_code == 0, usual.output + named.output
    assert (tmp_path / "out/mine.html").read_bytes() == (tmp_path / paths.REPORT).read_bytes()
    for words, said in ((("--out", "out"), "This is a folder"), (("--compare", "HEAD"), "no DVC project here")):
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    for own in (["--out", str(paths.REPORT)], []):  # its own place, which the stage writes too
        assert CliRunner().invoke(app, ["report", *own]).exit_code == 0
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="no safetrain project here"):
        CliRunner().invoke(app, ["report"], catch_exceptions=False)


def test_a_report_is_written_over_nobody_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("mine")
    Path("gone.html").symlink_to("nowhere")
    cases = {"params.yaml": "is an HTML page", "data.jsonl": "is an HTML page", "mine.html": "exists already",
             "gone.html": "exists already", str(paths.OUTPUT / "compare.html"): ""}  # fmt: skip
    for name, said in cases.items():
        before = Path(name).read_bytes() if Path(name).is_file() else None
        ending = CliRunner().invoke(app, ["report", "--out", name])
        assert (said in str(ending.exception)) if said else ending.exit_code == 0, (name, ending.exception)
        assert not said or (Path(name).read_bytes() if Path(name).is_file() else None) == before
