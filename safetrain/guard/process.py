"""A training process, watched by its supervisor: events, output, flight records and memory."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import BinaryIO

import psutil

from safetrain.core.events import Begun, Event, Failed, Finished, parse_event
from safetrain.core.memory.system import (
    OWN_LIMIT,
    PRESSURE_LEVEL,
    footprint_bytes,
    memory_groups,
    memory_limit_bytes,
    oom_kills,
    sysctl_number,
)
from safetrain.core.recorder import Edge, FlightReader, FlightRecord, Phase
from safetrain.core.storage.paths import RECORDER

MACHINE = "the machine's memory"
HANG_TIMES_LONGEST = 10.0  # slow paths of mlx, other programs and a hot laptop cost far less
HANG_FIRST_TIME = 15.0  # times the shortest time limit, the first time: loading, compiling, the first evaluation
RECENT_SECONDS = 10.0  # readings this long before the end count as evidence
TAIL_BYTES = 64 * 1024
RING_PREFIX = b"[ring] "  # mlx prints such lines when another rank is gone, which the supervisor knows already
PEER_LOST = "cannot exchange numbers"  # from the engine's message about a lost rank
ENDS_ALL_RANKS = ("InterruptedRun", "BadUpdateError")  # after these errors rank 0 still writes


@dataclass(frozen=True)
class WatchSettings:
    """How training processes are started and watched."""

    command: tuple[str, ...]  # of a training process
    flight: Path
    memory_limit_bytes: int | None  # of each rank
    hang_seconds: float  # the shortest time limit of a phase
    locks: tuple[int, ...]  # descriptors that the processes inherit
    capped_by_kernel: bool = sys.platform == "linux"  # RLIMIT_DATA enforces the memory limit
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the supervisor's own
    ranks: int = 1
    backend: str = "ring"  # mlx's backend for the exchange between ranks
    hostfile: Path | None = None  # for mlx.launch, if some ranks are on other machines
    launcher: tuple[str, ...] = ()  # mlx.launch's command
    serves_starter: bool = True  # whether the run ends when the program that started this one dies


@dataclass(frozen=True)
class Limit:
    """The smallest of the limits on the training process's memory."""

    size_bytes: int
    name: str


@dataclass(frozen=True)
class MemoryReadings:
    """Memory of a process and of its machine, in bytes: at one moment, or the extremes of the last RECENT_SECONDS."""

    footprint_bytes: int = 0  # resident memory; on macOS the system's footprint, with Metal's buffers
    data_bytes: int = 0  # private writable memory; the footprint if unknown
    available_bytes: int = 2**63  # free memory of the machine, the lowest
    pressure_level: int = 0  # macOS: 1 normal, 2 warning, 4 critical; 0 unknown
    oom_kills: int = 0  # the kernel's count of kills for lack of memory, or its growth in that time


@dataclass(frozen=True)
class Ending:
    """How a training run ended, the memory of its last seconds, and what the process and the system wrote about it.

    With several ranks it describes the rank that ended the run, or rank 0 if all ended for the same reason.
    """

    pid: int
    return_code: int  # negative: a signal
    began: bool  # everything was loaded, and an earlier run's state read or removed
    finished: Finished | None
    failed: Failed | None
    stderr_tail: str
    ended_by_us: str  # hang, limit, orphan, second signal, or empty
    overdue_seconds: float
    signal_passed_on: int  # 0 for none
    limit: Limit
    memory: MemoryReadings
    started_seconds: float  # wall clock
    record: FlightRecord | None = None  # the last flight record
    reports: tuple[str, ...] = ()  # of macOS, that it killed the process for memory
    stack: str = ""  # where Python was, as faulthandler wrote it
    total_memory_bytes: int = 0  # of the machine
    rank: int | None = None  # rank that ended the run; None: a single process, or the same reason for all
    ranks: int = 1
    host: str = ""  # the rank's machine; empty: this one


