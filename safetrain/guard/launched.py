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

import psutil

from safetrain.core.errors import BadUpdateError
from safetrain.core.memory.terms import usable_cores
from safetrain.core.protocol.events import Failed, parse_event
from safetrain.core.protocol.flight import read_flight
from safetrain.core.protocol.liveness import living_process
from safetrain.core.records.hostfile import as_launched, read_hostfile
from safetrain.core.storage.files import write_text
from safetrain.core.storage.run_files import RECORDER, rank_folder
from safetrain.guard.ending import Ending, WatchSettings
from safetrain.guard.watched_rank import PEER_LOST, RING_WORDS, WatchedRank

HOSTS = "hosts.json"  # in the flight folder: the hostfile, as mlx.launch understands it
EVENTS = "events"  # in the flight folder: the FIFO that rank 0 writes to
WHOEVER_STARTED_IT = "0"  # for a rank's supervisor
ENDED = re.compile(rb"Node with rank (\d+) exited with code (-?\d+)")
KILLED = re.compile(rb"Node with rank \d+ was killed")
THREADS = "OPENBLAS_NUM_THREADS"  # of a rank on a CPU: also its streams (engine/backend.py)
PASSED_ON = ("PYTHONPATH",)  # of our variables, to ranks elsewhere
REFUSED = BadUpdateError.exit_code  # also that of a rank which lost the others
TOGETHER = (REFUSED, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # all end so; rank 0 still writes
READING_SECONDS = 5.0
FIRST_PORT, PORT_STEP = 32323, 100  # mlx.launch's own first one


class LaunchedRanks(WatchedRank):
    """Rank 0 and mlx.launch around it; its process is mlx.launch."""

    def __init__(
        self, process: subprocess.Popen[bytes], fifo: Path, names: Sequence[str], settings: WatchSettings
    ) -> None:
        self._fifo, self._names, self._folder = fifo, names, settings.flight
        self._reading = True
        self._elsewhere: Failed | None = None  # the first that a rank on another machine said of its end
        self._wanted = 0  # a signal that rank 0 is told as soon as it can be
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
        """Whether a rank has ended badly, other than together with all.

        A bad update is refused by all, and rank 0 then measures its rows; where it waits for others, it is no such end.
        """
        bad = any(code not in TOGETHER or (code == REFUSED and self.waits_for_others) for _, code in self._codes)
        return bad and not self.ended_with_all

    def is_over(self) -> bool:
        """Whether mlx.launch has ended, and rank 0, which may live on to save."""
        return super().is_over() and self._rank_0() is None

    def feed(self) -> None:
        """Take in its new records; tell rank 0 what it could not be told before."""
        super().feed()
        if self._wanted and self._rank_0() is not None:
            self.ask(self._wanted)
            self._wanted = 0

    def ask(self, number: int) -> None:
        """Rank 0 tells the others."""
        found = self._rank_0()
        if found is None:
            self._wanted = number
            return
        with contextlib.suppress(psutil.Error):
            found.send_signal(number)

    def send(self, number: int) -> None:
        """To mlx.launch and all that it has started; to rank 0 alone what it can do something with: at SIGTERM
        mlx.launch would end at once, and rank 0 with it."""
        if number in (signal.SIGUSR1, signal.SIGTERM) and self._rank_0() is not None:
            self.ask(number)
        elif number != signal.SIGUSR1:
            super().send(number)

    def _rank_0(self) -> psutil.Process | None:
        """Its process, while it runs."""
        return living_process(self._flight.pid(), time.time())

    def hear(self, line: bytes) -> bool:
        """What mlx.launch says of a rank's end, and a rank elsewhere of its own, is for us; all else is for people."""
        found = ENDED.search(line)
        if found:
            self._codes.append((int(found[1]), int(found[2])))
        event = parse_event(line)
        if isinstance(event, Failed) and self._elsewhere is None:
            self._elsewhere = event
        return not (found or KILLED.search(line) or line.startswith(RING_WORDS) or event is not None)

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
        said = (self.failed,) if rank == 0 else (self._elsewhere, self.failed)
        failed = next((each for each in said if each is not None and each.exit_code == code), None)
        if rank == 0:
            return dataclasses.replace(found, rank=0, failed=failed)
        host = self._names[rank]
        there = read_flight(rank_folder(self._folder, rank) / RECORDER)  # here, if it was on this machine after all
        pid = there[0].pid if there is not None else 0
        return dataclasses.replace(found, rank=rank, return_code=code, failed=failed, host=host, pid=pid)

    def _first(self) -> tuple[int | None, int]:
        """The first rank that ended badly; those that may have ended for the sake of another come last, and rank 0 is
        passed over where it did.

        mlx.launch looks once a second, so that the order in which it tells of two ends can be the wrong one.
        """
        failed = self.failed  # of rank 0, or of another one
        lost = failed is not None and PEER_LOST in failed.message and failed.exit_code == self.return_code
        others = [(rank, code) for rank, code in self._codes if rank or not lost]
        return min(others, key=lambda each: each[1] in TOGETHER, default=(None, 0))


def start_launched(command: Sequence[str], settings: WatchSettings, hostfile: Path) -> LaunchedRanks:
    """Start ``command FLIGHT EVENTS 0`` for each entry of a hostfile, through mlx.launch."""
    fifo = settings.flight / EVENTS
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    hosts = read_hostfile(hostfile)
    known = settings.flight / HOSTS
    write_text(known, as_launched(hostfile))
    shared = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(settings.environment)
    shared |= cores_of_each(max(hosts.names.count(name) for name in hosts.names))
    process = subprocess.Popen(
        [
            *settings.launcher, str(os.getpid()), "--backend", settings.backend, "--hostfile", str(known),
            "--cwd", str(Path.cwd()), "--python", command[0], "--starting-port", str(first_port(hosts.ports)),
            *(word for name, value in shared.items() for word in ("--env", f"{name}={value}")),
            "--", *command[1:], str(settings.flight), str(fifo), WHOEVER_STARTED_IT,
        ],
        stdin=subprocess.PIPE,  # that stays open: at its end mlx.launch would spin
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=settings.locks,
        start_new_session=True,
    )  # fmt: skip
    return LaunchedRanks(process, fifo, hosts.names, settings)


def cores_of_each(ranks: int) -> dict[str, str]:
    """The environment in which so many ranks share a machine's cores.

    With all cores for each they would wait for one another (measured: benchmarks/bench_ranks_training.py).
    """
    if ranks == 1 or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, usable_cores() // ranks))}


def first_port(count: int) -> int:
    """The first of ``count`` ports in a row that nobody uses on this machine; mlx.launch's own where it can be."""
    for first in range(FIRST_PORT, FIRST_PORT + 100 * PORT_STEP, PORT_STEP):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    return FIRST_PORT
