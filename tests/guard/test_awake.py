"""A Mac does not sleep in the middle of a training; elsewhere, and without the program, nothing happens."""

import os
import time
from pathlib import Path

import psutil
import pytest

from safetrain.guard.awake import CAFFEINATE, awake, awake_command

# Writes its process id and what it was asked for, as /usr/bin/caffeinate would wait.
PRETENDED = '#!/bin/sh\necho "$$ $*" > "$(dirname "$0")/asked"\nexec sleep 60\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "caffeinate"
    path.write_text(PRETENDED)
    path.chmod(0o755)
    return path


def test_an_idle_system_stays_awake_as_long_as_the_process_lives() -> None:
    """man caffeinate: -i no idle sleep, -w until that process ends; without -d the display may sleep."""
    assert awake_command(4711, CAFFEINATE) == ["/usr/bin/caffeinate", "-i", "-w", "4711"]


def test_it_runs_beside_the_process_and_ends_with_the_block(program: Path) -> None:
    asked = program.with_name("asked")
    with awake(os.getpid(), wanted=True, program=program):
        deadline = time.monotonic() + 5
        while not (asked.is_file() and asked.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid, words = asked.read_text().split(maxsplit=1)
        assert words.strip() == f"-i -w {os.getpid()}"
        assert psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(pid))


def test_unwanted_or_missing_it_is_no_error(program: Path) -> None:
    with awake(os.getpid(), wanted=False, program=program):
        pass
    with awake(os.getpid(), wanted=True, program=program.with_name("none")):
        pass
    assert not program.with_name("asked").exists()


def test_no_process_is_left_when_the_block_fails(program: Path) -> None:
    with pytest.raises(ZeroDivisionError), awake(os.getpid(), wanted=True, program=program):
        raise ZeroDivisionError
    assert not [child for child in psutil.Process().children() if "-w" in child.cmdline()]
