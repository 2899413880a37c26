"""The report: one page tells a run, whatever became of it, loads nothing and shows all texts as text."""

import dataclasses
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.params_file import with_value
from safetrain.core.recorder import RunMarker
from safetrain.core.records.evaluation import Improvement
from safetrain.core.records.reports import Finding
from safetrain.core.records.settings import Rung, TrainJob
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.watch.report import write_report
from safetrain.watch.result import describe_evaluation, describe_result, unmeasured
from safetrain.watch.run_folder import read_run
from tests.conftest import ROOT
from tests.support.settings import SETTINGS
from tests.watch.made_run import DEATH, UPDATES, change, data_report, evaluation, journal, make_dead, make_run, sample

HOSTILE = (
    "<script>document.title='PWNED'</script>", '"><img src=http://evil.example/x onerror=alert(1)>',
    "</style></title></svg></main><h1>OWNED</h1>", "{{ 7*7 }}{% raw %}", "<!-- <iframe src=//evil.example>", "&lt;",
)  # fmt: skip
UNSEEN = "\u202eabc\u202c \u200f \x1b]0;t\x07 \x00 \U000e0041"


class Parsed(HTMLParser):
    """Tags and attributes of a page, the text between them, and whether each tag is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.words, self.open, self.attributes = set[str](), list[str](), list[str](), set[str]()
        self.feed(text)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += [] if tag in ("meta", "br", "img") else [tag]
        assert all((value or "").startswith("data:image/png;base64,") for name, value in attrs if name == "src")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(folder: Path) -> str:
    write_report(read_run(folder / paths.OUTPUT), folder / "page.html")
    return (folder / "page.html").read_text()


def told(folder: Path) -> str:
    """The page's text. Pictures take a second, and have tests of their own."""
    with patch("safetrain.watch.report.pictures", return_value={}):
        return Parsed(page(folder)).text


def test_a_healthy_run_is_told_whole_by_a_page_that_loads_nothing(tmp_path: Path) -> None:
    first, other = sample("What is it?"), sample("Where is it?", 2)
    found = dataclasses.replace(evaluation((first,)), worst=(first, other))
    make_run(tmp_path, found=found, valid_rows=50, valid_rows_available=2000)
    source = page(tmp_path)
    text = Parsed(source).text
    for part in (
        "Test loss 3.000 → 1.500 nats per token: better by 1.50 ± 0.25", "Validation measured 50 of 2,000 rows",
        "train.learning_rate 0.005 recommended width 64 and its scale", "1.80 GiB 90 % of the prediction",
        "What is it? expected expected What is it? base base What is it? tuned",
        "train 40 400 100",
    ):  # fmt: skip
        assert part in text, part
    assert (text.count("Missing:"), "Interruptions" in text, source.count("<img")) == (0, False, 5)
    parsed = Parsed(source)
    assert not parsed.tags & {"script", "link", "iframe", "object", "embed", "image", "base", "a"}
    assert not any(name.startswith("on") or name in ("srcset", "href") for name in parsed.attributes)
    assert not re.search(r"url\(|@import|https?:", source)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in source


