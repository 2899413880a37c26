"""How long a training still takes: updates, validations, pauses, and how sure that is."""

import io
import re
import resource
import time
from pathlib import Path

import pytest
from safetrain.core.protocol.journal import BEGUN, KEPT_BYTES, MARK, MARK_SECONDS, SAID, Journal, parse_entry

from safetrain.core.events import Begun, Recorded, Said
from safetrain.core.records.metrics import StepRecord
from safetrain.watch.progress import TrainProgress, say_on_terminal, still_working, tell_on_terminal
from safetrain.watch.time_left import MOST_MARKS, Mark, Marks, TimeLeft, time_left, time_left_text

STEP_SECONDS, VALIDATION_SECONDS, EVERY = 2.0, 30.0, 10


def run(steps: int, pace: float = STEP_SECONDS) -> list[Mark]:
    """Marks of a training of 100 updates, of which the first takes place after a validation."""
    marks, now, elapsed, validations = [Mark(0.0, 0, 0.0, 0)], VALIDATION_SECONDS, 0.0, 1
    marks.append(Mark(now, 0, 0.0, validations))
    for step in range(1, steps + 1):
        elapsed, now = elapsed + pace, now + pace
        if step % EVERY == 0:
            now, validations = now + VALIDATION_SECONDS, validations + 1
        marks.append(Mark(now, step, elapsed, validations))
    return marks


def of(marks: list[Mark], now: float | None = None) -> TimeLeft:
    found = time_left(marks, 100, EVERY, marks[-1].seconds if now is None else now)
    assert found is not None
    return found


@pytest.mark.parametrize("steps", [3, 10, 57, 99])
def test_updates_and_validations_that_are_left_are_counted(steps: int) -> None:
    left = 100 - steps
    validations = 10 - steps // 10
    assert of(run(steps)).seconds == pytest.approx(left * STEP_SECONDS + validations * VALIDATION_SECONDS)


def test_nothing_is_said_before_an_update_was_made_and_nothing_is_left_at_the_end() -> None:
    assert time_left([], 100, EVERY, 0.0) is None
    assert time_left(run(0), 100, EVERY, 40.0) is None
    assert of(run(100)).seconds == 0.0


def test_it_counts_down_between_two_records() -> None:
    marks = run(50)
    assert of(marks).seconds - of(marks, marks[-1].seconds + 7.0).seconds == pytest.approx(7.0)


