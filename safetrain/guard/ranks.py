"""Starts the processes of a training run: a single one, or ranks on this machine or (mlx.launch) on several machines.

Ranks on this machine get mlx.launch's environment, but are children of the supervisor, which therefore knows their exit
status, output and memory. For several machines, mlx.launch is the only child. Its own child, rank 0, is watched; the
other ranks run over ssh, and only their output is known.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1

import psutil

from safetrain.core.errors import BadUpdateError
from safetrain.core.events import Failed, parse_event
from safetrain.core.hosts import read_hostfile
from safetrain.core.memory.terms import THREADS, usable_cores
from safetrain.core.recorder import living_process, read_flight
from safetrain.core.storage.files import write_text
from safetrain.core.storage.paths import ERROR, RECORDER, STACKS, rank_folder
from safetrain.guard.process import RING_PREFIX, Ending, WatchedProcess, WatchSettings

RING = "ring.json"  # in the flight folder: the ranks' addresses
HOSTS = "hosts.json"  # in the flight folder: the hostfile as mlx.launch understands it
EVENTS = "events"  # in the flight folder: the FIFO that rank 0 writes to
LOOPBACK = "127.0.0.1"
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
PASSED_ON = ("PYTHONPATH",)  # environment variables for ranks on other machines
PARENT = "0"  # the worker's argument: its parent is its supervisor
RANK_ENDED = re.compile(rb"Node with rank (\d+) exited with code (-?\d+)")
RANK_KILLED = re.compile(rb"Node with rank \d+ was killed")
REFUSED = BadUpdateError.exit_code  # also the code of a rank that lost the others
TO_RANK_0 = (SIGINT, SIGTERM, SIGUSR1)  # SIGUSR1 makes it write its stacks; any of these would end mlx.launch
ENDS_ALL = (REFUSED, 128 + SIGINT, 128 + SIGTERM)  # exit codes after which rank 0 still writes
READING_SECONDS = 5.0
FIRST_PORT, PORT_STEP = 32323, 100  # mlx.launch's own first port


def start_ranks(settings: WatchSettings) -> list[WatchedProcess]:
    """Start ``command FLIGHT EVENTS OUR_PID`` for each rank, on this machine or on the machines in a hostfile."""
    _clear_flight(settings.flight)
    if settings.hostfile is not None:
        return [_start_launched(settings, settings.hostfile)]
    ranks: list[WatchedProcess] = []
    try:
        for number, environment in enumerate(_environments(settings)):
            ranks.append(_start(settings, number, environment))
    except OSError:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
        raise
    return ranks


def _clear_flight(flight: Path) -> None:
    """Remove the files of earlier processes."""
    for folder in (flight, *flight.glob("rank_*")):
        for name in (RECORDER, STACKS, ERROR):
            (folder / name).unlink(missing_ok=True)


def _start(settings: WatchSettings, number: int, environment: dict[str, str]) -> WatchedProcess:
    flight = rank_folder(settings.flight, number)
    flight.mkdir(exist_ok=True)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*settings.command, str(flight), str(write_end), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end, *settings.locks),
        start_new_session=True,
        env={**os.environ, **environment},
    )
    os.close(write_end)
    return WatchedProcess(number, flight, process, read_end, settings)


def _environments(settings: WatchSettings) -> list[dict[str, str]]:
    """Return the environment variables of each rank on this machine, in addition to ours."""
    count, common = settings.ranks, dict(settings.environment)
    if count == 1:
        return [common]
    common |= cores_of_each(count)
    ports = free_ports(count)
    if settings.backend == "nccl":  # one device per rank
        visible = [each for each in os.environ.get(CUDA_DEVICES, "").split(",") if each]
        devices = visible or [str(rank) for rank in range(count)]
        common |= {"NCCL_HOST_IP": LOOPBACK, "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(count)}
        return [{**common, "MLX_RANK": str(rank), CUDA_DEVICES: devices[rank % len(devices)]} for rank in range(count)]
    hosts = settings.flight / RING
    write_text(hosts, json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]))
    return [{**common, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts.resolve())} for rank in range(count)]


def free_ports(count: int) -> list[int]:
    """Find ``count`` different free ports on this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def cores_of_each(ranks: int) -> dict[str, str]:
    """Return the variables that divide a machine's cores among its ranks.

    If each rank used all cores, they would slow each other down (measured: benchmarks/bench_ranks_training.py).
    """
    if ranks == 1 or THREADS in os.environ:
        return {}
    return {THREADS: str(max(1, usable_cores() // ranks))}


class LaunchedRanks(WatchedProcess):
    """Ranks started by mlx.launch: watches rank 0 on this machine, and learns from mlx.launch how the others ended."""

    def __init__(
        self, process: subprocess.Popen[bytes], fifo: Path, hosts: Sequence[str], settings: WatchSettings
    ) -> None:
        self._fifo, self._hosts = fifo, hosts
        self._reading = True
        self._failed_elsewhere: Failed | None = None  # the first failure that a rank on another machine reported
        self._codes: list[tuple[int, int]] = []  # rank and exit code of each rank that ended badly, in order
        super().__init__(0, settings.flight, process, fifo, settings)

    @property
    def pid(self) -> int:
        """Process id of rank 0, as soon as its recorder names it."""
        return self.flight.header.pid if self.flight.header is not None else self.process.pid

    @property
    def return_code(self) -> int:
        """Exit code of rank 0, or mlx.launch's if unknown."""
        return dict(self._codes).get(0, self.process.returncode or 0)

    @property
    def others_have_gone(self) -> bool:
        """Whether a rank has failed while others have not.

        After a bad update all ranks stop, and rank 0 continues alone to measure the update's rows. If rank 0 waits for
        other ranks instead, one of them has died.
        """
        bad = any(code not in ENDS_ALL or (code == REFUSED and self.waits_for_others) for _, code in self._codes)
        return bad and not self.ended_with_all

    def is_over(self) -> bool:
        """Whether mlx.launch has ended, and rank 0 too, which may run longer to save."""
        return super().is_over() and self._rank_0() is None

    def send(self, number: int) -> None:
        """Ask rank 0 to end or to write its stacks; it informs the others. Other signals go to the process group.

        Before rank 0's start and after its end, SIGTERM ends mlx.launch and the other ranks.
        """
        rank_0 = self._rank_0()
        if rank_0 is not None and number in TO_RANK_0:
            with suppress(psutil.Error):
                rank_0.send_signal(number)
        elif number != SIGUSR1:
            super().send(number)

    def take_line(self, line: bytes) -> bool:
        """Process a line from mlx.launch or a rank about a rank's end; other lines are shown."""
        end, event = RANK_ENDED.search(line), parse_event(line)
        if end:
            self._codes.append((int(end[1]), int(end[2])))
        if isinstance(event, Failed):
            self._failed_elsewhere = self._failed_elsewhere or event
        return not (end or RANK_KILLED.search(line) or line.startswith(RING_PREFIX) or event is not None)

    def read_events(self, source: int | Path) -> None:
        """Read events from every process that opens the FIFO, one after another: opening it waits for a reader."""
        while self._reading:
            super().read_events(source)

    def finish_reading(self) -> None:
        """Read to the end; do not wait for a rank 0 that never opened the FIFO."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._reading = False
        deadline = time.monotonic() + READING_SECONDS
        while self._readers[0].is_alive() and time.monotonic() < deadline:
            with suppress(OSError):
                os.close(os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK))
            self._readers[0].join(0.02)
        super().finish_reading()
        self._fifo.unlink(missing_ok=True)

    def ending(self, started_seconds: float, ended_by_us: str, overdue: float, passed_on: int) -> Ending:
        """Describe the end of the rank that ended the training."""
        ending = super().ending(started_seconds, ended_by_us, overdue, passed_on)
        if ended_by_us or self.finished is not None or self.ended_with_all or not self._codes:
            return ending
        # mlx.launch checks once a second, so ranks that may only have followed another can come first
        rank, code = min(self._codes, key=lambda each: each[1] in ENDS_ALL)
        failed = self._failed_elsewhere if rank else self.failed
        failed = failed if failed is not None and failed.exit_code == code else None
        if rank == 0:
            return replace(ending, rank=0, failed=failed)
        header = read_flight(rank_folder(self.settings.flight, rank) / RECORDER).header  # on this machine after all?
        pid = header.pid if header is not None else 0
        return replace(ending, rank=rank, return_code=code, failed=failed, host=self._hosts[rank], pid=pid)

    def _rank_0(self) -> psutil.Process | None:
        """Return rank 0's process while it runs."""
        return living_process(self.flight.header.pid) if self.flight.header is not None else None


def _start_launched(settings: WatchSettings, hostfile: Path) -> LaunchedRanks:
    """Start ``settings.command FLIGHT EVENTS 0`` for each entry in a hostfile, through mlx.launch."""
    fifo = settings.flight / EVENTS
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    hosts = read_hostfile(hostfile)
    hostfile_here = settings.flight / HOSTS
    write_text(hostfile_here, hosts.launched)
    shared = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(settings.environment)
    shared |= cores_of_each(max(hosts.names.count(name) for name in hosts.names))
    process = subprocess.Popen(
        [
            *settings.launcher, str(os.getpid()), "--backend", settings.backend, "--hostfile", str(hostfile_here),
            "--cwd", str(Path.cwd()), "--python", settings.command[0], "--starting-port", str(first_port(hosts.ports)),
            *(word for name, value in shared.items() for word in ("--env", f"{name}={value}")),
            "--", *settings.command[1:], str(settings.flight), str(fifo), PARENT,
        ],
        stdin=subprocess.PIPE,  # stays open: at the end of stdin mlx.launch would spin
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=settings.locks,
        start_new_session=True,
    )  # fmt: skip
    return LaunchedRanks(process, fifo, hosts.names, settings)


def first_port(count: int) -> int:
    """Find the first of ``count`` consecutive free ports, starting at mlx.launch's default."""
    for first in range(FIRST_PORT, FIRST_PORT + 100 * PORT_STEP, PORT_STEP):
        with suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    return FIRST_PORT
