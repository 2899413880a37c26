"""What happens in a training: events that the training process sends over a pipe, and the journal that keeps them.

The supervisor receives the events, adds its own, and appends them to flight/journal.jsonl with the time. Nothing
depends on the journal: a line that cannot be written is left out, a torn line is not read.
"""

import contextlib
import dataclasses
import json
import os
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.files import from_json, from_line, to_line

PROGRESS_SECONDS = 10.0  # between progress lines of the journal
KEPT_BYTES = 2**20  # of the journal's end, when it has grown to twice as much
MOST_LETTERS = 2000  # of a text in the journal


@dataclass(frozen=True)
class Begun:
    """Everything is loaded; the first update comes next."""

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
    """The training ended itself with an error."""

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
    """How far the training is, every PROGRESS_SECONDS."""

    step: int
    elapsed_seconds: float  # in updates, since the run began
    validations: int  # since Begun


@dataclass(frozen=True)
class Died:
    """The supervisor found out why the training process ended."""

    title: str
    step: int


Event = Begun | Recorded | Said | Failed | Finished
SENT: tuple[type[Event], ...] = (Begun, Recorded, Said, Failed, Finished)
JournalEvent = Begun | Said | Failed | Finished | Started | Progress | Died
KEPT: tuple[type[JournalEvent], ...] = (Begun, Said, Failed, Finished, Started, Progress, Died)


class EventPipe:
    """The sending end. Without a supervisor to read it, the run still saves and ends by itself."""

    def __init__(self, descriptor: int, *, failures_only: bool = False) -> None:
        self._descriptor, self._failures_only = descriptor, failures_only

    def send(self, event: Event) -> None:
        """Send one event, whole."""
        if self._failures_only and not isinstance(event, Failed):
            return
        line = to_line(event).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BrokenPipeError:
            pass


def open_events(place: str, *, required: bool = True) -> EventPipe:
    """An event pipe, named by its descriptor's number or by the path of a FIFO; raises OSError.

    One that is not ``required`` does not wait for a reader: another machine has no reader, though a shared folder
    may show the FIFO. What ends the training there goes to stderr, which mlx.launch brings to the supervisor.
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


def parse_event(line: bytes) -> Event | None:
    """An event from its line; None when a sudden end has torn the line."""
    return from_line(line, SENT)


@dataclass(frozen=True)
class JournalEntry:
    """An event and its time."""

    wall_seconds: float
    monotonic_seconds: float  # the machine's clock, which stands still while a laptop sleeps
    event: JournalEvent


class Journal:
    """Appends events to a file and keeps the end of what earlier trainings wrote there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress_at, self._validations = -PROGRESS_SECONDS, 0
        with contextlib.suppress(OSError):  # a failing disk must not end the supervisor
            path.parent.mkdir(parents=True, exist_ok=True)
            _shorten(path)
        self._is_torn = _is_torn(path)  # the last line: the next one then begins on a new line

    def take(self, event: Event) -> None:
        """Write down what the training process reports; of its records, every PROGRESS_SECONDS how far it is."""
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

    def write(self, event: JournalEvent) -> None:
        """Append one entry, as of now, in one piece."""
        values = {
            name: value[:MOST_LETTERS] if isinstance(value, str) else value
            for name, value in dataclasses.asdict(event).items()
        }
        times = {"wall_seconds": time.time(), "monotonic_seconds": time.monotonic()}
        line = json.dumps({"type": type(event).__name__, **times, **values}).encode() + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                line = b"\n" * self._is_torn + line
                self._is_torn = os.write(descriptor, line) < len(line)
            finally:
                os.close(descriptor)


def parse_journal(lines: Iterable[bytes]) -> list[JournalEntry]:
    """The entries of the last run: from the start of the process that restarted it. Torn lines are left out."""
    entries, started = list[JournalEntry](), 0
    for line in lines:
        try:
            value = json.loads(line)
            name = value.pop("type")
            kind = next(kind for kind in KEPT if kind.__name__ == name)
            times = value.pop("wall_seconds"), value.pop("monotonic_seconds")
            entries.append(JournalEntry(*times, from_json(kind, value)))
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            continue
        event = entries[-1].event
        if isinstance(event, Started):
            started = len(entries) - 1
        if isinstance(event, Begun) and event.resumed_from_step == 0:
            entries, started = entries[started:], 0
    return entries


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end, because power or disk failed while it was written."""
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except OSError:
        return False


def _shorten(path: Path) -> None:
    """Keep the last KEPT_BYTES, in a new file because a reader may have the old one open."""
    if not path.is_file() or path.stat().st_size <= 2 * KEPT_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-KEPT_BYTES, os.SEEK_END)
        rest = file.read().partition(b"\n")[2]
    shorter = path.with_name(f".{path.name}.partial")
    shorter.write_bytes(rest)
    shorter.replace(path)
