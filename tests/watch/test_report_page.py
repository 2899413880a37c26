"""The report: whatever became of a run, one page says it, loads nothing, and takes no text of the data for its own."""

import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from safetrain.core.protocol.marker import RunMarker

from safetrain.core.memory.budget import MemoryBudget
from safetrain.core.recorder import boot_id
from safetrain.core.records.job import Rung, Survival, TrainJob, memory_shape
from safetrain.core.records.metrics import COLUMNS
from safetrain.core.records.record_files import write_record
from safetrain.core.records.reports import Finding, GroupScore, Improvement
from safetrain.core.storage import paths
from safetrain.watch.curves import thinned
from safetrain.watch.long_runs import MOST_RECORDS, read_metrics
from safetrain.watch.report_page.page import page_of
from safetrain.watch.report_page.rendering import render, write_report
from safetrain.watch.report_page.run_records import FolderFiles, read_records
from tests.support.settings import SETTINGS
from tests.watch.made_run import DEATH, change, data_report, evaluation, make_dead, make_run, sample

MEGABYTE = 10**6
HOSTILE = (
    "<script>document.title='PWNED'</script>",
    '"><img src=http://evil.example/x onerror=alert(1)>',
    "</style></title></svg></main><h1>OWNED</h1>",
    "{{ 7*7 }}{% raw %}{{ page }}",
    "<!-- <iframe src=//evil.example>",
    "&lt;b&gt; &amp;amp;",
)
UNSEEN = "\u202eabc\u202c \u2066x\u2069 \u200f \x1b]0;t\x07 \x00 \U000e0041"


