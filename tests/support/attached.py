"""Monitors that are attached to a training and killed, for tests and benchmarks."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from tests.support.chaos.project import Project

ENDS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KINDS = (("--refresh", "0.2"), ("--plain", "--refresh", "0.2"), ("--json", "--refresh", "0.2"))
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Attached:
    """One monitor that was killed."""

    kind: tuple[str, ...]
    signal_number: int
    drawn_bytes: int  # that it had shown by then


def attach_and_kill(
    project: Project, training: subprocess.Popen[bytes], times: int, look_seconds: float
) -> Iterator[Attached]:
    """So many monitors, one after the other, each in a terminal of its own, each killed after it has shown something.

    Ends when the training has ended.
    """
    kinds, ends = cycle(KINDS), cycle(ENDS)
    for _ in range(times):
        if training.poll() is not None:
            return
        yield _once(project, next(kinds), next(ends), look_seconds)


def _once(project: Project, kind: tuple[str, ...], number: int, look_seconds: float) -> Attached:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "safetrain.cli", "monitor", *kind]
    environment = project.environment | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        command, cwd=project.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    drawn, end = 0, time.monotonic() + DEADLINE_SECONDS
    try:
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    drawn += len(os.read(ours, 2**16))
                except OSError:  # it has ended
                    break
                end = min(end, time.monotonic() + look_seconds)
            elif process.poll() is not None:
                break
    finally:
        if process.poll() is None:
            os.kill(process.pid, number)
        os.close(ours)
        process.wait(timeout=DEADLINE_SECONDS)
    return Attached(kind, number, drawn)
