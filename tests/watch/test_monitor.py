"""A monitor says what a run is doing, or how it ended, whatever that is: fed with what real supervisors recorded."""

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
from safetrain.core.protocol.journal import SAID, Journal

from safetrain.core.recorder import SLOTS, Edge, FlightTail, Phase, Work, read_flight
from safetrain.core.records.metrics import COLUMNS, append_csv, read_csv, start_csv
from safetrain.core.records.record_files import write_record
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import FLIGHT, JOB, JOURNAL, MARKER, POSTMORTEM, RECORDER
from safetrain.guard.postmortem import describe, read_postmortem
from safetrain.watch.monitor_chart import ASCII, UNICODE
from safetrain.watch.monitor_files import RunReader
from safetrain.watch.monitor_lines import json_line, plain_line
from safetrain.watch.monitor_rows import rows_of, verdict_rows
from safetrain.watch.monitor_screen import screen_of
from safetrain.watch.monitor_stage import stage_of
from safetrain.watch.monitor_state import State
from safetrain.watch.monitor_view import MonitorView, view_of
from tests.support.recorded_child import ENDS_AT, SAVED_AT, TOTAL, loss_at
from tests.support.recorded_runs import JOB_OF_ALL, RUNG, record_ending, under_way

pytestmark = pytest.mark.usefixtures("own_cache")

ENDINGS = {  # what the verdict is called, and what the screen says
    "finished": (State.FINISHED, "", "FINISHED"),
    "early": (State.FINISHED, "", "validation no longer improved"),
    "killed": (State.DIED, "killed", "somebody or something killed it"),
    "oom": (State.DIED, "out_of_memory", "std::bad_alloc"),
    "hang": (State.DIED, "hang", "it hung and was ended"),
    "nan": (State.DIED, "bad_update", "The loss is not a number"),
    "disk": (State.DIED, "disk_full", "free some space first"),
    "ctrl-c": (State.STOPPED, "stopped", "it was asked to stop"),
}
SIZES = ((80, 24), (40, 24), (40, 10), (200, 50), (120, 20), (20, 5), (300, 100))
HOUR = 3600.0


def seen(output: Path) -> MonitorView:
    return view_of(RunReader(output).read())


