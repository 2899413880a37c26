"""A monitor says what a run is doing, or how it ended, from what its folder holds."""

import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from safetrain.core.events import Begun, Journal, JournalEntry, Progress, Said, Started
from safetrain.core.postmortem import PostMortem, describe_rows
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import StepRecord, csv_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_or_none, write_record, write_text
from safetrain.core.storage.paths import FLIGHT, JOB, JOURNAL, MARKER, POINTER, POSTMORTEM, RECORDER
from safetrain.watch.monitor import MonitorView, State, plain_line, rows_of, running_stage, screen_of, view_of
from safetrain.watch.progress import TrainProgress, time_left, time_left_text
from safetrain.watch.run_folder import Run, RunReader, read_run
from tests.watch.made_run import (
    ENDINGS,
    ENDS_AT,
    GIB,
    JOB_OF_ALL,
    RUNG,
    SAVED_AT,
    TOTAL,
    change,
    ended_run,
    loss_at,
    under_way,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_cache")

STATES = dict.fromkeys(ENDINGS, State.DIED) | {"ctrl-c": State.STOPPED, "finished": State.FINISHED}
WIDTHS = (20, 40, 80, 200)


def seen(output: Path) -> MonitorView:
    return view_of(read_run(output))


def drawn(view: MonitorView, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(screen_of(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def later(run: Run, seconds: float, **processes: object) -> Run:
    """The same records, read so long after the last one."""
    now = run.flight[-1].monotonic_seconds + seconds
    return dataclasses.replace(run, read_at_monotonic_seconds=now, **processes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that has ended so; each is made once."""
    made: dict[str, Path] = {}

    def make(ending: str) -> Path:
        if ending not in made:
            made[ending] = ended_run(tmp_path_factory.mktemp(ending), ending)
        return made[ending]

    return make


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    with under_way(tmp_path / "run", updates=25) as recorded:
        yield recorded.output


@pytest.mark.parametrize("ending", STATES)
def test_every_ending_is_shown_with_what_was_reached_and_what_to_do(ending: str, ended: Callable[[str], Path]) -> None:
    view = seen(ended(ending))
    cause, title = ENDINGS.get(ending, ("", "FINISHED"))
    losses, checkpoint = dict(rows_of(view))["loss"], view.run.checkpoint
    assert (view.state, view.verdict.cause if view.verdict else "") == (STATES[ending], cause)
    assert view.step == ENDS_AT
    assert losses.startswith(f"train {loss_at(ENDS_AT):.4f}, valid ")
    assert f"(step {ENDS_AT}), base 2.7000" in losses
    assert checkpoint is not None
    assert checkpoint.step == SAVED_AT
    assert view.next_command == ("safetrain run" if ending == "finished" else "dvc repro")
    for text in (drawn(view), plain_line(view)):
        assert title.lower() in text.lower()
        assert view.next_command in text
    death = read_or_none(ended(ending) / POSTMORTEM, PostMortem)
    assert death is None or set(describe_rows(death)) < set(rows_of(view))


def test_while_another_stage_runs_it_says_which_and_waits(tmp_path: Path, ended: Callable[[str], Path]) -> None:
    """Right after `dvc repro`, minutes pass before the training begins."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").touch()
    (tmp_path / "stages" / "preflight.py").write_text("print(flush=True)\ninput()\n")
    command, pipe = [sys.executable, "-m", "stages.preflight"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdout.readline()
        here, elsewhere = running_stage(tmp_path), running_stage(tmp_path / "other")
        stage.stdin.write(b"\n")
    assert (here, elsewhere, running_stage(tmp_path)) == ("preflight", "", "")
    view = view_of(read_run(ended("finished")), here)
    assert (view.state, view.state.is_running) == (State.STAGE, True)
    assert all("stage preflight" in text for text in (drawn(view), plain_line(view)))
    assert f"step {ENDS_AT}" not in plain_line(view)  # of the run before
    assert f"step {ENDS_AT}" in plain_line(view_of(read_run(ended("finished")), "evaluate"))


def test_a_training_under_way(running: Path) -> None:
    view = seen(running)
    assert (view.state, view.step) == (State.TRAINING, 25)
    text = " ".join(drawn(view).split())
    assert "nothing has been trained here yet" in plain_line(seen(running / "nowhere"))
    for part in ("TRAINING", f"step 25 of {TOTAL}", "peak 140.0 MiB, predicted 150.0 MiB", "of 16.00 GiB (the",
                 "batch size 2 x accumulation 8 (as planned)", f"train {loss_at(25):.4f}",
                 "950 labels/s", f"saved step {SAVED_AT}"):  # fmt: skip
        assert part in text


def test_what_it_does_between_updates(tmp_path: Path) -> None:
    phases = {
        Phase.EVALUATE: "evaluate of step 25", Phase.WAIT: "waiting for room on the disk",
        Phase.LOAD_MODEL: "load model", Phase.VERIFY: "checking the adapter",
    }  # fmt: skip
    with under_way(tmp_path / "run", updates=25) as recorded:
        for phase, words in phases.items():
            recorded.recorder.write(phase, Edge.BEFORE, Work(25))
            view = seen(recorded.output)
            assert (view.state, words in dict(rows_of(view))["doing"]) == (State.TRAINING, True)


def test_what_takes_long_is_stopped_or_is_gone_is_told_apart(running: Path) -> None:
    run = read_run(running)
    assert " for 12 min" in dict(rows_of(view_of(later(run, 700.0))))["doing"]
    assert view_of(later(run, 18_000.0, worker_is_stopped=True)).state is State.PAUSED  # by Ctrl-Z
    assert " for " not in dict(rows_of(view_of(later(run, 700.0, worker_lives=False))))["doing"]
    view = view_of(later(run, 1.0, worker_lives=False, is_locked=False))
    assert (view.state, view.next_command) == (State.GONE, "safetrain diagnose")


def test_a_training_that_has_not_begun_shows_nothing_of_the_one_before(running: Path) -> None:
    Journal(running / FLIGHT / JOURNAL).write(Started())
    assert "loss" not in plain_line(seen(running))
    change(running / FLIGHT / MARKER, started_seconds=time.time() + 1)
    view = seen(running)
    assert (view.state, "doing" in dict(rows_of(view)), view.step) == (State.TRAINING, False, 0)


def test_less_memory_and_more_than_predicted_are_shown_in_words(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB_OF_ALL, rungs=(RUNG,), ranks=2)
    with under_way(tmp_path / "run", updates=3, job=job) as recorded:
        view, run = seen(recorded.output), read_run(recorded.output)
    assert dict(rows_of(view))["batch"] == (
        f"look: batch size 2 x accumulation 8 (planned 4 x 4); step 12: {RUNG.failed}: out of memory"
    )
    assert ("rank 0 of 2: " in plain_line(view), "2 ranks" in drawn(view)) == (True, True)
    record = dataclasses.replace(run.flight[-1], predicted_peak_bytes=100 * GIB)
    job = dataclasses.replace(job, memory_budget=dataclasses.replace(job.memory_budget, total_bytes=200 * GIB))
    for peak, sign in ((104, ""), (106, "look")):
        steps = (dataclasses.replace(run.steps[-1], peak_memory_bytes=peak * GIB),)
        text = dict(rows_of(view_of(dataclasses.replace(run, flight=(record,), steps=steps, job=job))))["mlx"]
        assert text.partition("peak")[0].strip(" :") == sign


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half a line of metrics": lambda run: os.truncate(run / paths.METRICS_CSV.name, 400),
    "damaged metrics": lambda run: (run / paths.METRICS_CSV.name).write_bytes(b"\xff\x00,,,\n" * 9),
    "half a marker": lambda run: (run / FLIGHT / MARKER).write_text('{"boot_id": "x"'),
    "half a post-mortem": lambda run: (run / POSTMORTEM).write_text('{"cause": "ki'),
    "a recorder cut short": lambda run: (run / FLIGHT / RECORDER).write_bytes(b"SAFETRN2"),
    "no flight": lambda run: shutil.rmtree(run / FLIGHT),
    "no metrics": lambda run: (run / paths.METRICS_CSV.name).unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_records_that_are_half_written_or_gone_are_left_out(what: str, running: Path) -> None:
    reader = RunReader(running)
    reader.read()
    DAMAGE[what](running)
    for view in (view_of(reader.read()), seen(running)):
        assert drawn(view)
        assert view.state.value in plain_line(view)
        assert ("unread" in dict(rows_of(view))) == (len(view.run.unreadable) > 0)


def test_it_fits_every_width_with_wide_letters_and_hostile_text(ended: Callable[[str], Path], running: Path) -> None:
    hostile = "模型" * 20 + "\x1b]0;title\x07\x1b[2J[bold]x[/bold]\u202e"
    write_record(running / FLIGHT / JOB, dataclasses.replace(JOB_OF_ALL, base=hostile))
    for text in ("", "\n", "\r\n\r\n", hostile):
        Journal(running / FLIGHT / JOURNAL).write(Said(text))
    for view in (seen(running), seen(ended("killed")), seen(ended("finished"))):
        for width in WIDTHS:
            lines = drawn(view, width).splitlines()
            assert max(map(cell_len, lines)) <= width
            assert view.state.value.upper() in lines[0]
            assert view.next_command in "".join(lines) or width < 40
    wide = drawn(seen(running), 300)
    assert "\x1b" not in wide + plain_line(seen(running))
    assert "[bold]x[/bold]" in wide


def test_a_plain_line_is_one_line_and_looking_changes_nothing(running: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(running.rglob("*"))}

    last = dataclasses.replace(read_run(running).steps[-1], grad_norm=float("nan"))
    write_text(running / paths.METRICS_CSV.name, csv_of([last]))
    before, reader = state(), RunReader(running)
    for _ in range(3):
        view = view_of(reader.read())
        assert drawn(view)
    assert state() == before
    assert "\n" not in plain_line(view)
    assert "gradient norm" not in dict(rows_of(view))["speed"]


def command(output: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "safetrain.cli", "monitor", "--output", str(output), "--refresh", "0.2", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_ends_with_what_has_ended_and_refuses_what_is_not_there(ended: Callable[[str], Path]) -> None:
    process = command(ended("oom"), "--plain")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err, ENDINGS["oom"][1].lower() in out.lower()) == (0, "", True)
    with command(ended("oom") / "nope", "--once") as monitor:
        assert "The folder does not exist." in monitor.communicate()[1]
    assert monitor.returncode == 2


def test_the_command_follows_a_training_to_its_end_in_a_pipe_and_ctrl_c_leaves_it(running: Path) -> None:
    for ends_by_itself in (False, True):
        process = command(running)
        assert process.stdout is not None
        assert "training" in process.stdout.readline()
        if ends_by_itself:
            (running / FLIGHT / MARKER).unlink()
            (running / POINTER).unlink()
        else:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    assert "not running" in out.splitlines()[-1]


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