def test_it_is_between_the_fastest_and_the_slowest_recent_stretch() -> None:
    marks = run(40)
    now, elapsed = marks[-1].seconds, marks[-1].elapsed_seconds
    for step in range(41, 81):  # every second stretch at half the speed
        took = STEP_SECONDS * (1 + (step // 5) % 2)
        now, elapsed = now + took, elapsed + took
        marks.append(Mark(now, step, elapsed, marks[-1].validations))
    found = of(marks)
    assert found.least is not None
    assert found.most is not None
    assert found.least < found.seconds < found.most
    fixed = 2 * VALIDATION_SECONDS
    assert 20 * STEP_SECONDS <= found.least - fixed < 30 * STEP_SECONDS < found.most - fixed <= 40 * STEP_SECONDS


def test_a_pause_is_no_pace() -> None:
    marks = run(60)
    later = [Mark(m.seconds + 7200, m.step, m.elapsed_seconds, m.validations) if m.step >= 35 else m for m in marks]
    assert of(later).seconds == pytest.approx(of(marks).seconds)


def test_a_pause_within_an_update_is_no_pace() -> None:
    """Ctrl-Z stops the process and not its clock: the update seems to take the whole pause."""
    marks = run(60)
    later = [
        Mark(m.seconds + 3600, m.step, m.elapsed_seconds + 3600, m.validations) if m.step >= 45 else m for m in marks
    ]
    found, usual = of(later), of(marks)
    assert found.seconds == pytest.approx(usual.seconds)
    assert found.most == pytest.approx(usual.most)


@pytest.mark.parametrize(
    ("left", "text"),
    [(TimeLeft(40, None, None), "about 40 s left, until "), (TimeLeft(600, 540, 660), "(9 min to 11 min), until ")],
)
def test_it_is_told_with_its_end(left: TimeLeft, text: str) -> None:
    told = time_left_text(left, 1_700_000_000.0)
    assert text in told
    assert re.search(r"until \d\d:\d\d$", told)


def test_an_end_on_another_day_is_told_with_its_day() -> None:
    assert re.search(r"until \w{3} \d\d:\d\d$", time_left_text(TimeLeft(2 * 86400.0, None, None), 1_700_000_000.0))


def test_an_end_in_another_year_is_told_with_its_year() -> None:
    told = time_left_text(TimeLeft(400 * 86400.0, None, None), 1_700_000_000.0)
    assert re.fullmatch(r"about 400.0 days left, until \d\d \w{3} 2024", told)
    assert re.search(
        r"until \d\d \w{3} \d\d:\d\d$", time_left_text(TimeLeft(90 * 86400.0, None, None), 1_700_000_000.0)
    )


def test_the_marks_of_a_day_stay_few_and_keep_its_beginning_and_its_end() -> None:
    marks = Marks[int]()
    for number in range(3 * MOST_MARKS):
        marks.add(number)
    assert len(marks.kept) <= MOST_MARKS
    assert (marks.kept[0], marks.kept[-1]) == (0, 3 * MOST_MARKS - 1)


def record(step: int, valid: float | None = None) -> StepRecord:
    return StepRecord(step, step / 50, 1.5, valid, 1e-4, 0.5, 20 * step, 900.0, 2**27, 2**28, 2.0 * step)


def test_a_training_prints_a_plain_line_with_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 1000, 2))
    progress = TrainProgress(50, lambda: float(next(seconds)))
    progress.show(Begun(100, 0, "training on 9 rows"))
    progress.show(Recorded(record(0, valid=2.5)))
    for step in range(1, 4):
        progress.show(Recorded(record(step)))
    progress.show(Said("a remark"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training on 9 rows"
    assert re.fullmatch(r"step   3/100  loss 1.5000 .* left, until \d\d:\d\d", lines[4])
    assert "left" not in lines[1]
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "a remark"


def test_the_journal_keeps_what_happened_and_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"an": "old line"}\n' * (KEPT_BYTES // 8))
    journal, shown, said = Journal(path), list[object](), list[str]()
    assert path.stat().st_size <= KEPT_BYTES
    show, say = journal.showing(shown.append), journal.saying(said.append)
    show(Begun(100, 40, "training"))
    for step in range(41, 60):
        show(Recorded(record(step)))
    say("going on")
    entries = [entry for line in path.read_bytes().splitlines() if (entry := parse_entry(line))]
    assert [entry.kind for entry in entries] == [BEGUN, MARK, SAID]  # the other marks come within MARK_SECONDS
    assert MARK_SECONDS > 1
    assert (entries[0].step, entries[0].total_steps, entries[1].step) == (40, 100, 41)
    assert len(shown) == 20
    assert said == ["going on"]


def entries_of(path: Path) -> list[str]:
    return [entry.text for line in path.read_bytes().splitlines() if (entry := parse_entry(line))]


def test_a_line_that_a_power_cut_has_cut_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).note(SAID, "before")
    with path.open("ab") as file:
        file.write(b'{"type": "Entry", "ki')
    journal = Journal(path)
    journal.note(SAID, "the training before this one ended suddenly")
    journal.note(SAID, "after")
    assert entries_of(path) == ["before", "the training before this one ended suddenly", "after"]


def test_a_line_that_a_full_disk_has_cut_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.note(SAID, "before")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, usual[1]))
    try:
        journal.note(SAID, "lost")
        journal.note(SAID, "lost too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert path.read_bytes()[-1:] != b"\n"
    journal.note(SAID, "after")
    assert entries_of(path) == ["before", "after"]


def test_a_journal_that_cannot_be_written_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    Journal(tmp_path / "journal.jsonl").note(SAID, "lost")


def test_work_that_cannot_say_how_far_it_is_says_that_it_goes_on_and_then_is_silent() -> None:
    told = list[str]()
    with still_working("out is made", told.append, every_seconds=0.01):
        while len(told) < 2:
            time.sleep(0.001)
    count = len(told)
    time.sleep(0.05)
    assert len(told) == count
    assert told[0] == "out is made, for 1 s so far"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_is_for_terminals(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return on_terminal

    out, err = Stream(), Stream()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    say_on_terminal("half of it")
    tell_on_terminal("half of it")
    assert [out.getvalue(), err.getvalue()] == ["half of it\n" * on_terminal] * 2
