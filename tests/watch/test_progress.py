"""How long a training still takes, and the lines that a training prints."""

import dataclasses
import io
import re

import pytest

from safetrain.core.events import Begun, JournalEntry, Progress, Said
from safetrain.core.records.metrics import StepRecord
from safetrain.watch.progress import TrainProgress, say_on_terminal, time_left, time_left_text

STEP_SECONDS, VALIDATION_SECONDS, EVERY = 2.0, 30.0, 10


def run(steps: int, pace: float = STEP_SECONDS, check: float = 0.0) -> list[JournalEntry]:
    """The journal of a training of 100 updates, whose first comes after a validation."""
    now, validations = VALIDATION_SECONDS, 1
    journal = [JournalEntry(0.0, 0.0, Begun(100, 0, "", EVERY, check)), JournalEntry(0.0, now, Progress(0, 0.0, 1))]
    for step in range(1, steps + 1):
        now += pace + VALIDATION_SECONDS * (step % EVERY == 0)
        validations += step % EVERY == 0
        journal.append(JournalEntry(0.0, now, Progress(step, pace * step, validations)))
    return journal


def left_of(journal: list[JournalEntry], later: float = 0.0) -> float:
    found = time_left(journal, journal[-1].monotonic_seconds + later)
    assert found is not None
    return found


@pytest.mark.parametrize("steps", [3, 57, 100])
def test_updates_validations_and_the_adapter_check_count(steps: int) -> None:
    validations = 10 - steps // 10
    found = left_of(run(steps, check=1.5))
    assert found == pytest.approx((100 - steps) * STEP_SECONDS + (validations + 1.5) * VALIDATION_SECONDS)


def test_it_is_unknown_before_an_update_and_counts_down_to_longer_than_estimated() -> None:
    assert time_left([], 0.0) is None
    assert time_left(run(0), 40.0) is None
    assert left_of(run(50)) - left_of(run(50), 7.0) == pytest.approx(7.0)
    assert time_left_text(left_of(run(100, check=1.0), 31.0), 0.0) == "takes longer than estimated"


def test_a_pause_is_no_pace() -> None:
    """Ctrl-Z stops the process and not its clock: the update seems to take the whole pause."""
    journal = run(60)
    for number, entry in enumerate(journal):
        if isinstance(entry.event, Progress) and entry.event.step >= 45:
            slow = dataclasses.replace(entry.event, elapsed_seconds=entry.event.elapsed_seconds + 3600)
            journal[number] = JournalEntry(0.0, entry.monotonic_seconds + 3600, slow)
    assert left_of(journal) == pytest.approx(left_of(run(60)))


def record(step: int, valid: float | None = None) -> StepRecord:
    return StepRecord(step, step / 50, 1.5, valid, 1e-4, 0.5, 20 * step, 900.0, 2**27, 2**28, 2.0 * step)


def test_a_training_prints_short_plain_lines_with_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(10_000))
    shown = TrainProgress(lambda: float(next(seconds)))
    shown.show(Begun(312, 0, "training on 9 rows"))
    for step in range(300):
        shown.show(record(step, 2.5 if step % 100 == 0 else None))
    shown.show(Said("a remark"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training on 9 rows"
    assert lines[1] == "step   0/312 · loss 1.5000 · valid 2.5000 · 900 labels/s"
    assert re.fullmatch(r"step   2/312 · loss 1.5000 · 900 labels/s · \d+ min left", lines[3])
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "a remark"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_is_for_terminals(on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    for name, stream in (("stdout", out), ("stderr", err)):
        monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
        monkeypatch.setattr(f"sys.{name}", stream)
    say_on_terminal("half of it")
    assert (out.getvalue(), err.getvalue()) == ("", "half of it\n" * on_terminal)