class Heartbeat:
    """Learns how long each phase takes, and measures how long the current one is overdue."""

    def __init__(self, floor_seconds: float) -> None:
        self._floor = floor_seconds
        self._longest: dict[tuple[Phase, Edge], float] = {}
        self._last: FlightRecord | None = None
        self._since = time.monotonic()
        self._resumed, self._was_paused = -inf, False

    def feed(self, records: list[FlightRecord]) -> None:
        """Process new records, oldest first. A record from before a pause may arrive after it."""
        for record in records:
            now = record.monotonic_seconds
            if self._last is not None and not self._was_paused:
                key = self._last.phase, self._last.edge
                self._longest[key] = max(self._longest.get(key, 0.0), now - self._since)
            self._was_paused = now < self._resumed
            self._last, self._since = record, max(now, self._resumed)

    def forgive(self, start_seconds: float, end_seconds: float) -> None:
        """Ignore a period in which the process or the supervisor was stopped. It may be reported twice, or in parts."""
        self._since = min(end_seconds, self._since + end_seconds - start_seconds)
        self._resumed, self._was_paused = end_seconds, True

    def allowed_seconds(self) -> float | None:
        """Time limit of the current phase; None while it waits for disk space, which has its own time limit."""
        last = self._last
        if last is not None and last.phase is Phase.WAIT and last.edge is Edge.BEFORE:
            return None
        longest = self._longest.get((last.phase, last.edge)) if last else None
        return HANG_FIRST_TIME * self._floor if longest is None else max(self._floor, HANG_TIMES_LONGEST * longest)

    def overdue_seconds(self) -> float:
        """Time since the last record, without pauses, if that is longer than allowed; else 0."""
        allowed, waited = self.allowed_seconds(), time.monotonic() - self._since
        return waited if allowed is not None and waited > allowed else 0.0


class Sampler:
    """Measures a process's memory, and keeps the readings of the last RECENT_SECONDS."""

    def __init__(self, own_limit_bytes: int | None) -> None:
        self._groups = memory_groups()
        self._kills = oom_kills(self._groups)  # the kernel's count at the start
        self._readings: deque[tuple[float, MemoryReadings]] = deque()
        self.limit = limit_now(own_limit_bytes)

    def read(self, pid: int) -> MemoryReadings | None:
        """Measure the memory now; None if the process is gone."""
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            return None
        if memory.rss == 0:  # a zombie
            return None
        footprint = footprint_bytes(pid) if sys.platform == "darwin" else memory.rss
        return MemoryReadings(
            footprint_bytes=footprint,
            data_bytes=getattr(memory, "data", 0) or footprint,
            available_bytes=psutil.virtual_memory().available,
            pressure_level=sysctl_number(PRESSURE_LEVEL) if sys.platform == "darwin" else 0,
            oom_kills=oom_kills(self._groups),
        )

    def keep(self, seconds: float, readings: MemoryReadings) -> None:
        """Keep readings as evidence; ``seconds`` is their time on the monotonic clock."""
        self._readings.append((seconds, readings))
        while self._readings[0][0] < seconds - RECENT_SECONDS:
            self._readings.popleft()

    def recent(self) -> MemoryReadings:
        """Return the highest use and the lowest free memory of the kept readings."""
        kept = [readings for _, readings in self._readings]
        kills = oom_kills(self._groups) - (kept[0].oom_kills if kept else self._kills)
        if not kept:
            return MemoryReadings(oom_kills=kills)
        names = "footprint_bytes", "data_bytes", "pressure_level"
        most = {name: max(getattr(each, name) for each in kept) for name in names}
        return MemoryReadings(**most, available_bytes=min(each.available_bytes for each in kept), oom_kills=kills)


def limit_now(own: int | None) -> Limit:
    """Return the smallest of the machine's memory, the container's limit and ``own``, in bytes."""
    total, group = psutil.virtual_memory().total, memory_limit_bytes(memory_groups())
    candidates = [Limit(total, MACHINE)]
    candidates += [Limit(group, "the limit of this container or service")] if group else []
    candidates += [Limit(own, OWN_LIMIT)] if own else []
    return min(candidates, key=lambda limit: limit.size_bytes)


