"""Keeps a Mac awake while it trains: without a key pressed it sleeps after a while, on mains power too."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CAFFEINATE = Path("/usr/bin/caffeinate")  # macOS; nowhere else is there a program of this name
END_SECONDS = 5.0


def awake_command(pid: int, program: Path) -> list[str]:
    """No sleep of an idle system (-i) until process ``pid`` ends (-w).

    The display may sleep, which keeps the GPU watchdog quiet. A closed lid puts a laptop to sleep all the same.
    """
    return [str(program), "-i", "-w", str(pid)]


@contextmanager
def awake(pid: int, *, wanted: bool, program: Path | None = None) -> Iterator[None]:
    """Keep the system awake for the length of the block, where the program for it (CAFFEINATE) is there."""
    program = program or CAFFEINATE
    if not (wanted and program.is_file()):
        yield
        return
    process = subprocess.Popen(
        awake_command(pid, program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it ends with the training's process, which it watches
            process.kill()
