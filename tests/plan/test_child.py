"""A child's death is an answer, and a Ctrl-C leaves it the time to save its state."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.plan.child import ChildFailed, run_json, run_lines

PARENT = """
import sys
from safetrain.plan.child import run_to_its_end
sys.exit(run_to_its_end([sys.executable, sys.argv[1]]))
"""
SLOW_TO_SAVE = """
import signal, sys, time
def save(number, frame):
    time.sleep(1.5)
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
    told = "exit code 1: safetrain.core.errors.ModelError: It is broken."
    with pytest.raises(ChildFailed, match=f"^{re.escape(told)}$"):
        run_json("broken_child", [], 60)
    assert run_lines("broken_child", [], 60) == ([], told)


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


def test_a_child_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"exit code 1: .*No module named"):
        run_json("no.such.module", [], 30)
    with pytest.raises(ChildFailed, match="no answer after"):
        run_json("http.server", ["0", "--bind", "127.0.0.1"], 0.5)
    with pytest.raises(ChildFailed, match="cannot be read"):
        run_json("this", [], 30)