class Parsed(HTMLParser):
    """Tags that open, the text between them, and whether each is closed in its turn."""

    VOID = ("meta", "br", "path", "circle", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.words, self._open = set[str](), list[str](), list[str]()
        self.attributes = set[str]()
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(folder: Path) -> str:
    return render(page_of(read_records(FolderFiles(folder))))


def test_an_answer_is_shown_once(tmp_path: Path) -> None:
    """With a few test rows, those that are liked least and that changed most are the samples."""
    first, other = sample("What is it?"), sample("Where is it?", 2)
    found = dataclasses.replace(evaluation((first,)), worst=(first, other), most_changed=(other, first))
    make_run(tmp_path, found=found)
    text = page(tmp_path)
    assert (text.count("What is it?</p>"), text.count("Where is it?</p>")) == (1, 1)
    assert "changed most</summary>" not in text
    assert "Each is shown once" in text


def test_before_its_end_the_predicted_peak_is_what_the_dry_run_measured(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    change(output / "recommended_config.json", measured_peak_bytes=64 * 2**20, predicted_peak_bytes=82 * 2**20)
    text = Parsed(page(tmp_path)).text
    assert "64.0 MiB" in text
    assert "82.0 MiB" not in text


def test_a_healthy_run_is_told_whole(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = Parsed(page(tmp_path)).text
    assert "the tuned model is better than base by 1.50 ± 0.25 nats per label, n = 9." in text
    assert "General text costs 0.10 ± 0.02 nats per token more" in text
    assert "What is it? expected expected What is it? base base What is it? tuned, exact ✓" in text
    assert "train.learning_rate 0.005 recommended width 64 and its scale" in text
    assert "1.80 GiB 90 % of the prediction" in text
    assert "safetrain run model.path=models/tiny data.path=data/mine.jsonl train.method=lora" in text
    assert "Absent." not in text
    for part in ("Loss", "Learning rate", "Memory", "Speed", "Row lengths", "Environment", "median row"):
        assert part in text


def test_it_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = page(tmp_path)
    parsed = Parsed(text)
    assert parsed.tags & {"script", "img", "link", "iframe", "object", "embed", "image", "use", "a", "base"} == set()
    assert not any(name.startswith("on") or name in ("src", "href", "srcset") for name in parsed.attributes)
    assert not re.search(r"url\(|@import|https?:|//", text)
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    make_run(tmp_path)
    records = read_records(FolderFiles(tmp_path))
    for name in ("a.html", "b.html"):
        write_report(records, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    half = "\ud800 half a pair"
    wild = tuple(sample(text, number) for number, text in enumerate((*HOSTILE, UNSEEN, "long " * 2000)))
    groups = tuple(GroupScore(text, 9, 0.1, 0.5, 0.3, 0.7, Improvement(1.0, None, 1)) for text in HOSTILE)
    make_run(tmp_path / "plain", found=evaluation((sample("x"),), groups=groups[:0] or (groups[5],)))
    make_run(tmp_path / "wild", found=evaluation(wild * 20, groups=groups), base_model=HOSTILE[1])
    finding = Finding("CALL-LOST", "error", 56, HOSTILE * 20, HOSTILE[0], HOSTILE[1])
    report = dataclasses.replace(data_report((finding,) * 90), source=HOSTILE[2], stop_tokens=HOSTILE)
    for folder in ("plain", "wild"):
        write_record(tmp_path / folder / paths.DATA_REPORT, report if folder == "wild" else data_report((finding,)))
    change(tmp_path / "wild" / paths.MACHINE, chip=half)
    text = page(tmp_path / "wild")
    parsed, plain = Parsed(text), Parsed(page(tmp_path / "plain"))
    assert parsed.tags <= plain.tags | {"details", "summary"}
    assert parsed.attributes <= plain.attributes
    for shown in HOSTILE:
        assert shown in parsed.words or any(shown in word for word in parsed.words), shown
    assert r"\u202eabc\u202c \u2066x\u2069 \u200f \x1b]0;t\x07 \x00 \U000e0041" in parsed.text
    assert r"\ud800 half a pair" in parsed.text
    assert not set(UNSEEN) - set("abcx ]0;t") & set(text)
    assert "(9,400 more)" in text
    assert len(text.encode()) < MEGABYTE


def test_a_run_that_died_shows_the_verdict_first(tmp_path: Path) -> None:
    make_dead(tmp_path)
    text = Parsed(page(tmp_path)).text
    assert text.index("It ended badly: the system killed it for lack of memory (confirmed)") < text.index("Answers")
    assert "2027-01-15 08:00 UTC" in text
    assert "gradient of step 17, micro-batch 1: 2 rows, 80 tokens (data/validated/train.jsonl:3, 17)" in text
    assert "dies in backward (out of memory); the largest that passes: 1 row of at most 40 tokens" in text
    assert "everything up to step 16" in text
    assert "Killed process 4711" in text
    assert "16 updates recorded" in text  # the line that death has cut is left out
    assert "Absent. Base and tuned model have not been compared yet. This makes it: dvc repro" in text


def test_three_rungs_are_told_and_marked(tmp_path: Path) -> None:
    rungs = tuple(f"step {step}: 2 x 2 rows per update: out of memory" for step in (7, 11, 12))
    settings = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=4, gradient_checkpointing=True)
    output = make_run(tmp_path, settings=settings, memory_rungs=rungs, resumed_from_step=10)
    write_record(output / "postmortem.json", DEATH)
    found = page_of(read_records(FolderFiles(tmp_path)))
    text = Parsed(render(found)).text
    assert "finished, after 3 steps down" in text
    assert all(f"{rung}; it went on with less" in text for rung in rungs)
    assert "the last process continued from step 10" in text
    assert "It ended badly once, and went on: the system killed it" in text
    assert "train.batch_size 1 a rung recommended was 2" in text
    assert len(found.loss.upright) == 5  # type: ignore[union-attr]  # three rungs, a continuation, the best


def test_the_rungs_of_a_run_that_died_are_told(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    (output / "flight").mkdir()
    rungs = (Rung(memory_shape(SETTINGS), 7, "killed"),)
    smaller = dataclasses.replace(SETTINGS, batch_size=1, gradient_accumulation=4)
    survival = Survival(False, False, 2, None)
    job = TrainJob(
        "models/tiny", smaller, False, MemoryBudget(9, 1), None, survival, rungs, gpu_rungs=("step 9: in pieces",)
    )
    write_record(output / "flight/job.json", job)
    text = Parsed(page(tmp_path)).text
    assert "step 7: 2 x 2 rows per update, at most 64 tokens each, base dequantized: killed; it went on" in text
    assert "step 9: in pieces the last process had 1 x 4 rows per update" in text
    assert "train.batch_size 1 a rung recommended was 2" in text


def test_a_death_that_the_run_has_come_back_from_is_past(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    (output / "flight").mkdir()
    write_record(output / "flight/run.json", RunMarker(boot_id(), "dvc repro", 2e9, 1.0, os.getpid()))
    began = {"type": "Entry", "kind": "begun", "wall_seconds": 2e9, "monotonic_seconds": 1.0, "step": 16}
    (output / "flight/journal.jsonl").write_text(json.dumps(began) + '\n{"type": "Ent')
    found = page_of(read_records(FolderFiles(tmp_path)))
    assert (found.state, found.death) == ("running", None)
    assert found.gone_on is not None
    assert found.gone_on.death is not None
    assert "Next:" not in render(found)
    assert [mark.name for mark in found.loss.upright] == ["", "best 0.8"]  # type: ignore[union-attr]


@pytest.mark.parametrize("marker", [b"{}", b'{"supervisor_pid": null', None])
def test_a_training_whose_supervisor_is_gone_is_not_called_running(tmp_path: Path, marker: bytes | None) -> None:
    flight = make_dead(tmp_path) / "flight"
    flight.mkdir()
    write_record(flight / "run.json", RunMarker("another boot", "dvc repro", 2e9, 1.0, os.getpid()))
    if marker is not None:
        (flight / "run.json").write_bytes(marker)
    assert page_of(read_records(FolderFiles(tmp_path))).state == "ended without a word: safetrain diagnose says why"


def test_between_two_rungs_nothing_is_called_a_death(tmp_path: Path) -> None:
    change(make_dead(tmp_path) / "postmortem.json", went_on=True, next_command="nothing: it went on by itself")
    found = page_of(read_records(FolderFiles(tmp_path)))
    assert (found.state, found.death) == ("unfinished", None)
    assert "It ended badly:" not in render(found)


def test_a_verdict_that_is_older_than_the_last_process_is_past(tmp_path: Path) -> None:
    flight = make_dead(tmp_path) / "flight"
    flight.mkdir()
    began = {"type": "Entry", "kind": "begun", "wall_seconds": 2e9, "monotonic_seconds": 1.0, "step": 16}
    (flight / "journal.jsonl").write_text(json.dumps(began) + "\n")
    found = page_of(read_records(FolderFiles(tmp_path)))
    assert (found.state, found.death) == ("unfinished", None)


def test_who_stopped_a_training_is_not_told_that_it_ended_badly(tmp_path: Path) -> None:
    output = make_dead(tmp_path)
    change(output / "postmortem.json", cause="stopped", title="it was asked to stop (SIGINT)", is_memory=False)
    found = page_of(read_records(FolderFiles(tmp_path)))
    assert (found.state, found.tone) == ("stopped, saved", "open")
    text = render(found)
    assert "It was stopped: it was asked to stop (SIGINT) (confirmed)" in text
    assert "badly" not in text
    assert 'class="ended calm"' in text
    change(output / "postmortem.json", resumes_from_step=0)
    assert page_of(read_records(FolderFiles(tmp_path))).state == "stopped"


def test_a_death_of_an_earlier_run_is_not_this_one_s(tmp_path: Path) -> None:
    write_record(make_run(tmp_path) / "postmortem.json", DEATH)
    assert "lack of memory" not in page(tmp_path)


def test_no_evaluation_or_one_of_another_adapter(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / paths.ADAPTERS / "adapters.safetensors").write_bytes(b"others")
    text = Parsed(page(tmp_path)).text
    assert "What was learnt is not known: the adapter that is there has not been evaluated." in text
    assert "Absent. The last evaluation is about another training" in text
    (tmp_path / paths.EVALUATION).unlink()
    text = Parsed(page(tmp_path)).text
    assert "has not been measured on test rows yet; validation loss 3.000 before, 0.450 at step 25." in text
    assert "better than base" not in text


def test_a_run_that_died_has_no_result_of_the_run_before_it(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / paths.SUMMARY).unlink()  # as a training does that begins; adapter and evaluation are still there
    text = Parsed(page(tmp_path)).text
    assert "There is no result: no training has finished here." in text
    assert "better than base" not in text
    assert "What is it?" not in text


def test_where_nothing_is_there_each_part_says_what_makes_it(tmp_path: Path) -> None:
    text = Parsed(page(tmp_path)).text
    assert "not trained yet" in text
    for stage in ("validate_data", "preflight", "recommend_config"):
        assert f"This makes it: dvc repro {stage}" in text


@pytest.mark.parametrize("content", [b'{"a": [1', b"\xff\xfe", b"[]", b"null", b'{"reasons": 3}'])
def test_damaged_records_are_named(tmp_path: Path, content: bytes) -> None:
    output = make_run(tmp_path)
    names = ("data_report", "evaluation", "training_summary", "machine", "recommended_config", "postmortem")
    for name in names:
        (output / f"{name}.json").write_bytes(content)
    (output / "training_metrics.csv").write_bytes(b"a,b\n1,2\n")
    text = Parsed(page(tmp_path)).text
    assert all(f"checkpoints_qlora/{name}.json" in text for name in names)
    assert "checkpoints_qlora/training_metrics.csv : ValueError: its columns are a, b" in text


def test_a_day_of_updates_is_a_small_page_that_keeps_the_extremes(tmp_path: Path) -> None:
    make_run(tmp_path)
    count, worst = 3 * MOST_RECORDS, 41_234
    lines = [",".join(COLUMNS)]
    for step in range(1, count + 1):
        loss = 99.5 if step == worst else 1.0 + step % 7 / 10
        valid = "0.25" if step == 777 else "0.5" if step % 500 == 0 else ""
        lines.append(f"{step},{step / 1000},{loss},{valid},0.001,0.5,{step * 9},300.0,{2**30},{2**31},{step}.0")
    (tmp_path / paths.METRICS_CSV).write_text("\n".join(lines) + "\n")
    found = page_of(read_records(FolderFiles(tmp_path)))
    text = render(found)
    assert len(text.encode()) < MEGABYTE
    assert "best 0.25" in text
    records = read_metrics((tmp_path / paths.METRICS_CSV).read_text())
    assert len(records.steps) < MOST_RECORDS
    assert max((record.train_loss or 0, record.step) for record in records.steps) == (99.5, worst)
    means = [record.train_loss or 0 for record in records.means]
    assert sorted(means)[len(means) // 2] == pytest.approx(1.3, abs=0.01)
    assert found.loss.y_ticks[-1].text == "100"  # type: ignore[union-attr]


def test_thinning_keeps_ends_and_extremes() -> None:
    points = tuple((float(step), float((step * 7919) % 1009)) for step in range(10_000))
    kept = thinned(points, 400)
    assert len(kept) <= 404
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(y for _, y in kept), max(y for _, y in kept)} == {0.0, 1008.0}
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_all_of_a_curve_can_be_pointed_at(tmp_path: Path) -> None:
    make_run(tmp_path)
    chart = page_of(read_records(FolderFiles(tmp_path))).loss
    places = chart.places  # type: ignore[union-attr]
    assert "25 · training 0.5 · validation 0.5333" in [place.text for place in places]
    for one, other in pairwise(places):
        assert one.left + one.width == pytest.approx(other.left, abs=0.2)
