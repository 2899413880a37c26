"""A monitor says what a run is doing, or how it ended, from what its folder holds."""

import dataclasses
import io
import json
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
from safetrain.core.recorder import Edge, Phase, Work
from safetrain.core.records.metrics import start_csv
from safetrain.core.records.postmortem import describe_rows, read_postmortem
from safetrain.core.run_folder import Run, RunReader, read_run
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import FLIGHT, JOB, JOURNAL, MARKER, POINTER, POSTMORTEM, RECORDER
from safetrain.watch.monitor import MonitorView, State, json_line, running_stage, view_of
from safetrain.watch.monitor_screen import MonitorScreen, plain_line, rows_of
from tests.support.recorded_runs import (
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
)
from tests.watch.made_run import data_report

pytestmark = pytest.mark.usefixtures("own_cache")

STATES = dict.fromkeys(ENDINGS, State.DIED) | {"ctrl-c": State.STOPPED, "finished": State.FINISHED}
SIZES = ((80, 24), (40, 24), (40, 10), (200, 50), (120, 20), (20, 5), (300, 100))


def seen(output: Path) -> MonitorView:
    return view_of(read_run(output))


def drawn(view: MonitorView, width: int = 100, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, highlight=False)
    console.print(MonitorScreen(view), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def later(run: Run, seconds: float, **processes: object) -> Run:
    """The same records, read so long after the last one."""
    now = run.flight[-1].monotonic_seconds + seconds
    changed = dataclasses.replace(run.processes, **processes)  # type: ignore[arg-type]
    return dataclasses.replace(run, read_at_monotonic_seconds=now, processes=changed)


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
    found = json.loads(json_line(view))
    assert (found["state"], (found["verdict"] or {"cause": ""})["cause"]) == (STATES[ending].value, cause)
    assert found["progress"]["step"] == found["losses"]["best_step"] == ENDS_AT
    assert found["losses"]["train"] == pytest.approx(loss_at(ENDS_AT))
    assert found["checkpoints"]["last_step"] == SAVED_AT
    assert found["next_command"] == ("safetrain result" if ending == "finished" else "dvc repro")
    for text in (drawn(view), plain_line(view)):
        assert title.lower() in text.lower()
        assert found["next_command"] in text


def test_the_verdict_is_the_supervisor_s_word_for_word(ended: Callable[[str], Path]) -> None:
    found = read_postmortem(ended("killed"))
    assert found is not None
    assert set(describe_rows(found)) < set(rows_of(seen(ended("killed"))))


def test_nothing_trained_yet(tmp_path: Path) -> None:
    view = seen(tmp_path / "nowhere")
    assert view.state is State.NOTHING
    assert "nothing has been trained here yet" in plain_line(view)
    assert "nothing has been trained here yet" in drawn(view)


def test_while_another_stage_runs_it_says_which_and_waits(tmp_path: Path, ended: Callable[[str], Path]) -> None:
    """Right after `dvc repro`, minutes pass before the training begins."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").touch()
    (tmp_path / "stages" / "preflight.py").write_text("print(flush=True)\ninput()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "stages.preflight"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdout.readline()
        here, elsewhere = running_stage(tmp_path), running_stage(tmp_path / "other")
        stage.stdin.write(b"\n")
    assert (here, elsewhere, running_stage(tmp_path)) == ("preflight", "", "")
    view = view_of(read_run(ended("finished")), here)
    assert (view.state, view.state.is_running) == (State.STAGE, True)
    assert "stage preflight" in drawn(view)
    assert "stage preflight" in plain_line(view)
    assert str(ENDS_AT) not in plain_line(view)  # of the run before
    assert str(ENDS_AT) in plain_line(view_of(read_run(ended("finished")), "evaluate"))


def test_a_training_under_way(running: Path) -> None:
    view = seen(running)
    assert (view.state, view.step) == (State.TRAINING, 25)
    text = " ".join(drawn(view).split())
    for part in ("TRAINING", f"step 25 of {TOTAL}", "peak 140.0 MiB, predicted 150.0 MiB", "of 16.00 GiB (the",
                 "batch size 2 x accumulation 8 (as planned)", f"train {loss_at(25):.4f}", "(longest 0",
                 "950 labels/s", f"saved step {SAVED_AT}", "begins, 40 updates"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("phase", "state"),
    [(Phase.EVALUATE, State.EVALUATING), (Phase.SAVE, State.SAVING), (Phase.WAIT, State.WAITING),
     (Phase.VERIFY, State.VERIFYING), (Phase.LOAD_MODEL, State.LOADING), (Phase.GRADIENT, State.TRAINING)],
)  # fmt: skip
def test_what_it_does_between_updates(tmp_path: Path, phase: Phase, state: State) -> None:
    with under_way(tmp_path / "run", updates=25) as recorded:
        recorded.recorder.write(phase, Edge.BEFORE, Work(25))
        assert seen(recorded.output).state is state
        recorded.recorder.write(Phase.VERIFY, Edge.BEFORE, Work(25))
        recorded.recorder.write(Phase.LOAD_MODEL, Edge.BEFORE, Work())
        assert seen(recorded.output).state is State.VERIFYING


def test_a_phase_is_as_old_as_its_first_micro_batch(tmp_path: Path) -> None:
    with under_way(tmp_path / "run", updates=25) as recorded:
        for micro_batch in range(4):
            recorded.recorder.write(Phase.EVALUATE, Edge.BEFORE, Work(25, micro_batch, 8, 200))
            time.sleep(0.02)
        phase = seen(recorded.output).phase
    assert phase is not None
    assert (phase.label, phase.micro_batch) == ("evaluate", 3)
    assert phase.age_seconds >= 0.08
    assert phase.longest_seconds is not None
    assert phase.longest_seconds < 0.05  # of earlier validations


def test_a_phase_that_takes_too_long_is_seen_before_it_is_ended_and_when_it_hangs(running: Path) -> None:
    run = read_run(running)
    for seconds, sign, state in (
        (2.0, "after", State.TRAINING),
        (60.0, "look: ", State.TRAINING),
        (700.0, "!! ", State.HUNG),
    ):
        view = view_of(later(run, seconds))
        assert (view.state, dict(rows_of(view))["doing"].startswith(sign)) == (state, True)
    assert "it hangs" in drawn(view_of(later(run, 700.0)))


def test_ctrl_z_is_no_hang(running: Path) -> None:
    view = view_of(later(read_run(running), 18_000.0, worker_is_stopped=True))
    assert view.state is State.PAUSED
    assert "hangs" not in drawn(view)


def test_a_death_with_the_supervisor_differs_from_one_that_is_being_explained(running: Path) -> None:
    run = read_run(running)
    assert view_of(later(run, 1.0, worker_lives=False)).state is State.ENDING
    view = view_of(later(run, 1.0, worker_lives=False, is_locked=False))
    assert (view.state, view.next_command) == (State.GONE, "safetrain diagnose")


def test_a_training_that_has_not_begun_shows_nothing_of_the_one_before(running: Path) -> None:
    Journal(running / FLIGHT / JOURNAL).write(Started())
    assert "0.6" not in plain_line(seen(running))
    change(running / FLIGHT / MARKER, started_seconds=time.time() + 1)
    view = seen(running)
    assert (view.state, view.phase, view.step) == (State.STARTING, None, 0)


def test_less_memory_is_shown_in_words(tmp_path: Path) -> None:
    with under_way(
        tmp_path / "run", updates=3, job=dataclasses.replace(JOB_OF_ALL, rungs=(RUNG,), ranks=2)
    ) as recorded:
        view = seen(recorded.output)
    assert dict(rows_of(view))["batch"] == (
        "look: batch size 2 x accumulation 8 since step 12 (planned 4 x 4); 4 x 4 did not fit: out of memory"
    )
    assert "rank 0 of 2: " in plain_line(view)
    assert "2 ranks" in drawn(view)


@pytest.mark.parametrize(("peak", "sign"), [(100, ""), (104, ""), (106, "look"), (185, "look"), (201, "!!")])
def test_memory_of_mlx_is_judged_by_the_prediction_and_by_the_budget(peak: int, sign: str, running: Path) -> None:
    run = read_run(running)
    record = dataclasses.replace(run.flight[-1], predicted_peak_bytes=100 * GIB)
    budget = dataclasses.replace(JOB_OF_ALL.memory_budget, total_bytes=200 * GIB, process_bytes=0)
    steps = (dataclasses.replace(run.steps[-1], peak_memory_bytes=peak * GIB),)
    job = dataclasses.replace(JOB_OF_ALL, memory_budget=budget)
    text = dict(rows_of(view_of(dataclasses.replace(run, flight=(record,), steps=steps, job=job))))["mlx"]
    assert text.partition("peak")[0].strip(" :") == sign


def test_time_left_names_the_adapter_check_and_the_evaluation_that_follow(running: Path) -> None:
    run = read_run(running)
    now = run.read_at_monotonic_seconds
    past = [JournalEntry(0.0, now - 68, Begun(TOTAL, 0, "", 10, check_validations=3.0)),
            JournalEntry(0.0, now - 60, Progress(0, 0.0, 1)), JournalEntry(0.0, now - 20, Progress(20, 24.0, 3)),
            JournalEntry(0.0, now, Progress(30, 36.0, 4))]  # fmt: skip
    run = dataclasses.replace(run, journal=tuple(past), data=data_report())
    view = view_of(run)
    assert view.left is not None
    assert view.left.seconds == pytest.approx(10 * 1.2 + 8.0 + 3 * 8.0)
    assert "left, until" in drawn(view)
    assert "then evaluation, at most 35 s" in " ".join(drawn(view).split())
    assert json.loads(json_line(view))["progress"]["left"]["seconds"] == pytest.approx(44.0)
    assert view_of(later(run, 700.0)).left is None  # it hangs


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half a line of metrics": lambda run: _append(run / paths.METRICS_CSV.name, b"26,1.3,0.6"),
    "half a line of the journal": lambda run: _append(run / FLIGHT / JOURNAL, b'{"type": "Said", "ki'),
    "damaged metrics": lambda run: (run / paths.METRICS_CSV.name).write_bytes(b"\xff\x00,,,\n" * 9),
    "half a marker": lambda run: (run / FLIGHT / MARKER).write_text('{"boot_id": "x"'),
    "half a job": lambda run: (run / FLIGHT / JOB).write_text('{"base":'),
    "half a post-mortem": lambda run: (run / POSTMORTEM).write_text('{"cause": "ki'),
    "a recorder cut short": lambda run: (run / FLIGHT / RECORDER).write_bytes(b"SAFETRN2"),
    "no flight": lambda run: shutil.rmtree(run / FLIGHT),
    "no metrics": lambda run: (run / paths.METRICS_CSV.name).unlink(),
}


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.parametrize("what", DAMAGE)
def test_records_that_are_half_written_or_gone_are_left_out(what: str, running: Path) -> None:
    reader = RunReader(running)
    reader.read()
    DAMAGE[what](running)
    for view in (view_of(reader.read()), seen(running)):
        assert drawn(view)
        assert json.loads(json_line(view))["state"] == view.state.value
        assert ("unread" in dict(rows_of(view))) == (len(view.run.unreadable) > 0)


@pytest.mark.parametrize("ending", ["killed", "finished", "running"])
def test_it_fits_every_terminal(ending: str, ended: Callable[[str], Path], running: Path) -> None:
    view = seen(running if ending == "running" else ended(ending))
    for width, height in SIZES:
        lines = drawn(view, width, height).splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert view.state.value.upper() in lines[0]
        assert view.next_command in "".join(lines) or height < 24


def test_letters_of_two_columns_and_hostile_text_harm_no_screen(running: Path) -> None:
    hostile = "模型" * 20 + "\x1b]0;title\x07\x1b[2J[bold]x[/bold]\u202e"
    write_record(running / FLIGHT / JOB, dataclasses.replace(JOB_OF_ALL, base=hostile))
    for text in ("", "\n", "\r\n\r\n", hostile):
        Journal(running / FLIGHT / JOURNAL).write(Said(text))
    view = seen(running)
    lines = drawn(view, 80, 24).splitlines()
    assert len(lines) <= 24
    assert all(cell_len(line) <= 80 for line in lines)
    wide = drawn(view, 300, 60)
    assert "\x1b" not in wide + plain_line(view)
    assert "[bold]x[/bold]" in wide


def test_no_background_and_no_colour_that_says_something_alone(ended: Callable[[str], Path], running: Path) -> None:
    for view in (seen(running), seen(ended("killed"))):
        console = Console(file=io.StringIO(), width=200, height=50, force_terminal=True, color_system="truecolor")
        segments = console.render_lines(MonitorScreen(view))
        styles = {segment.style for line in segments for segment in line if segment.style is not None}
        assert all(style.bgcolor is None for style in styles)
        assert {style.color.name for style in styles if style.color is not None} <= {"magenta"}


def test_the_lines_for_scripts_are_one_line_each(running: Path, ended: Callable[[str], Path]) -> None:
    start_csv(
        running / paths.METRICS_CSV.name, [dataclasses.replace(read_run(running).steps[-1], grad_norm=float("nan"))]
    )
    for output in (running, ended("nan"), running / "nowhere"):
        view = seen(output)
        assert "\n" not in plain_line(view)
        assert json.loads(json_line(view))["state"] == view.state.value
    assert json.loads(json_line(seen(running)))["progress"]["grad_norm"] is None


def test_looking_changes_nothing(running: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(running.rglob("*"))}

    before, reader = state(), RunReader(running)
    for _ in range(3):
        drawn(view_of(reader.read()))
    assert state() == before


def command(output: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "safetrain.cli", "monitor", "--output", str(output), "--refresh", "0.2", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with command(tmp_path / "nope", "--once") as monitor:
        assert "The folder does not exist." in monitor.communicate()[1]
    assert monitor.returncode == 2


def test_the_command_prints_the_last_state_of_what_has_ended_and_ends(ended: Callable[[str], Path]) -> None:
    process = command(ended("oom"), "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["verdict"]["cause"] == "out_of_memory"


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
