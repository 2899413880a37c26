"""Runs the training process: watches it, hands signals on, ends it when it hangs, and outlives it."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from safetrain.core.again import RUN
from safetrain.core.protocol.events import Begun, Event, Failed, Finished, Recorded, Said, parse_event
from safetrain.core.protocol.flight import FlightReader
from safetrain.core.signals import handling
from safetrain.core.storage.run_files import ERROR, RECORDER, STACKS
from safetrain.guard.awake import awake
from safetrain.guard.heartbeat import Heartbeat
from safetrain.guard.sampling import LastSeconds, Limit, MemorySample, Recent, Sampler
from safetrain.guard.thrashing import Thrashing

POLL_SECONDS = 0.05
LATE_SECONDS = 1.0  # between two looks: we did not run ourselves
SAMPLE_SECONDS = 0.25
TAIL_BYTES = 64 * 1024
STACKS_SECONDS = 2.0  # for faulthandler to write
TERM_SECONDS = 10.0  # for a hung process to end by itself
LIMIT_SECONDS = 4.0  # to end by itself beyond its memory limit: killed, it may leave wired GPU memory (omlx#2184)
ORPHAN_SECONDS = 4.0  # to save and end once whoever started us is gone
SECOND_SECONDS = 0.5  # after the first signal, another one does not count
SHELLS = ("sh", "dash", "bash", "zsh", "ash", "ksh", "mksh", "csh", "tcsh", "fish")  # that dvc may run a stage in


@dataclass(frozen=True)
class WatchSettings:
    """What a process is watched for, and what it is started with."""

    flight: Path
    memory_limit_bytes: int | None
    hang_seconds: float  # never called a hang before this long
    locks: tuple[int, ...]  # descriptors that the process inherits
    capped_by_kernel: bool = sys.platform == "linux"  # RLIMIT_DATA enforces the memory limit
    keep_awake: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)  # of the process, beside ours


@dataclass(frozen=True)
class Ending:
    """How the training process ended, and what was seen of it in its last seconds (sampling.RECENT_SECONDS)."""

    pid: int
    return_code: int  # negative: a signal
    began: bool  # everything was loaded, and what an earlier run left was dealt with
    finished: Finished | None
    failed: Failed | None
    stderr_tail: str
    ended_by_us: str  # hang, limit, orphan, second signal, or empty
    overdue_seconds: float
    signal_passed_on: int  # 0 for none
    oom_kills: int
    limit: Limit
    last: MemorySample | None
    recent: Recent
    started_seconds: float  # wall clock
    started_monotonic_seconds: float


def supervise(command: Sequence[str], guarding: WatchSettings, show: Callable[[Event], None]) -> Ending:
    """Run ``command FLIGHT EVENTS_FD OUR_PID`` to its end; ``show`` gets its events as they come."""
    for name in (RECORDER, STACKS, ERROR):  # of the process before
        (guarding.flight / name).unlink(missing_ok=True)
    starter = who_started_us()
    read_end, write_end = os.pipe()
    started = time.time(), time.monotonic()
    process = subprocess.Popen(
        [*command, str(guarding.flight), str(write_end), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end, *guarding.locks),
        start_new_session=True,
        env={**os.environ, **guarding.environment},
    )
    os.close(write_end)
    try:
        watch = _Watch(process, guarding, read_end, starter)
        with _signals(watch), awake(process.pid, wanted=guarding.keep_awake):
            while process.poll() is None:
                watch.look(show)
                time.sleep(POLL_SECONDS)
            watch.drain(show)
    finally:
        if process.poll() is None:  # whatever goes wrong here, nothing is left running
            process.kill()
            process.wait()
    return watch.ending(*started)


class _Watch:
    """The state of one supervision."""

    def __init__(
        self, process: subprocess.Popen[bytes], guarding: WatchSettings, events: int, starter: psutil.Process | None
    ) -> None:
        self._process, self._guarding = process, guarding
        self._sampler = Sampler(process.pid, guarding.memory_limit_bytes)
        self._heartbeat, self._thrashing = Heartbeat(guarding.hang_seconds), Thrashing()
        self._flight = FlightReader(guarding.flight / RECORDER)
        self._starter = starter
        self._events: queue.Queue[Event] = queue.Queue()
        self._tail: deque[bytes] = deque(maxlen=TAIL_BYTES // 64)
        self._seen: list[Event] = []
        self._began = False
        self._last: MemorySample | None = None
        self._recent = LastSeconds()
        self._next_sample = 0.0
        self._looked, self._stopped = time.monotonic(), False
        self._ended_by_us, self._overdue = "", 0.0
        self._kill_at: float | None = None
        self.signal_passed_on, self._asked = 0, 0.0
        if process.stdout is None:
            raise RuntimeError("the process was started without a pipe")
        self._readers = [
            threading.Thread(target=self._read_events, args=(os.fdopen(events, "rb"),), daemon=True),
            threading.Thread(target=self._read_stderr, args=(process.stdout,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def look(self, show: Callable[[Event], None]) -> None:
        """One round: events, records, memory, deadlines."""
        now = time.monotonic()
        self._show_events(show)
        self._leave_out_pause(now)
        self._heartbeat.feed(self._flight.new_records())
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._sample()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()
        elif not self._ended_by_us:
            self._end_if_hung()
            self._end_if_orphaned()

    def drain(self, show: Callable[[Event], None]) -> None:
        """What was still in the pipes when the process ended."""
        for reader in self._readers:
            reader.join(timeout=5)
        self._show_events(show)
        self._heartbeat.feed(self._flight.new_records())
        self._flight.close()

    def pass_on(self, number: int) -> None:
        """The first signal asks the process to save and end, a second one by hand ends it.

        A closing terminal hangs up more than once, and some programs pass on what the terminal has already sent.
        """
        if self.signal_passed_on:
            if number != signal.SIGHUP and time.monotonic() - self._asked > SECOND_SECONDS:
                self._ended_by_us = "second signal"
                self._kill()
            return
        self.signal_passed_on, self._asked = number, time.monotonic()
        self._send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def suspend(self) -> None:
        """Ctrl-Z: stop the training with us, and let it go on with us."""
        began = time.monotonic()
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)
        ended = time.monotonic()
        self._heartbeat.forgive(began, ended)
        if self._kill_at is not None:
            self._kill_at += ended - began

    def ending(self, started: float, started_monotonic: float) -> Ending:
        """Everything that is known."""
        recent = self._recent.summary()
        return Ending(
            pid=self._process.pid,
            return_code=self._process.returncode,
            began=self._began,
            finished=next((event for event in self._seen if isinstance(event, Finished)), None),
            failed=next((event for event in self._seen if isinstance(event, Failed)), None),
            stderr_tail=b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace"),
            ended_by_us=self._ended_by_us,
            overdue_seconds=self._overdue,
            signal_passed_on=self.signal_passed_on,
            oom_kills=self._sampler.oom_kills() - recent.oom_kills_before,
            limit=self._sampler.limit,
            last=self._last,
            recent=recent,
            started_seconds=started,
            started_monotonic_seconds=started_monotonic,
        )

    def _sample(self) -> None:
        sample = self._sampler.sample(self._flight.gpu_uuid())
        if sample is None:
            return
        self._last = sample
        self._recent.add(time.monotonic(), sample, self._sampler.oom_kills())
        limit = None if self._guarding.capped_by_kernel else self._guarding.memory_limit_bytes
        if limit is not None and sample.footprint_bytes > limit and not self._ended_by_us:
            self._end("limit", LIMIT_SECONDS)

    def _leave_out_pause(self, now: float) -> None:
        """Time since the last look counts for no hang if the process was stopped (SIGSTOP, a debugger), or we were."""
        was_stopped, self._stopped = self._stopped, _is_stopped(self._process.pid)
        if was_stopped or self._stopped or now - self._looked > LATE_SECONDS:
            self._heartbeat.forgive(self._looked, now)
        self._looked = now

    def _end_if_hung(self) -> None:
        overdue = self._heartbeat.overdue_seconds()
        if overdue:
            self._overdue = overdue
            self._send(signal.SIGUSR1)  # faulthandler writes all stacks
            time.sleep(STACKS_SECONDS)
            self._end("hang", TERM_SECONDS)

    def _end_if_orphaned(self) -> None:
        if self._starter is not None and not self.signal_passed_on and not _is_alive(self._starter):
            self._end("orphan", ORPHAN_SECONDS)

    def _end(self, why: str, grace_seconds: float) -> None:
        """Ask the process to end, and kill it later."""
        self._ended_by_us = why
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_seconds

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """To the whole process group; none is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(self._process.pid, number)

    def _show_events(self, show: Callable[[Event], None]) -> None:
        while not self._events.empty():
            event = self._events.get()
            self._seen = [*self._seen, event] if isinstance(event, Finished | Failed) else self._seen
            self._began = self._began or isinstance(event, Begun)
            show(event)
            if isinstance(event, Recorded) and self._last is not None:
                warning = self._thrashing.warning(event.record, self._last.swap_used_bytes)
                if warning:
                    show(Said(warning))

    def _read_events(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                event = parse_event(line)
                if event is not None:
                    self._events.put(event)

    def _read_stderr(self, pipe: BinaryIO) -> None:
        with pipe:
            for line in pipe:
                self._tail.append(line)
                with contextlib.suppress(OSError):  # the terminal may be gone; the tail is kept
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger holds it."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:  # it has just ended
        return False


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs: no zombie, and no later process with the same id."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _signals(watch: _Watch) -> AbstractContextManager[None]:
    """Hand SIGINT, SIGTERM and a closed terminal on; a signal that was ignored from the start (nohup) stays so."""
    handlers: dict[int, Callable[[int], None]] = {
        signal.SIGINT: watch.pass_on,
        signal.SIGTERM: watch.pass_on,
        signal.SIGHUP: watch.pass_on,
        signal.SIGTSTP: lambda _number: watch.suspend(),
    }
    return handling({n: handler for n, handler in handlers.items() if signal.getsignal(n) != signal.SIG_IGN})


def who_started_us() -> psutil.Process | None:
    """The program that runs this stage (dvc, safetrain run), past the shell it uses; None from a person's shell.

    When that program is killed, nobody waits for the result: the run is saved and ends.
    """
    if not (os.environ.get("DVC_STAGE") or os.environ.get(RUN)):
        return None
    parent = None
    with contextlib.suppress(psutil.Error):  # it has just ended, or is not ours to look at
        parent = psutil.Process().parent()
        while parent is not None and parent.name() in SHELLS and "-c" in parent.cmdline():
            parent = parent.parent()
    return parent