def test_a_notebook_s_matplotlib_backend_that_is_not_installed_here_is_not_used(tmp_path: Path) -> None:
    """`!safetrain report` in a notebook inherits the kernel's backend, which another Python has."""
    make_run(tmp_path)
    command = [sys.executable, "-m", "safetrain.cli", "report"]
    environment = os.environ | {"MPLBACKEND": "not_installed", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    wild = tuple(sample(text, number) for number, text in enumerate((*HOSTILE, UNSEEN, "long " * 2000)))
    make_run(tmp_path, found=evaluation(wild * 20), base_model=HOSTILE[1])
    finding = Finding("ANSWER-LOST", "error", 56, HOSTILE * 20, HOSTILE[0], HOSTILE[1])
    write_record(tmp_path / paths.DATA_REPORT, dataclasses.replace(data_report((finding,) * 90), source=HOSTILE[2]))
    change(tmp_path / paths.MACHINE, chip="\ud800 half a pair")
    text = page(tmp_path)
    parsed = Parsed(text)
    assert (parsed.tags & {"script", "iframe"}, "onerror" in parsed.attributes) == (set(), False)
    assert (text.count("<h1>"), r"\ud800 half a pair" in text) == (1, True)
    assert all(any(shown in word for word in parsed.words) for shown in HOSTILE)
    assert r"\u202eabc\u202c \u200f \x1b]0;t\x07 \x00 \U000e0041" in parsed.text
    assert ("(9,400 more)" in text, len(text.encode()) < 1.3e6) == (True, True)


def test_a_run_that_died_shows_the_verdict_first(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    text = told(tmp_path)
    assert text.index("Ended badly: the system killed it for lack of memory (confirmed)") < text.index("Answers")
    for part in ("2027-01-15 08:00 UTC", "gradient of step 17, micro-batch 1: 2 rows, 80 tokens (train.jsonl lines 3,",
                 "everything up to step 16", "Killed process 4711", "16 updates recorded", "No result yet",
                 "Missing: The base and tuned models have not been compared yet. Run safetrain run"):  # fmt: skip
        assert part in text, part
    change(output / "postmortem.json", cause="stopped", title="stopped by SIGINT")
    text = told(tmp_path)
    assert ("Stopped: stopped by SIGINT" in text, "stopped, saved" in text, "badly" in text) == (True, True, False)


def test_of_a_death_that_the_run_survived_one_line_is_told_and_none_of_an_earlier_run(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    (output / "flight").mkdir()
    journal(output, (1.79e9, "Started", {}), (1.79e9, "Begun", {"resumed_from_step": 0}),
            (1.8e9, "Died", {"title": "killed", "step": 17}), (1.81e9, "Begun", {"resumed_from_step": 16}))  # fmt: skip
    write_record(output / "flight/run.json", RunMarker("another boot", "dvc repro", 2e9))
    text = told(tmp_path)
    assert "gone: run safetrain diagnose" in text
    assert ("ended at step 17: killed" in text, "Next:" in text, "continued with less" in text) == (True, False, False)
    assert "lack of memory" not in text
    write_record(make_run(tmp_path / "next") / "postmortem.json", DEATH)
    assert "lack of memory" not in told(tmp_path / "next")


def test_steps_down_for_memory_are_told_and_marked(tmp_path: Path) -> None:
    rungs = tuple(f"step {step}: 2 x 2 rows per update: out of memory" for step in (7, 11))
    settings = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=4)
    make_run(tmp_path, settings=settings, memory_rungs=rungs, resumed_from_step=10)
    output = make_dead(tmp_path / "dead")
    rung = Rung(SETTINGS, 7, "killed")
    job = TrainJob("tiny", settings, False, MemoryBudget(9, 1), None, rungs=(rung,))
    write_record(output / "flight/job.json", job)
    for folder, parts in ((tmp_path, ("finished, settings lowered 2 times", f"{rungs[1]}; continued with less memory",
                                      "the last process continued from step 10")),
                          (tmp_path / "dead", ("step 7: 2 x 2 rows per update, at most 64 tokens each",))):  # fmt: skip
        text = told(folder)
        assert all(part in text for part in (*parts, "train.batch_size 1 lowered for memory recommended: 2"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"reasons": 3}'])
def test_missing_and_damaged_parts_are_named(tmp_path: Path, content: bytes) -> None:
    text = told(tmp_path)
    assert text.count("Missing:") == 6
    assert text.count("Run safetrain run") == 6
    output = make_run(tmp_path)
    names = ("data_report", "evaluation", "training_summary", "machine", "recommended_config", "postmortem")
    for name in names:
        (output / f"{name}.json").write_bytes(content)
    (output / "training_metrics.csv").write_bytes(b"a,b\n1,2\n")
    text = told(tmp_path)
    assert all(f"checkpoints_qlora/{name}.json" in text for name in names)
    assert "checkpoints_qlora/training_metrics.csv : its columns are a, b" in text


def test_empty_answers_and_an_evaluation_of_another_adapter_are_named_in_the_verdict(tmp_path: Path) -> None:
    silent = tuple(dataclasses.replace(sample(text, number), tuned=" ") for number, text in enumerate(("A?", "B?")))
    make_run(tmp_path, found=evaluation((*silent, sample("C?", 3))))
    text = told(tmp_path)
    assert "better by 1.50 ± 0.25 (95 %, 9 rows). But 2 of the tuned model's 3 recorded answers are empty." in text
    assert "(empty answer)" in text
    (tmp_path / paths.ADAPTERS / "adapters.safetensors").write_bytes(b"others")
    assert "This adapter has not been evaluated" in told(tmp_path)
    (tmp_path / paths.EVALUATION).unlink()
    assert "Validation loss: 3.000 before, 0.450 at step 25." in told(tmp_path)


def test_the_command_writes_the_page_in_a_project_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("safetrain.watch.report.pictures", lambda _run: {})  # they take a second
    assert CliRunner().invoke(app, ["report"], catch_exceptions=False).exit_code == 0
    assert paths.REPORT.read_text().startswith("<!DOCTYPE html>")
    Path("out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="not a safetrain project"):
        CliRunner().invoke(app, ["report"], catch_exceptions=False)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished run, in a project of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAFETRAIN_RUN", raising=False)
    return make_run(tmp_path, found=evaluation((sample("Why?"), sample("How?"))), train_rows=1656)


def test_it_says_what_was_learned_and_what_to_type_next(output: Path) -> None:
    done = CliRunner().invoke(app, ["result"], catch_exceptions=False)
    for line in (
        f"Trained {UPDATES} steps on 1,656 rows, seen 0.07 times on average, in 30 s, learning rate 0.005.",
        "Exact match on 9 test questions: base 10.0 %, tuned 10.0 % (95 %: 5 to 30 %), "
        "no clear difference, 0.0 points (-10 to 10).",
        "Test loss 3.000 → 1.500 nats per token: better by 1.50 ± 0.25 (95 %, 9 rows).",
        'Next:  safetrain ask "Why?" --base',
    ):
        assert line in done.stdout.splitlines()
    assert "Forgetting: general text loss +0.10 ± 0.02 nats per token (English +0.10 ± 0.02, " in done.stdout


@pytest.mark.parametrize(("gain", "half", "words"), [
    (-0.3, 0.1, "worse by 0.30 ± 0.10 (95 %, 9 rows)"),
    (0.01, 0.05, "no clear difference, better by 0.01 ± 0.05 (95 %, 9 rows)"),
    (0.0021, 0.0004, "better by 0.0021 ± 0.0004 (95 %, 9 rows)"),
    (0.5, None, "better by 0.50 on one row: no confidence interval"),
])  # fmt: skip
def test_a_difference_has_its_interval(gain: float, half: float | None, words: str) -> None:
    scores = dataclasses.replace(evaluation(()), improvement=Improvement(gain, half, 9))
    assert describe_evaluation(scores)[0].endswith(f"nats per token: {words}.")


@pytest.mark.parametrize("question", ['say "x"', "$HOME?", "`id`", "long " * 40])
def test_a_question_that_a_shell_would_change_is_not_offered(tmp_path: Path, question: str) -> None:
    empty = dataclasses.replace(sample(question), base="", tuned=" \n")
    output = make_run(tmp_path, found=evaluation((empty,)))
    text = describe_result(read_run(output))
    assert 'safetrain ask "..." --base' in text
    assert text.count("(empty)") == 2
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize(("least_gain", "code"), [(0.4, 0), (2.0, 1), (1.4, 2)])
def test_the_gate_is_about_the_adapter_that_is_there(output: Path, least_gain: float, code: int) -> None:
    text = (ROOT / "params.yaml").read_text()
    Path("conf").mkdir()
    Path("params.yaml").write_text(text.replace("least_gain:", "least_gian:"))
    with pytest.raises(ConfigError, match=r"gate\.least_gian: did you mean gate\.least_gain"):  # a typo is no verdict
        CliRunner().invoke(app, ["result", "--gate"], catch_exceptions=False)
    Path("params.yaml").write_text(with_value(text, "gate.least_gain", least_gain))
    assert CliRunner().invoke(app, ["result", "--gate"]).exit_code == code
    assert unmeasured(read_run()) == ""
    (paths.ADAPTERS / "adapters.safetensors").write_bytes(b"other weights")
    for command in (["result", "--gate"], ["result"]):
        failed = CliRunner().invoke(app, command).exception
        assert isinstance(failed, ConfigError)  # exit code 2
        assert "has not been evaluated" in str(failed)
    assert "'safetrain run' measures it" in unmeasured(read_run())
    paths.SUMMARY.unlink()
    assert "Nothing has been trained here yet" in str(CliRunner().invoke(app, ["result"]).exception)


@pytest.mark.parametrize("command", ["safetrain run experiment=minimal", "safetrain run"])
def test_next_steps_fit_the_way_it_was_run(output: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(paths.DATA_REPORT, source="data/example")
    monkeypatch.setenv("SAFETRAIN_RUN", command)
    text = describe_result(read_run())
    assert "safetrain run --data FILE " in text.splitlines()[-1]
    assert f"{command} train.learning_rate=2e-3 " in text
    change(paths.DATA_REPORT, source="data/mine.jsonl")
    assert "your data" not in describe_result(read_run())
    change(paths.SUMMARY, method="pretrain")
    assert f"{command} train.max_steps={2 * UPDATES} " in describe_result(read_run())
