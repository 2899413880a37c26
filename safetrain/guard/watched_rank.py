"""One rank of a training as its supervisor sees it: its process, its words, its records, its memory."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

import psutil

from safetrain.core.protocol.events import Begun, Event, Failed, Finished, parse_event
from safetrain.core.protocol.flight import Edge, FlightReader, FlightRecord, Phase
from safetrain.core.storage.run_files import RECORDER
from safetrain.guard.ending import Ending, WatchSettings
from safetrain.guard.heartbeat import Heartbeat
from safetrain.guard.sampling import LastSeconds, MemorySample, Sampler

TAIL_BYTES = 64 * 1024
RING_WORDS = b"[ring] "  # what mlx writes line by line when another rank has gone: known here, and no news
PEER_LOST = "cannot exchange numbers"  # what the engine says then
SAID_BY_ALL = ("InterruptedRun", "BadUpdateError")  # all ranks end so together, rank 0 after it has written


class WatchedRank:
    """The state of one rank's supervision."""

    def __init__(
        self, number: int, flight: Path, process: subprocess.Popen[bytes], events: int | Path, guarding: WatchSettings
    ) -> None:
        """``events``: the descriptor that its events are read from, or the path of a FIFO."""
        self.number, self._guarding = number, guarding
        self.process = process
        self.heartbeat = Heartbeat(guarding.hang_seconds)
        self.began = False
        self.last_record: FlightRecord | None = None
        self.last: MemorySample | None = None
        self.ended_seconds: float | None = None  # of the monotonic clock, or when it said that it fails
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self._sampler = Sampler(process.pid, guarding.memory_limit_bytes)
        self._flight = FlightReader(flight / RECORDER)
        self._events: queue.Queue[Event] = queue.Queue()
        self._tail: deque[bytes] = deque(maxlen=TAIL_BYTES // 64)
        self._recent = LastSeconds()
        if process.stdout is None:
            raise RuntimeError("the process was started without a pipe")
        self._readers = [
            threading.Thread(target=self.read_events, args=(events,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(process.stdout,), daemon=True),
        ]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in [*self._readers, *([self._waiter] if guarding.ranks > 1 else [])]:
            thread.start()

    @property
    def pid(self) -> int:
        """Of the rank itself."""
        return self.process.pid

    @property
    def limit_name(self) -> str:
        """Of the limit on its memory."""
        return self._sampler.limit.name

    @property
    def return_code(self) -> int:
        """Once it has ended."""
        return self.process.returncode

    @property
    def waits_for_others(self) -> bool:
        """Whether it is in an exchange with the other ranks."""
        last = self.last_record
        return last is not None and last.phase is Phase.EXCHANGE and last.edge is Edge.BEFORE

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended because another rank had gone, as far as can be seen. SIGKILL comes from outside."""
        if self.return_code == -signal.SIGKILL:
            return False
        return self.waits_for_others or (self.failed is not None and PEER_LOST in self.failed.message)

    @property
    def ended_with_all(self) -> bool:
        """Whether it ended for a reason that all ranks have, some of which may still have to write."""
        return self.failed is not None and self.failed.kind in SAID_BY_ALL

    @property
    def others_have_gone(self) -> bool:
        """Whether it is known of a rank that is not watched itself that it has ended badly."""
        return False

    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def feed(self) -> None:
        """Take in its new records."""
        records = self._flight.new_records()
        if records:
            self.last_record = records[-1]
        self.heartbeat.feed(records)

    def sample(self) -> MemorySample | None:
        """Its memory now; None once it has ended."""
        self._sampler.pid = self.pid
        return self._sampler.sample(self._flight.gpu_uuid())

    def keep(self, sample: MemorySample) -> None:
        """Remember a sample as evidence."""
        self.last = sample
        self._recent.add(time.monotonic(), sample, self._sampler.oom_kills())

    def new_events(self) -> list[Event]:
        """That have come since the last time."""
        found: list[Event] = []
        while not self._events.empty():
            event = self._events.get()
            self.began = self.began or isinstance(event, Begun)
            if isinstance(event, Finished) and self.finished is None:
                self.finished = event
            if isinstance(event, Failed) and self.failed is None:
                self.failed = event
            found.append(event)
        return found

    def ask(self, number: int) -> None:
        """Send a signal that asks it to save and to end."""
        self.send(number)

    def send(self, number: int) -> None:
        """To the whole process group; none is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(self.process.pid, number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:  # it has just ended
            return False

    def finish_reading(self) -> None:
        """Until nothing is left in its pipes."""
        for reader in self._readers:
            reader.join(timeout=5)

    def drain(self) -> list[Event]:
        """What was still in its pipes when it ended."""
        self.finish_reading()
        found = self.new_events()
        self.feed()
        self._flight.close()
        return found

    def ending(self, started: tuple[float, float], ended_by_us: str, overdue: float, passed_on: int) -> Ending:
        """Everything that is known of it; ``started``: wall clock and monotonic clock."""
        recent = self._recent.summary()
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
            oom_kills=self._sampler.oom_kills() - recent.oom_kills_before,
            limit=self._sampler.limit,
            last=self.last,
            recent=recent,
            started_seconds=started[0],
            started_monotonic_seconds=started[1],
        )

    def hear(self, line: bytes) -> bool:
        """A line that it has written; returns whether people should see it."""
        return self._guarding.ranks == 1 or not line.startswith(RING_WORDS)

    def _wait(self) -> None:
        """The moment of its end, finer than the supervisor looks: the first of several to end is the cause."""
        self.process.wait()
        self._note_end()

    def _note_end(self) -> None:
        if self.ended_seconds is None:
            self.ended_seconds = time.monotonic()

    def read_events(self, source: int | Path) -> None:
        """To the end of the pipe, in a thread of its own."""
        with os.fdopen(source, "rb") if isinstance(source, int) else source.open("rb") as pipe:
            for line in pipe:
                self.take_event(line)

    def take_event(self, line: bytes) -> bool:
        """Take in a line of events; returns whether it was one."""
        event = parse_event(line)
        if isinstance(event, Failed):
            self._note_end()
        if event is not None:
            self._events.put(event)
        return event is not None

    def _read_stderr(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                shown = self.hear(line)
                if shown or not self._guarding.hostfile:
                    self._tail.append(line)
                if shown:
                    with contextlib.suppress(OSError):  # the terminal may be gone; the tail is kept
                        sys.stderr.buffer.write(line)
                        sys.stderr.buffer.flush()


def culprit(ended: list[WatchedRank]) -> WatchedRank | None:
    """Of ranks that ended by themselves, the one that ended the training; None where all did for the same reason.

    A rank that ends because its peer has gone is not the cause; among the others it is the first.
    """
    if not ended:
        return None
    first = min(ended, key=lambda rank: (rank.lost_a_peer, rank.ended_seconds or 0.0, rank.number))
    alike = _said(first) != "" and all(not rank.lost_a_peer and _said(rank) == _said(first) for rank in ended)
    return None if first.ended_with_all or (alike and len(ended) > 1) else first


def _said(rank: WatchedRank) -> str:
    return rank.failed.kind if rank.failed is not None else ""
