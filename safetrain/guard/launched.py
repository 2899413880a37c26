"""Ranks on several machines, started through mlx.launch: rank 0 is here and seen, of the others is known what it says.

mlx.launch is one process here. Rank 0 is its child, the others are at the end of an ssh each, and end with it.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from safetrain.core.errors import BadUpdateError
from safetrain.core.protocol.flight import read_flight
from safetrain.core.records.hostfile import read_hostfile
from safetrain.core.storage.run_files import RECORDER, rank_folder
from safetrain.guard.ending import Ending, WatchSettings
from safetrain.guard.watched_rank import PEER_LOST, RING_WORDS, WatchedRank

EVENTS = "events"  # in the flight folder: the FIFO that rank 0 writes to
WHOEVER_STARTED_IT = "0"  # for a rank's supervisor
ENDED = re.compile(rb"Node with rank (\d+) exited with code (-?\d+)")
KILLED = re.compile(rb"Node with rank \d+ was killed")
PASSED_ON = ("PYTHONPATH",)  # of our variables, to ranks elsewhere
TOGETHER = (BadUpdateError.exit_code, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # all end so; rank 0 still writes
READING_SECONDS = 5.0
FIRST_PORT, PORT_STEP = 32323, 100  # mlx.launch's own first one


class LaunchedRanks(WatchedRank):
    """Rank 0 and mlx.launch around it; its process is mlx.launch."""

    def __init__(
        self, process: subprocess.Popen[bytes], fifo: Path, names: Sequence[str], settings: WatchSettings
    ) -> None:
        self._fifo, self._names, self._folder = fifo, names, settings.flight
        self._reading = True
        self._codes: list[tuple[int, int]] = []  # rank and exit code of those that ended badly, in their order
        super().__init__(0, settings.flight, process, fifo, settings)

    @property
    def pid(self) -> int:
        """Rank 0's, as soon as it has said so."""
        return self._flight.pid() or self.process.pid

    @property
    def return_code(self) -> int:
        """Of rank 0; that of mlx.launch, if rank 0 said nothing."""
        return dict(self._codes).get(0, self.process.returncode or 0)

    @property
    def others_have_gone(self) -> bool:
        """Whether a rank has ended badly, other than together with all."""
        return any(code not in TOGETHER for _, code in self._codes) and not self.ended_with_all

    def ask(self, number: int) -> None:
        """Rank 0 tells the others."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def send(self, number: int) -> None:
        """To mlx.launch and all that it has started; SIGUSR1 to rank 0 alone, which can do something with it."""
        if number == signal.SIGUSR1:
            self.ask(number)
        else:
            super().send(number)

    def hear(self, line: bytes) -> bool:
        """What mlx.launch says of a rank's end is for us; all else is for people."""
        found = ENDED.search(line)
        if found:
            self._codes.append((int(found[1]), int(found[2])))
        return not (found or KILLED.search(line) or line.startswith(RING_WORDS))

    def read_events(self, source: int | Path) -> None:
        """From all who open the FIFO, one after the other: whoever opens it waits for a reader."""
        while self._reading:
            super().read_events(source)

    def finish_reading(self) -> None:
        """If rank 0 has never opened its end of the FIFO, it is waited for no longer."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._reading = False
        deadline = time.monotonic() + READING_SECONDS
        while self._readers[0].is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.close(os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK))
            self._readers[0].join(0.02)
        super().finish_reading()
        self._fifo.unlink(missing_ok=True)

    def ending(self, started: tuple[float, float], ended_by_us: str, overdue: float, passed_on: int) -> Ending:
        """Of the rank that ended the training, as far as that can be told."""
        found = super().ending(started, ended_by_us, overdue, passed_on)
        rank, code = self._first()
        if ended_by_us or self.finished is not None or self.ended_with_all or rank is None:
            return found
        failed = self.failed if self.failed is not None and self.failed.exit_code == code else None
        if rank == 0:
            return dataclasses.replace(found, rank=0, failed=failed)
        host = self._names[rank]
        there = read_flight(rank_folder(self._folder, rank) / RECORDER)  # here, if it was on this machine after all
        pid = there[0].pid if there is not None else 0
        return dataclasses.replace(found, rank=rank, return_code=code, failed=failed, host=host, pid=pid)

    def _first(self) -> tuple[int | None, int]:
        """The first rank that ended badly, rank 0 passed over where it ended for the sake of another."""
        failed = self.failed  # of rank 0, or of another one on this machine
        lost = failed is not None and PEER_LOST in failed.message and failed.exit_code == self.return_code
        others = [(rank, code) for rank, code in self._codes if rank or not lost]
        return next(iter(others), (None, 0))


def start_launched(command: Sequence[str], settings: WatchSettings, hostfile: Path) -> LaunchedRanks:
    """Start ``command FLIGHT EVENTS 0`` for each entry of a hostfile, through mlx.launch."""
    fifo = settings.flight / EVENTS
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    names = read_hostfile(hostfile).names
    shared = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(settings.environment)
    process = subprocess.Popen(
        [
            *settings.launcher, str(os.getpid()), "--backend", settings.backend, "--hostfile", str(hostfile),
            "--cwd", str(Path.cwd()), "--python", command[0], "--starting-port", str(first_port(len(names))),
            *(word for name, value in shared.items() for word in ("--env", f"{name}={value}")),
            "--", *command[1:], str(settings.flight), str(fifo), WHOEVER_STARTED_IT,
        ],
        stdin=subprocess.PIPE,  # that stays open: at its end mlx.launch would spin
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=settings.locks,
        start_new_session=True,
    )  # fmt: skip
    return LaunchedRanks(process, fifo, names, settings)


def first_port(count: int) -> int:
    """The first of ``count`` ports in a row that nobody uses on this machine; mlx.launch's own where it can be."""
    for first in range(FIRST_PORT, FIRST_PORT + 100 * PORT_STEP, PORT_STEP):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    return FIRST_PORT
