"""A dry run makes the training's largest updates under its limits, survives what they do, and is remembered."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.data.token_rows import token_row
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.settings import LoraSettings, TrainJob
from safetrain.engine.job import load_job, own_largest_update
from safetrain.plan.child import PASSED_CAP, Answer, ChildFailed, dry_run_path, most_bytes, run_json, run_lines, try_out
from tests.plan.test_recommend import machine
from tests.stores import write_stores
from tests.support.random_models import build_model
from tests.support.settings import SETTINGS

pytestmark = pytest.mark.usefixtures("own_cache")

MODULE = "safetrain.engine.dry_run"
ALL_LAYERS = LoraSettings(8, 2.0, 0.0, 6, ("all-linear",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    shape = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    return read_model_files(build_model(tmp_path_factory.mktemp("planned") / "model", bits=4, bfloat16=True, **shape))


@pytest.fixture
def job(model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """In a project of its own, with rows of many lengths."""
    lengths = [12 + 3 * (1 + i % 30) for i in range(40)]
    rows = [token_row(range(5, 5 + n), [place >= 10 for place in range(n)]) for n in lengths]
    write_stores(tmp_path / "project" / "data" / "validated", model.folder, rows[:32], rows[32:])
    monkeypatch.chdir(tmp_path / "project")
    settings = dataclasses.replace(
        SETTINGS, lora=ALL_LAYERS, batch_size=2, gradient_accumulation=4, dequantize_base=True, max_seq_length=128
    )
    return TrainJob(str(model.folder), settings, False, MemoryBudget(2**40), None, mlx_limit_bytes=2**40)


def ask(model: ModelFiles, job: TrainJob, said: list[str], module: str = MODULE) -> Answer:
    found = try_out(dry_run_path(model, machine(), job, "rows"), module, job, 0.0, said.append)
    assert found is not None
    return found


def test_the_training_is_tried_out_under_its_limits(model: ModelFiles, job: TrainJob, tmp_path: Path) -> None:
    said: list[str] = []
    found = ask(model, job, said)
    assert found.ended == ""
    assert found.measured is not None
    assert 0 < model.static_bytes < found.measured.peak_bytes < found.measured.footprint_bytes
    assert found.measured.update_seconds > 0
    assert found.measured.own_update == own_largest_update(load_job(job), "cpu")
    assert 0.5 * found.measured.peak_bytes < found.measured.own_peak_bytes <= found.measured.peak_bytes
    other_rate = dataclasses.replace(job, settings=dataclasses.replace(job.settings, learning_rate=1e-9, save_steps=9))
    assert ask(model, other_rate, said) == found
    assert [text[:9] for text in said] == ["dry run o", "dry run: "]
    same, other = (dry_run_path(model, there, other_rate, "rows") for there in (machine(), machine(backend="metal")))
    assert try_out(same, "", other_rate, 0.0, said.append) == found
    assert try_out(other, "", other_rate, 0.0, said.append) is None
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["data"]  # nothing else is left
    limit = int(0.85 * found.measured.peak_bytes)
    kept = ask(model, dataclasses.replace(job, mlx_limit_bytes=limit), said).measured
    assert kept is not None
    assert kept.peak_bytes < min(1.15 * limit, found.measured.peak_bytes)  # where mlx would run ahead of it, it waits
    starved = dataclasses.replace(job, memory_limit_bytes=found.measured.footprint_bytes // 2)
    died = ask(model, starved, said)
    assert (died.measured, died.ran_out_of_memory) == (None, True), died.ended


def test_it_is_watched_where_nothing_bounds_metal_s_memory(
    model: ModelFiles, job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS; what passed its cap is remembered as too large, with or without a limit of its own."""
    assert most_bytes(2**33, 2**32, "linux") is most_bytes(0, None, "darwin") is None
    free = most_bytes(2**33, None, "darwin")
    assert free is not None
    assert 1.1 < free / 2**33 < 1.2
    assert most_bytes(2**33, 2**32, "darwin") == 2**32
    (tmp_path / "swelling.py").write_text("import time\nkept = bytearray(2**28)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("safetrain.plan.child.most_bytes", lambda *_: 2**26)
    said: list[str] = []
    found = ask(model, job, said, "swelling")
    assert (found.measured, found.ran_out_of_memory) == (None, True)
    assert found.ended == "its memory exceeded 64.0 MiB"
    assert ask(model, job, said, "swelling") == found
    assert len(said) == 1  # the second time it is remembered


PARENT = """
import sys
from safetrain.plan.child import run_to_its_end
sys.exit(run_to_its_end([sys.executable, sys.argv[1]]))
"""
SLOW_TO_SAVE = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    os.write(1, b"saved\\n")  # the signal may come before print has returned
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_an_error_of_many_lines_is_told_by_its_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising = "from safetrain.core.errors import ModelError\nraise ModelError('It is broken.', where='a file')\n"
    (tmp_path / "broken_child.py").write_text(raising)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = f"exit code 1: safetrain.core.errors.ModelError: It is broken. (traceback: {tmp_path}/error.txt)"
    with pytest.raises(ChildFailed, match=f"^{re.escape(told)}$"):
        run_json("broken_child", [], 60)
    assert run_lines("broken_child", [], 60) == ([], told)
    assert "line 2, in <module>" in (tmp_path / "error.txt").read_text()
    with pytest.raises(ChildFailed, match="not finished after"):
        run_json("http.server", ["0", "--bind", "127.0.0.1"], 0.5)
    with pytest.raises(ChildFailed, match="no readable answer"):
        run_json("this", [], 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_child_time_to_save(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "child.py"
    script.write_text(SLOW_TO_SAVE)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does
    else:
        parent.send_signal(number)
    assert parent.stdout.read() == "saved\n"
    assert parent.wait(timeout=60) == 128 + number
    parent.stdout.close()


MIB = 2**20
GROWING = """
import signal, sys, time
from pathlib import Path
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda n, f: (Path(sys.argv[2]).write_text("ended"), sys.exit(143)))
print("before", flush=True)
kept = [bytearray(2**20) for _ in range(int(sys.argv[3]) >> 20)]  # a signal is answered between two of them
if sys.argv[1] != "small":
    time.sleep(60)
"""


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that takes memory."""
    (tmp_path / "growing_child.py").write_text(GROWING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return "growing_child"


def test_a_child_beyond_its_cap_is_asked_to_end_or_killed_and_what_it_said_is_kept(
    growing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where nothing else holds a dry run back from swapping the desktop."""
    word = tmp_path / "word"
    monkeypatch.setattr("safetrain.plan.child.GRACE_SECONDS", 60)
    lines, ended = run_lines(growing, ["listens", str(word), str(200 * MIB)], 30, 100 * MIB)
    assert (lines, ended) == (["before"], f"{PASSED_CAP} 100.0 MiB")
    assert word.read_text() == "ended"
    assert run_lines(growing, ["small", str(tmp_path), str(MIB)], 30, 100 * MIB) == (["before"], "")
    monkeypatch.setattr("safetrain.plan.child.GRACE_SECONDS", 0.2)
    began = time.monotonic()
    assert run_lines(growing, ["deaf", str(word), str(200 * MIB)], 30, 100 * MIB)[1].startswith(PASSED_CAP)
    assert time.monotonic() - began < 25
