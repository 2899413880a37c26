"""What happens in a training: events that the training process sends over a pipe, and the journal that keeps them.

The supervisor receives the events, adds its own, and appends them to flight/journal.jsonl. Nothing depends on the
journal: lines that cannot be written are dropped, and torn lines are skipped.
"""

import contextlib
import dataclasses
import json
import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.files import from_json, write_text

PROGRESS_SECONDS = 10.0  # between progress lines of the journal
MOST_LETTERS = 2000  # of a text in the journal


@dataclass(frozen=True)
class Begun:
    """Everything is loaded; the first update follows."""

    total_steps: int
    resumed_from_step: int
    description: str
    eval_steps: int = 0
    check_validations: float = 0.0  # time of the adapter check after the last update, in validations
    bits_per_byte_of_nat: float = 0.0  # 1 nat per label in bits per byte of text; 0: unknown


@dataclass(frozen=True)
class Recorded:
    """A line of training_metrics.csv was written."""

    record: StepRecord


@dataclass(frozen=True)
class Said:
    """A message for people."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The training process ended with an error that it reports."""

    kind: str  # name of the exception
    message: str
    exit_code: int


@dataclass(frozen=True)
class Finished:
    """The training is complete and training_summary.json is written."""

    step: int


@dataclass(frozen=True)
class Started:
    """The supervisor starts a training process."""


@dataclass(frozen=True)
class Progress:
    """Progress of the training, every PROGRESS_SECONDS."""

    step: int
    elapsed_seconds: float  # in updates, since the run began
    validations: int  # since Begun


@dataclass(frozen=True)
class Died:
    """The supervisor knows why the training process ended."""

    title: str
    step: int


Event = Begun | Recorded | Said | Failed | Finished | Started | Progress | Died
KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Begun, Recorded, Said, Failed, Finished, Started, Progress, Died)
}


@dataclass(frozen=True)
class JournalEntry:
    """An event and its time."""

    wall_seconds: float
    monotonic_seconds: float  # the machine's clock, which stands still while a laptop sleeps
    event: Event


class EventPipe:
    """The sending end. If no supervisor reads it, the run still saves and ends by itself."""

    def __init__(self, descriptor: int, *, failures_only: bool = False) -> None:
        self._descriptor, self._failures_only = descriptor, failures_only

    def send(self, event: Event) -> None:
        """Send one event completely."""
        if self._failures_only and not isinstance(event, Failed):
            return
        line = f"{_line_of(event)}\n".encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BrokenPipeError:
            pass


def open_events(place: str, *, required: bool = True) -> EventPipe:
    """Open the event pipe that a descriptor number or the path of a FIFO names; raises OSError.

    One that is not ``required`` does not wait for a reader: a rank on another machine has none, even if a shared folder
    shows the FIFO. It sends only failures, to stderr, which mlx.launch passes to the supervisor.
    """
    if place.isdecimal():
        return EventPipe(int(place))
    if required:
        return EventPipe(os.open(place, os.O_WRONLY | os.O_CLOEXEC))
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        is_read = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        is_read = False
    if not is_read:
        return EventPipe(sys.stderr.fileno(), failures_only=True)
    os.set_blocking(descriptor, True)
    return EventPipe(descriptor)


class Journal:
    """Appends events to a file. A run that starts from the first update replaces the previous run's journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress_at, self._validations = -PROGRESS_SECONDS, 0
        self._start = ""  # lines of a process that has not begun
        with contextlib.suppress(OSError):  # a failing disk must not end the supervisor
            path.parent.mkdir(parents=True, exist_ok=True)

    def take(self, event: Event) -> None:
        """Write what the training process reports; its records become one Progress every PROGRESS_SECONDS."""
        if not isinstance(event, Recorded):
            if isinstance(event, Begun):
                self._progress_at, self._validations = -PROGRESS_SECONDS, 0
            self.write(event)
            return
        record, now = event.record, time.monotonic()
        self._validations += record.valid_loss is not None
        if now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self.write(Progress(record.step, record.elapsed_seconds, self._validations))

    def write(self, event: Event) -> None:
        """Append one entry with the current time, in one write, on a new line: the previous line may be torn."""
        line = f"\n{_line_of(event, MOST_LETTERS)}"
        if isinstance(event, Started) or self._start:
            self._start = line if isinstance(event, Started) else self._start + line
        with contextlib.suppress(OSError):
            if isinstance(event, Begun) and event.resumed_from_step == 0:
                write_text(self._path, self._start or line)
            else:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)
        self._start = "" if isinstance(event, Begun) else self._start


def parse_event(line: bytes) -> Event | None:
    """Parse an event; None if the line is torn or was printed by a library."""
    entry = _entry_of(line)
    return entry.event if entry is not None else None


def parse_journal(content: bytes) -> tuple[JournalEntry, ...]:
    """Parse a journal, without its torn lines."""
    return tuple(entry for line in content.splitlines() if (entry := _entry_of(line)) is not None)


def _line_of(event: Event, most_letters: int | None = None) -> str:
    values = {
        name: value[:most_letters] if isinstance(value, str) else value
        for name, value in dataclasses.asdict(event).items()
    }
    times = {"wall_seconds": time.time(), "monotonic_seconds": time.monotonic()}
    return json.dumps({"type": type(event).__name__, **times, **values})


def _entry_of(line: bytes) -> JournalEntry | None:
    try:
        value = json.loads(line)
        kind, times = KINDS[value.pop("type")], (value.pop("wall_seconds"), value.pop("monotonic_seconds"))
        return JournalEntry(*times, from_json(kind, value))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