class WatchedProcess:
    """One rank of a training run, or the only process."""

    def __init__(
        self, number: int, flight: Path, process: subprocess.Popen[bytes], events: int | Path, settings: WatchSettings
    ) -> None:
        """``events``: the descriptor to read events from, or the path of a FIFO."""
        self.number, self.process, self.settings = number, process, settings
        self.heartbeat = Heartbeat(settings.hang_seconds)
        self.began = False
        self.ended_seconds: float | None = None  # monotonic clock, at its end or when it reported its failure
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.flight = FlightReader(flight / RECORDER)
        self.memory = Sampler(settings.memory_limit_bytes)
        self._events: queue.Queue[Event] = queue.Queue()
        self._tail: deque[bytes] = deque(maxlen=TAIL_BYTES // 64)
        assert process.stdout is not None, "the process was started without a pipe"
        self._readers = [
            threading.Thread(target=self.read_events, args=(events,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(process.stdout,), daemon=True),
        ]
        waiter = [threading.Thread(target=self._wait, daemon=True)] if settings.ranks > 1 else []
        for thread in [*self._readers, *waiter]:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id of the rank itself."""
        return self.process.pid

    @property
    def return_code(self) -> int:
        return self.process.returncode

    @property
    def waits_for_others(self) -> bool:
        """Whether the rank is in an exchange with the other ranks."""
        last = self.flight.last
        return last is not None and last.phase is Phase.EXCHANGE and last.edge is Edge.BEFORE

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank ended because another one was gone; never after SIGKILL, which comes from outside."""
        if self.return_code == -signal.SIGKILL:
            return False
        return self.waits_for_others or (self.failed is not None and PEER_LOST in self.failed.message)

    @property
    def ended_with_all(self) -> bool:
        """Whether the rank ended for a reason that all ranks share; some may still have to write."""
        return self.failed is not None and self.failed.kind in ENDS_ALL_RANKS

    @property
    def others_have_gone(self) -> bool:
        """Whether a rank without a WatchedProcess has ended badly."""
        return False

    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def feed(self) -> None:
        """Process the rank's new records, and flush them to the disk."""
        self.heartbeat.feed(self.flight.read())
        self.flight.make_durable()

    def new_events(self) -> list[Event]:
        events: list[Event] = []
        while not self._events.empty():
            event = self._events.get()
            self.began = self.began or isinstance(event, Begun)
            if isinstance(event, Finished):
                self.finished = self.finished or event
            if isinstance(event, Failed):
                self.failed = self.failed or event
            events.append(event)
        return events

    def send(self, number: int) -> None:
        """Send a signal to the whole process group, so that no child is left behind."""
        with suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(self.process.pid, number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:  # it has just ended
            return False

    def finish_reading(self) -> None:
        """Read the pipes to their end."""
        for reader in self._readers:
            reader.join(timeout=5)

    def drain(self) -> list[Event]:
        """Return the events that were still in the pipe at the end."""
        self.finish_reading()
        events = self.new_events()
        self.feed()
        return events

    def ending(self, started_seconds: float, ended_by_us: str, overdue: float, passed_on: int) -> Ending:
        """Describe the rank's end."""
        return Ending(
            pid=self.pid,
            return_code=self.return_code,
            began=self.began,
            finished=self.finished,
            failed=self.failed,
            stderr_tail=b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace"),
            ended_by_us=ended_by_us,
            overdue_seconds=overdue,
            signal_passed_on=passed_on,
            limit=self.memory.limit,
            memory=self.memory.recent(),
            started_seconds=started_seconds,
        )

    def take_line(self, line: bytes) -> bool:
        """Process a line of output; returns whether to show it."""
        return self.settings.ranks == 1 or not line.startswith(RING_PREFIX)

    def read_events(self, source: int | Path) -> None:
        """Read the event pipe to its end, in a thread."""
        with os.fdopen(source, "rb") if isinstance(source, int) else source.open("rb") as pipe:
            for line in pipe:
                event = parse_event(line)
                if isinstance(event, Failed):
                    self._note_end()
                if event is not None:
                    self._events.put(event)

    def _wait(self) -> None:
        """Record the exact time of the end: the first rank to end is the cause."""
        self.process.wait()
        self._note_end()

    def _note_end(self) -> None:
        if self.ended_seconds is None:
            self.ended_seconds = time.monotonic()

    def _read_stderr(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                is_visible = self.take_line(line)
                if is_visible or not self.settings.hostfile:
                    self._tail.append(line)
                if is_visible:
                    with suppress(OSError):  # the terminal may be gone; the tail stays
                        sys.stderr.buffer.write(line)
                        sys.stderr.buffer.flush()


def culprit(ended: list[WatchedProcess]) -> WatchedProcess | None:
    """Find the rank that ended the training among those that ended by themselves; None if all had the same reason.

    A rank that ended only because another was gone is not the cause; the first of the remaining ranks is.
    """
    if not ended:
        return None
    kinds = {rank: rank.failed.kind if rank.failed is not None else "" for rank in ended}
    first = min(ended, key=lambda rank: (rank.lost_a_peer, rank.ended_seconds or 0.0, rank.number))
    alike = kinds[first] != "" and all(not rank.lost_a_peer and kinds[rank] == kinds[first] for rank in ended)
    return None if first.ended_with_all or (alike and len(ended) > 1) else first