def drawn(view: MonitorView, width: int = 100, height: int = 40, *, ascii_only: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, highlight=False)
    console.print(screen_of(view, width, height, ASCII if ascii_only else UNICODE))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that has ended so; each is made once."""
    made: dict[str, Path] = {}

    def make(ending: str) -> Path:
        if ending not in made:
            made[ending] = tmp_path_factory.mktemp(ending)
            record_ending(made[ending], ending)
        return made[ending]

    return make


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_is_told_with_what_was_reached_and_what_to_do(ending: str, ended: Callable[[str], Path]) -> None:
    state, cause, words = ENDINGS[ending]
    view = seen(ended(ending))
    assert view.state is state
    assert (view.verdict.cause if view.verdict else "") == cause
    assert view.progress.step == ENDS_AT
    assert view.losses.best_step == ENDS_AT
    assert view.losses.train == pytest.approx(loss_at(ENDS_AT))
    assert view.checkpoints.last_step == SAVED_AT
    text = drawn(view)
    assert words in text
    assert view.next_command in text
    assert view.next_command
    assert view.state.value in plain_line(view)


@pytest.mark.parametrize("ending", ["killed", "oom"])
def test_the_verdict_is_the_supervisor_s_word_for_word(ending: str, ended: Callable[[str], Path]) -> None:
    found = read_postmortem(ended(ending))
    assert found is not None
    told = [part for row in verdict_rows(seen(ended(ending))) for part in row.parts]
    said = describe(found)
    assert all(part.strip("()") in said for part in told), (told, said)


@pytest.mark.parametrize(("peak", "sign"), [(100, "ok"), (104, "ok"), (106, "look"), (185, "look"), (201, "!!")])
def test_memory_of_mlx_is_judged_by_the_prediction_and_by_the_budget(
    peak: int, sign: str, ended: Callable[[str], Path]
) -> None:
    """The limit that mlx is given is the prediction less a little: a peak passes it, and nothing is wrong."""
    view = seen(ended("finished"))
    memory = dataclasses.replace(view.memory, mlx_peak_bytes=peak, predicted_peak_bytes=100, mlx_budget_bytes=200)
    [row] = [row for row in rows_of(dataclasses.replace(view, memory=memory)) if row.name == "mlx"]
    assert row.sign == sign
    assert row.parts[-1].startswith("budget")


def test_nothing_trained_yet(tmp_path: Path) -> None:
    view = seen(tmp_path / "nowhere")
    assert view.state is State.NO_WORK
    assert "nothing has been trained" in plain_line(view)
    drawn(view)


def test_while_another_stage_runs_it_says_which_and_waits(tmp_path: Path) -> None:
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
        view = seen(tmp_path / "checkpoints_qlora")
        elsewhere = seen(tmp_path / "other" / "checkpoints_qlora")
        stage.stdin.write(b"\n")
    assert (view.state, view.state.is_running, elsewhere.state) == (State.STAGE, True, State.NO_WORK)
    assert "the stage preflight runs" in drawn(view)
    assert "the stage preflight runs" in plain_line(view)
    assert seen(tmp_path / "checkpoints_qlora").state is State.NO_WORK


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("/v/bin/python -m stages.evaluate evaluate.max_questions=3", "evaluate"),
        ("/v/bin/python3 /v/bin/dvc repro", ""),
        ("/v/bin/python /v/bin/safetrain run experiment=minimal", ""),
        ("/v/bin/python /v/bin/safetrain monitor", None),
        ("/v/bin/python /v/bin/dvc exp show", None),
        ("/bin/sh -c python", None),
    ],
)
def test_a_stage_is_known_by_its_command(command: str, stage: str | None) -> None:
    assert stage_of(command.split()) == stage


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    with under_way(tmp_path / "run", updates=25) as pretended:
        yield pretended.output


def test_a_training_under_way(running: Path) -> None:
    view = seen(running)
    assert (view.state, view.progress.step, view.progress.total_steps) == (State.TRAINING, 25, TOTAL)
    text = drawn(view)
    for part in ("TRAINING", "step 25 of 40", "predicted 150.0 MiB", "budget", "the machine's memory", "as planned"):
        assert part in text
    assert f"train {loss_at(25):.4f}" in text


@pytest.mark.parametrize(
    ("phase", "state"),
    [(Phase.EVALUATE, State.EVALUATING), (Phase.SAVE, State.SAVING), (Phase.WAIT, State.WAITING),
     (Phase.LOAD_MODEL, State.PROVING)],
)  # fmt: skip
def test_what_it_does_beside_updates(tmp_path: Path, phase: Phase, state: State) -> None:
    with under_way(tmp_path / "run", updates=25) as pretended:
        pretended.recorder.write(phase, Edge.BEFORE, Work(25))
        assert seen(pretended.output).state is state


def test_a_phase_that_takes_too_long_is_seen_before_it_is_ended_and_when_it_hangs(running: Path) -> None:
    records = RunReader(running).read()
    last, waits = records.flight[-1].monotonic_seconds, {2.0: ("ok", State.TRAINING), 60.0: ("look", State.TRAINING),
                                       700.0: ("!!", State.HUNG)}  # fmt: skip
    for seconds, (sign, state) in waits.items():
        later = dataclasses.replace(records.machine, monotonic_seconds=last + seconds)
        view = view_of(dataclasses.replace(records, machine=later))
        assert (view.state, rows_of(view)[0].sign) == (state, sign)
    assert view.progress.left is None
    assert "it hangs" in drawn(view)


def test_ctrl_z_is_no_hang(running: Path) -> None:
    records = RunReader(running).read()
    later = records.machine.monotonic_seconds + 5 * HOUR
    machine = dataclasses.replace(records.machine, worker_is_stopped=True, monotonic_seconds=later)
    view = view_of(dataclasses.replace(records, machine=machine))
    assert view.state is State.PAUSED
    assert rows_of(view)[0].sign == "ok"


def test_who_died_with_the_supervisor_is_told_from_who_is_just_being_explained(running: Path) -> None:
    records = RunReader(running).read()
    machine = dataclasses.replace(records.machine, worker_lives=False)
    assert view_of(dataclasses.replace(records, machine=machine)).state is State.ENDING
    machine = dataclasses.replace(machine, supervisor_lives=False)
    view = view_of(dataclasses.replace(records, machine=machine))
    assert (view.state, view.next_command) == (State.GONE, "safetrain diagnose")


def test_after_a_reboot_no_process_of_the_same_number_is_taken_for_the_training(running: Path) -> None:
    marker = running / FLIGHT / MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "boot_id": "another boot"}))
    assert seen(running).state is State.GONE


def test_rungs_are_told(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB_OF_ALL, rungs=(RUNG,))
    with under_way(tmp_path / "run", updates=3, job=job) as pretended:
        view = seen(pretended.output)
    assert view.rung == 1
    assert "rung 1 1 x 8 rows per update 8 x 1 did not fit at step 12: out of memory" in " ".join(drawn(view).split())


def test_a_run_that_went_on_by_itself_after_running_out_of_memory_is_no_dead_one(tmp_path: Path) -> None:
    larger = dataclasses.replace(JOB_OF_ALL.settings, batch_size=8, gradient_accumulation=1)
    assert record_ending(tmp_path, "oom-once", dataclasses.replace(JOB_OF_ALL, settings=larger)) is None
    view = seen(tmp_path)
    assert (view.state, view.rung, view.verdict) == (State.FINISHED, 1, None)
    assert view.rung_parts[0] == "2 x 4 rows per update"
    assert any("verdict: out of memory" in event.text for event in view.events)


def test_a_training_that_has_not_begun_shows_the_curves_of_the_one_before_as_such(running: Path) -> None:
    with (running / FLIGHT / JOURNAL).open("a") as file:
        file.write(json.dumps({"type": "Entry", "kind": "started", "wall_seconds": time.time(),
                               "monotonic_seconds": time.monotonic()}) + "\n")  # fmt: skip
    view = seen(running)
    assert view.curves_are_old
    assert view.progress.total_steps is None
    assert "of the training before" in drawn(view)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half a line of metrics": lambda run: _append(run / paths.METRICS_CSV.name, b"26,1.3,0.6"),
    "half a line of the journal": lambda run: _append(run / FLIGHT / JOURNAL, b'{"type": "Entry", "ki'),
    "metrics that are none": lambda run: (run / paths.METRICS_CSV.name).write_bytes(b"\xff\x00,,,\n" * 9),
    "half a marker": lambda run: (run / FLIGHT / MARKER).write_text('{"boot_id": "x"'),
    "a marker without a supervisor": lambda run: _set(run / FLIGHT / MARKER, supervisor_pid=None),
    "a marker whose supervisor has a text for its number": lambda run: _set(run / FLIGHT / MARKER, supervisor_pid="7"),
    "a marker with a number that no process has": lambda run: _set(run / FLIGHT / MARKER, supervisor_pid=2**70),
    "a marker that started at no time": lambda run: _set(run / FLIGHT / MARKER, started_seconds=[]),
    "a marker with half of a limit": lambda run: _set(run / FLIGHT / MARKER, limit_bytes="half", hang_seconds=None),
    "half a job": lambda run: (run / FLIGHT / JOB).write_text('{"base":'),
    "half a post-mortem": lambda run: (run / POSTMORTEM).write_text('{"cause": "ki'),
    "a recorder cut short": lambda run: (run / FLIGHT / RECORDER).write_bytes(b"SAFETRN1"),
    "no flight at all": lambda run: shutil.rmtree(run / FLIGHT),
    "no metrics": lambda run: (run / paths.METRICS_CSV.name).unlink(),
}


def _set(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.parametrize("what", DAMAGE)
def test_records_that_are_half_written_or_gone_are_left_out(what: str, running: Path) -> None:
    reader = RunReader(running)
    view_of(reader.read())
    DAMAGE[what](running)
    for view in (view_of(reader.read()), seen(running)):
        assert drawn(view)
        assert json.loads(json_line(view))["state"] == view.state.value


@pytest.mark.parametrize("ending", ["killed", "finished", "running"])
def test_it_fits_every_terminal(ending: str, ended: Callable[[str], Path], running: Path) -> None:
    view = seen(running if ending == "running" else ended(ending))
    for width, height in SIZES:
        for ascii_only in (False, True):
            lines = drawn(view, width, height, ascii_only=ascii_only).splitlines()
            assert len(lines) <= height
            assert max(map(len, lines)) <= width
            assert view.state.value.upper() in lines[0]
            assert not ascii_only or "".join(lines).isascii()


def test_letters_of_two_columns_make_no_line_too_long(running: Path) -> None:
    write_record(running / FLIGHT / JOB, dataclasses.replace(JOB_OF_ALL, base="模型" * 60))
    assert all(cell_len(line) <= 80 for line in drawn(seen(running), 80, 24).splitlines())
    assert len(drawn(seen(running), 80, 24).splitlines()) <= 24


def test_no_background_and_no_colour_that_says_something_alone(ended: Callable[[str], Path], running: Path) -> None:
    for view in (seen(running), seen(ended("killed"))):
        console = Console(file=io.StringIO(), width=200, height=50, force_terminal=True, color_system="truecolor")
        segments = console.render_lines(screen_of(view, 200, 50, UNICODE))
        styles = {segment.style for line in segments for segment in line if segment.style is not None}
        assert all(style.bgcolor is None for style in styles)
        assert {style.color.name for style in styles if style.color is not None} <= {"magenta"}


def test_a_remark_without_words_is_an_empty_line(running: Path) -> None:
    for text in ("", "\n", "\r\n\r\n"):
        Journal(running / FLIGHT / JOURNAL).note(SAID, text)
    assert "events" in drawn(seen(running))


def test_hostile_text_stays_text(running: Path) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J[bold]x[/bold]\u202e"
    write_record(running / FLIGHT / JOB, dataclasses.replace(JOB_OF_ALL, base=hostile))
    view = seen(running)
    text = drawn(view)
    assert "\x1b" not in text + plain_line(view)
    assert "[bold]x[/bold]" in text


def test_the_lines_for_scripts_are_one_line_each_and_whole(running: Path, ended: Callable[[str], Path]) -> None:
    for output in (running, ended("nan"), running / "nowhere"):
        view = seen(output)
        assert "\n" not in plain_line(view)
        found = json.loads(json_line(view))
        assert found["state"] == view.state.value
        assert "curves" not in found
    assert json.loads(json_line(seen(running)))["losses"]["best_step"] == 20


def test_a_long_run_is_read_once_and_its_curve_keeps_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.watch.monitor_tail.CHUNK_BYTES", 50_000)  # a backlog of many
    with under_way(tmp_path / "run", updates=1) as pretended:
        last = pretended.records[-1]
        many = [
            dataclasses.replace(last, step=step, train_loss=float(step % 2), valid_loss=None) for step in range(9000)
        ]
        many[4000] = dataclasses.replace(many[4000], valid_loss=0.25)
        start_csv(pretended.output / paths.METRICS_CSV.name, many)
        reader = RunReader(pretended.output)
        curves = reader.read(most_seconds=60).curves
        assert (curves.unread_bytes, curves.best and curves.best.step) == (0, 4000)
        assert len(curves.train_loss) <= 1024
        assert all(point.value == pytest.approx(0.5, abs=0.1) for point in curves.train_loss[:-1])
        append_csv(pretended.output / paths.METRICS_CSV.name, dataclasses.replace(last, step=9000, train_loss=7.0))
        after = reader.read().curves
        assert (after.last_train and after.last_train.value, after.last and after.last.step) == (7.0, 9000)


@pytest.mark.parametrize(
    ("place", "column", "text"),
    [(4, "step", ""), (4, "train_loss", "x"), (1, "valid_loss", "x"), (9, "footprint_bytes", "x"),
     (9, "footprint_bytes", '"7"'), (9, "learning_rate", "3x"), *((20, column, "x") for column in COLUMNS),
     (20, "peak_memory_bytes", "")],
)  # fmt: skip
def test_a_damaged_line_costs_itself_and_is_counted(tmp_path: Path, place: int, column: str, text: str) -> None:
    with under_way(tmp_path / "run", updates=20) as pretended:
        path = pretended.output / paths.METRICS_CSV.name
        lines = path.read_text().splitlines()
        before = RunReader(pretended.output).read().curves
        fields = lines[place + 1].split(",")
        fields[COLUMNS.index(column)] = text
        path.write_text("\n".join([*lines[: place + 1], ",".join(fields), "1,2,3", *lines[place + 2 :]]) + "\n")
        view = seen(pretended.output)
        assert view.curves.damaged_lines == 2
        assert "2 damaged lines left out" in drawn(view)
        assert "2 damaged lines left out" in plain_line(view)
        assert json.loads(json_line(view))["damaged_lines"] == 2
        for name in ("train_loss", "footprint_bytes", "learning_rate", "labels_per_second"):
            kept = [point for point in getattr(before, name) if point.step != place]
            assert list(getattr(view.curves, name)) == kept
        assert view.curves.last is not None
        assert view.curves.last.step == (19 if place == 20 else 20)


def test_a_run_that_is_continued_is_read_from_its_new_file(running: Path) -> None:
    reader = RunReader(running)
    assert reader.read().curves.last is not None
    kept = read_csv(running / paths.METRICS_CSV.name)[:11]
    start_csv(running / paths.METRICS_CSV.name, kept)
    last = reader.read().curves.last
    assert last is not None
    assert last.step == 10


def test_the_recorder_is_followed_round_its_ring_and_into_a_new_file(tmp_path: Path) -> None:
    from safetrain.core.recorder import Recorder

    path = tmp_path / RECORDER
    tail, recorder = FlightTail(path), Recorder(path)
    for more in (3, 0, 70, SLOTS - 10, 5, 3 * SLOTS, 1):
        for _ in range(more):
            recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(more))
        tail.read()
        flight = read_flight(path)
        assert flight is not None
        assert list(tail.records) == flight[1]
    Recorder(path).write(Phase.SAVE, Edge.BEFORE, Work(1))
    tail.read()
    assert [record.phase for record in tail.records] == [Phase.SAVE]
    path.unlink()
    tail.read()
    assert tail.header is None


def test_looking_changes_nothing(running: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(running.rglob("*"))}

    before = state()
    reader = RunReader(running)
    for _ in range(3):
        view_of(reader.read())
    assert state() == before


def command(output: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "safetrain.cli", "monitor", "--output", str(output), "--refresh", "0.2", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with command(tmp_path / "nope", "--once") as monitor:
        said = monitor.communicate()[1]
    assert (monitor.returncode, "There is no such folder." in said) == (2, True)


def test_the_command_tells_the_last_state_of_what_has_ended_and_ends(ended: Callable[[str], Path]) -> None:
    process = command(ended("oom"), "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["verdict"]["cause"] == "out_of_memory"


def test_the_command_follows_a_training_to_its_end_in_a_pipe_and_ctrl_c_leaves_it(running: Path) -> None:
    process = command(running)
    assert process.stdout is not None
    assert "training" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    process = command(running, "--plain")
    assert process.stdout is not None
    assert "training" in process.stdout.readline()
    (running / FLIGHT / MARKER).unlink()
    out, _ = process.communicate(timeout=60)
    assert "not running" in out.splitlines()[-1]
