"""Runs one of the project's own modules as a child process. A child may die; we may not."""

import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

from safetrain.core.signals import handling

TAIL_CHARACTERS = 2000


class ChildFailed(Exception):
    """The child ended badly or said nothing that could be read; the message says how."""


def run_json(module: str, arguments: list[str], timeout_seconds: float) -> dict[str, Any]:
    """The last line of ``python -m module arguments`` as JSON; raises ChildFailed."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer after {timeout_seconds:.0f} s") from None
    if done.returncode != 0:
        last = _last_words(done.stderr[-TAIL_CHARACTERS:])
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise ChildFailed(f"{how}: {last}" if last else how)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ChildFailed("the answer cannot be read") from None


def run_lines(module: str, arguments: list[str], timeout_seconds: float) -> tuple[list[str], str]:
    """What ``python -m module arguments`` printed before it ended, however that was, and how it ended; empty: well."""
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        try:
            code = subprocess.run(command, stdout=out, stderr=err, timeout=timeout_seconds, check=False).returncode
            how = "" if code == 0 else f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = f"no end after {timeout_seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        lines, last = out.read().splitlines(), _last_words(err.read())
    return lines, f"{how}: {last}" if how and last else how


def _last_words(stderr: str) -> str:
    """The last line that is not indented: an error's first line, not where it was or what to do about it."""
    return next((line for line in reversed(stderr.splitlines()) if line and not line[0].isspace()), "")


def run_to_its_end(command: list[str], stdout: int | None = None) -> int:
    """Run a command on this terminal; its exit code, 128 plus the signal when one ended it.

    A Ctrl-C reaches the child from the terminal, and we wait for it to save its state: ``subprocess.run`` would kill
    it a quarter of a second later. SIGTERM reaches only us, so it is passed on.
    """
    process = subprocess.Popen(command, stdout=stdout)
    with handling({signal.SIGINT: lambda _number: None, signal.SIGTERM: process.send_signal}):
        code = process.wait()
    return code if code >= 0 else 128 - code
