"""Repeats the batch that a training died in, and looks for the largest piece of it that passes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import ConfigError, InterruptedRun
from safetrain.core.formatting import counted
from safetrain.core.protocol.events import Event, Said
from safetrain.core.records.job import Batch, TrainJob
from safetrain.core.records.postmortem import PostMortem, Replay
from safetrain.core.records.record_files import read_record, write_record
from safetrain.core.storage.run_files import BATCH, DIED_JOB, FLIGHT, JOB, REPLAY
from safetrain.guard.ending import Ending, WatchSettings
from safetrain.guard.gpu_watchdog import gpu_environment
from safetrain.guard.postmortem import (
    add_replay,
    evidence_of,
)
from safetrain.guard.supervisor import supervise
from safetrain.guard.verdict import judge

LENGTH_STEP = 32  # tokens: no finer answer is of use
HANG_SECONDS = 120.0
REPLAYABLE = ("gradient", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Attempt:
    """One piece, and how it went."""

    rows: int
    tokens: int
    died_in: str  # empty: it passed
    cause: str

    def __str__(self) -> str:
        end = f"died in {self.died_in} ({self.cause})" if self.died_in else "passed"
        return f"{counted(self.rows, 'row')} of at most {counted(self.tokens, 'token')}: {end}"


def can_replay(found: PostMortem) -> bool:
    """Whether the death was in an update. Which rows one of several ranks had is not known of all of them."""
    return found.ranks == 1 and found.phase.removeprefix("after ") in REPLAYABLE and found.rows > 0


def replay(
    command: Sequence[str], output: Path, locks: tuple[int, ...], found: PostMortem, say: Callable[[str], None]
) -> PostMortem:
    """Repeat the batch of the last post-mortem in processes of their own, and write down what they show.

    Raises ConfigError when there is nothing to repeat.
    """
    if found.ranks > 1:
        raise ConfigError("The batch of one of several ranks cannot be repeated.", do=found.next_command)
    if not can_replay(found):
        raise ConfigError(f"The training died in {found.phase}: there is no batch to repeat.", do=found.next_command)
    trial = _Trial(tuple(command), output, locks, found, say)
    longest = trial.longest_row
    first = trial.attempt(found.rows, longest)
    if not first.died_in:
        return add_replay(output, found, Replay("", "", found.rows, longest, trial.log()))
    rows = _largest(found.rows - 1, lambda n: not trial.attempt(n, longest).died_in)
    if rows:
        return add_replay(output, found, Replay(first.died_in, first.cause, rows, longest, trial.log()))
    steps = _largest(longest // LENGTH_STEP, lambda n: not trial.attempt(1, n * LENGTH_STEP).died_in)
    tokens = steps * LENGTH_STEP
    return add_replay(output, found, Replay(first.died_in, first.cause, int(tokens > 0), tokens, trial.log()))


def _largest(most: int, passes: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that passes, 0 for none; assumes that larger ones are harder."""
    best, low, high = 0, 1, most
    while low <= high:
        middle = (low + high) // 2
        if passes(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


class _Trial:
    """Runs pieces of one batch."""

    def __init__(
        self,
        command: tuple[str, ...],
        output: Path,
        locks: tuple[int, ...],
        found: PostMortem,
        say: Callable[[str], None],
    ) -> None:
        self._command, self._output, self._locks, self._found, self._say = command, output, locks, found, say
        self._job = _job_of(output)
        self._attempts: list[Attempt] = []
        self.longest_row = self._job.settings.max_seq_length  # in tokens, at most

    def attempt(self, rows: int, tokens: int) -> Attempt:
        """Compute so many rows, cut to so many tokens."""
        flight = self._output / FLIGHT / REPLAY
        write_record(flight / JOB, self._job)
        found = self._found
        write_record(flight / BATCH, Batch(found.step, found.micro_batch, rows, tokens, found.row_ids))
        limit = self._job.survival.memory_limit_bytes
        environment = gpu_environment(len(self._job.gpu_rungs), os.environ)
        guarding = WatchSettings(flight, limit, HANG_SECONDS, self._locks, environment=environment)
        ending = supervise(self._command, guarding, self._show)
        if ending.signal_passed_on:
            raise InterruptedRun(ending.signal_passed_on, "The replay was stopped; nothing is written of it.")
        made = Attempt(rows, tokens, *self._how(flight, ending))
        self._attempts.append(made)
        self._say(str(made))
        return made

    def log(self) -> tuple[str, ...]:
        """What was tried."""
        return tuple(str(attempt) for attempt in self._attempts)

    def _how(self, flight: Path, ending: Ending) -> tuple[str, str]:
        if ending.return_code == 0:
            return "", ""
        evidence = evidence_of(flight, ending)
        phase = evidence.last.phase.label if evidence.last else "start"
        return phase, judge(evidence).title

    def _show(self, event: Event) -> None:
        if isinstance(event, Said):
            self._say(f"  {event.text}")


def _job_of(output: Path) -> TrainJob:
    """The dead process's job; raises ConfigError where it is not there any more."""
    path = output / FLIGHT / DIED_JOB
    try:
        return read_record(path, TrainJob)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"What the training was told cannot be read: {error}", where=str(path)) from None
