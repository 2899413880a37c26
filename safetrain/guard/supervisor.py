"""Runs the training process: watches it, passes signals on, and ends it if it hangs."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from signal import SIG_IGN, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR1, getsignal

import psutil

from safetrain.core.events import Event, Said
from safetrain.core.formatting import RUN
from safetrain.core.memory.system import OWN_LIMIT
from safetrain.core.recorder import living_process
from safetrain.core.signals import handling
from safetrain.guard.process import Ending, WatchedProcess, WatchSettings, culprit
from safetrain.guard.ranks import start_ranks

POLL_SECONDS = 0.05
LATE_SECONDS = 1.0  # a longer gap between two rounds means that the supervisor itself was stopped
SAMPLE_SECONDS = 0.25
STACKS_SECONDS = 2.0  # for faulthandler to write
TERM_SECONDS = 10.0  # for a hung process to end by itself
LIMIT_SECONDS = 4.0  # for a process above its memory limit to end: a kill may leave GPU memory wired (omlx#2184)
OTHERS_SECONDS = 1.0  # for ranks to end by themselves when one has died, and again after SIGTERM
LAST_SECONDS = 5.0  # for ranks to end by themselves after rank 0 has finished
ORPHAN_SECONDS = 4.0  # to save and end after the program that started us has died
SECOND_SECONDS = 0.5  # a second signal within this time counts as the first one, sent twice
SHELLS = ("sh", "dash", "bash", "zsh", "ash", "ksh", "mksh", "csh", "tcsh", "fish")  # dvc runs a stage in a shell
CAFFEINATE = Path("/usr/bin/caffeinate")  # macOS
STOPPING = "stopping after this micro-batch, then saving; another Ctrl-C ends at once, back to the last checkpoint"
STOPPING_ALL = "stopping after this update, then saving; another Ctrl-C ends at once, back to the last checkpoint"


def supervise(settings: WatchSettings, show: Callable[[Event], None]) -> Ending:
    """Run a training process, or several ranks of it, to the end; ``show`` gets events as they come."""
    starter = who_started_us() if settings.serves_starter else None
    started_seconds = time.time()
    ranks = start_ranks(settings)
    with _awake(ranks[0].process.pid):
        try:
            watch = _Watch(ranks, settings, starter)
            with _signals(watch):
                while watch.goes_on():
                    watch.look(show)
                    time.sleep(POLL_SECONDS)
                watch.drain(show)
        finally:
            for rank in ranks:
                if not rank.is_over():  # even after an error here, no process keeps running
                    rank.send(SIGKILL)
                    rank.process.wait()
    return watch.ending(started_seconds)


class _Watch:
    """State of one supervised training run."""

    def __init__(self, ranks: list[WatchedProcess], settings: WatchSettings, starter: psutil.Process | None) -> None:
        self._ranks, self._settings, self._starter = ranks, settings, starter
        self._next_sample = 0.0
        self._looked_at, self._was_stopped = time.monotonic(), False
        self._ended_by_us, self._overdue = "", 0.0
        self._culprit: WatchedProcess | None = None  # the rank that made us end all of them
        self._ended_first: list[WatchedProcess] = []  # ranks that ended before we ended the others
        self._end_others_at: float | None = None
        self._kill_at: float | None = None
        self._signal, self._signal_at, self._signal_answered = 0, 0.0, False

    def goes_on(self) -> bool:
        """Whether any rank is still running."""
        running = self._running()
        if self._kill_at is None:
            self._ended_first = [rank for rank in self._ranks if rank not in running]
        return bool(running)

    def look(self, show: Callable[[Event], None]) -> None:
        """Do one round of checks: events, records, memory and deadlines."""
        now = time.monotonic()
        for rank in self._ranks:
            for event in rank.new_events():
                show(event)
        if self._signal and not self._signal_answered:
            self._signal_answered = True
            show(Said(STOPPING if self._settings.ranks == 1 else STOPPING_ALL))
        self._leave_out_pause(now)
        for rank in self._ranks:
            rank.feed()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._sample()
        if self._kill_at is not None and now >= self._kill_at:
            self._send(SIGKILL)
        elif self._kill_at is None:
            self._end_the_others(now)
            if self._end_others_at is None:
                self._end_if_hung()
                starter = self._starter
                if starter and not self._signal and not (starter.is_running() and living_process(starter.pid)):
                    self._end("orphan", ORPHAN_SECONDS)

    def drain(self, show: Callable[[Event], None]) -> None:
        """Show the events that were still in the pipes at the end."""
        for rank in self._ranks:
            for event in rank.drain():
                show(event)

    def pass_on(self, number: int) -> None:
        """Pass the first signal on, so that the process saves and ends; a second one kills it.

        Repeats do not count: a closing terminal sends SIGHUP more than once, and some programs repeat its signals.
        """
        if self._signal:
            if number != SIGHUP and time.monotonic() - self._signal_at > SECOND_SECONDS:
                self._ended_by_us = "second signal"
                self._send(SIGKILL)
            return
        self._signal, self._signal_at = number, time.monotonic()
        for rank in self._running():
            rank.send(SIGINT if number == SIGINT else SIGTERM)

    def suspend(self) -> None:
        """Handle Ctrl-Z: stop the training and the supervisor, and continue both together."""
        began = time.monotonic()
        self._send(SIGSTOP)
        os.kill(os.getpid(), SIGSTOP)
        self._send(SIGCONT)
        ended = time.monotonic()
        self._forgive(began, ended)
        if self._kill_at is not None:
            self._kill_at += ended - began

    def ending(self, started_seconds: float) -> Ending:
        """Describe the end of the training."""
        first, cause = self._ranks[0], None
        if first.finished is None and len(self._ranks) > 1:
            suspects = [rank for rank in self._ended_first if rank.return_code or rank is first]
            cause = self._culprit if self._ended_by_us else culprit(suspects)
        ending = (cause or first).ending(started_seconds, self._ended_by_us, self._overdue, self._signal)
        number = cause.number if cause is not None else ending.rank
        return replace(ending, rank=number, ranks=self._settings.ranks, began=first.began)

    def _sample(self) -> None:
        readings = [(rank, memory) for rank in self._ranks if (memory := rank.memory.read(rank.pid)) is not None]
        together = sum(memory.footprint_bytes for _, memory in readings)
        limit = None if self._settings.capped_by_kernel else self._settings.memory_limit_bytes
        for rank, memory in readings:
            own = rank.memory.limit.name == OWN_LIMIT  # a limit for each rank; any other limit is for all together
            rank.memory.keep(time.monotonic(), memory if own else replace(memory, footprint_bytes=together))
            if limit is not None and memory.footprint_bytes > limit and not self._ended_by_us:
                self._end("limit", LIMIT_SECONDS, rank)

    def _leave_out_pause(self, now: float) -> None:
        """Ignore a period in which a process or the supervisor was stopped (SIGSTOP, a debugger): it is not a hang."""
        before, self._was_stopped = self._was_stopped, any(rank.is_stopped() for rank in self._ranks)
        if before or self._was_stopped or now - self._looked_at > LATE_SECONDS:
            self._forgive(self._looked_at, now)
        self._looked_at = now

    def _forgive(self, start_seconds: float, end_seconds: float) -> None:
        for rank in self._ranks:
            rank.heartbeat.forgive(start_seconds, end_seconds)

    def _end_the_others(self, now: float) -> None:
        """End the other ranks after one has ended; first they get a moment to end by themselves."""
        has_died = any(rank.return_code and not rank.ended_with_all for rank in self._ended_first)
        has_died = has_died or any(rank.others_have_gone for rank in self._ranks)
        first = self._ranks[0]
        is_done = first in self._ended_first or (self._settings.ranks > 1 and first.finished is not None)
        if not has_died and not is_done:  # rank 0 may still have to write
            return
        if self._end_others_at is None:
            self._end_others_at = now + (OTHERS_SECONDS if has_died else LAST_SECONDS)
        elif now >= self._end_others_at:
            self._kill_at = now + OTHERS_SECONDS
            self._send(SIGTERM)

    def _end_if_hung(self) -> None:
        rank = self._hung()
        if rank is not None:
            self._overdue = rank.heartbeat.overdue_seconds()
            self._send(SIGUSR1)  # faulthandler writes all stacks
            time.sleep(STACKS_SECONDS)
            self._end("hang", TERM_SECONDS if len(self._ranks) == 1 else OTHERS_SECONDS, rank)

    def _hung(self) -> WatchedProcess | None:
        """Find the overdue rank. Ranks that wait for others do not count, unless all wait."""
        running = self._running()
        at_work = [rank for rank in running if not rank.waits_for_others]
        overdue = [rank for rank in at_work or running if rank.heartbeat.overdue_seconds()]
        if at_work:
            return overdue[0] if overdue else None
        all_wait = overdue and overdue == running
        return min(overdue, key=lambda rank: rank.heartbeat.overdue_seconds()) if all_wait else None

    def _end(self, reason: str, grace_seconds: float, rank: WatchedProcess | None = None) -> None:
        """Ask the processes to end because of ``rank``, and kill them after ``grace_seconds``."""
        self._ended_by_us, self._culprit = reason, rank if len(self._ranks) > 1 else None
        self._send(SIGTERM)
        self._kill_at = time.monotonic() + grace_seconds

    def _send(self, number: int) -> None:
        for rank in self._running():
            rank.send(number)

    def _running(self) -> list[WatchedProcess]:
        return [rank for rank in self._ranks if not rank.is_over()]


def _signals(watch: _Watch) -> AbstractContextManager[None]:
    """Pass on SIGINT, SIGTERM and a closed terminal; a signal ignored from the start (nohup) stays ignored."""
    handlers: dict[int, Callable[[int], None]] = dict.fromkeys((SIGINT, SIGTERM, SIGHUP), watch.pass_on)
    handlers[SIGTSTP] = lambda _number: watch.suspend()
    return handling({n: handler for n, handler in handlers.items() if getsignal(n) != SIG_IGN})


@contextmanager
def _awake(pid: int) -> Iterator[None]:
    """Keep a Mac from idle sleep (caffeinate -i), even on mains power, until process ``pid`` ends (-w).

    The display may sleep, which keeps the GPU watchdog quiet. A closed lid still puts a laptop to sleep.
    """
    if not CAFFEINATE.is_file():
        yield
        return
    with subprocess.Popen([str(CAFFEINATE), "-i", "-w", str(pid)], start_new_session=True) as process:
        yield
        process.kill()


def who_started_us() -> psutil.Process | None:
    """Find the program that runs this stage (dvc, safetrain run), skipping its shell; None if the user ran it directly.

    If that program dies, the run saves and ends, because no program waits for its result.
    """
    if not (os.environ.get("DVC_STAGE") or os.environ.get(RUN)):
        return None
    parent = None
    with suppress(psutil.Error):  # it has just ended, or belongs to another user
        parent = psutil.Process().parent()
        while parent is not None and parent.name() in SHELLS and "-c" in parent.cmdline():
            parent = parent.parent()
    return parent
