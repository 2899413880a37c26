"""A child's death is an answer, and a Ctrl-C leaves it the time to save its state."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.plan.child import PASSED_CAP, ChildFailed, ran_out_of_memory, run_json, run_lines

PARENT = """
import sys
from safetrain.plan.child import run_to_its_end
sys.exit(run_to_its_end([sys.executable, sys.argv[1]]))
"""
SLOW_TO_SAVE = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
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
    with pytest.raises(ChildFailed, match="cannot be read"):
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
    assert parent.wait(timeout=10) == 128 + number
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
kept = bytearray(int(sys.argv[3]))
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
    lines, ended = run_lines(growing, ["listens", str(word), str(200 * MIB)], 30, 100 * MIB)
    assert (lines, ended) == (["before"], f"{PASSED_CAP} 100.0 MiB")
    assert word.read_text() == "ended"
    assert run_lines(growing, ["small", str(tmp_path), str(MIB)], 30, 100 * MIB) == (["before"], "")
    monkeypatch.setattr("safetrain.plan.child.GRACE_SECONDS", 0.2)
    began = time.monotonic()
    assert run_lines(growing, ["deaf", str(word), str(200 * MIB)], 30, 100 * MIB)[1].startswith(PASSED_CAP)
    assert time.monotonic() - began < 10


def test_what_speaks_of_memory() -> None:
    for ended in ("killed by signal 11", "killed by signal 9", "exit code 1: [malloc] Unable to allocate 8 bytes"):
        assert ran_out_of_memory(ended)
    assert not any(map(ran_out_of_memory, ("killed by signal 15", "exit code 1: ImportError")))
