"""The events of a training run, which the training process sends over a pipe, and the journal that keeps them.

The supervisor receives the events, adds its own, and appends them to flight/journal.jsonl. Nothing depends on the
journal: lines that cannot be written are dropped, and torn lines are skipped.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage.files import from_json, write_text

PROGRESS_SECONDS = 10.0  # between progress lines of the journal
START = '\n{"type": "Started"'  # how the entry of a new training process begins


@dataclass(frozen=True)
class Begun:
    """Everything is loaded; the first update follows."""

    total_steps: int
    resumed_from_step: int
    description: str
    eval_steps: int = 0
    check_validations: float = 0.0  # time of the adapter check after the last update, in units of one validation
    bits_per_byte_of_nat: float = 0.0  # 1 nat per label in bits per byte of text; 0: unknown


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
    elapsed_seconds: float  # spent in updates since the run began
    validations: int  # number since Begun


@dataclass(frozen=True)
class Died:
    """The supervisor knows why the training process ended."""

    title: str
    step: int


Event = Begun | StepRecord | Said | Failed | Finished | Started | Progress | Died
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class JournalEntry:
    """An event and its time."""

    wall_seconds: float
    monotonic_seconds: float  # the machine's clock, which stands still while a laptop sleeps
    event: Event


class EventPipe:
    """The sending end of the pipe. If no supervisor reads it, the run still saves and ends by itself."""

    def __init__(self, descriptor: int, *, failures_only: bool = False) -> None:
        self._descriptor, self._failures_only = descriptor, failures_only

    def send(self, event: Event) -> None:
        """Send one event completely."""
        line = b"" if self._failures_only and not isinstance(event, Failed) else f"{_line_of(event)}\n".encode()
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._descriptor, line) :]


def open_events(place: str, *, required: bool) -> EventPipe:
    """Open the event pipe at ``place``, a descriptor number or the path of a FIFO; raises OSError.

    If not ``required``, it does not wait for a reader: a rank on another machine has none, even if a shared folder
    shows the FIFO. Without a reader, only failures are sent, to stderr, which mlx.launch passes to the supervisor.
    """
    if place.isdecimal():
        return EventPipe(int(place))
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CLOEXEC | (0 if required else os.O_NONBLOCK))
    except OSError:
        if required:
            raise
        return EventPipe(sys.stderr.fileno(), failures_only=True)
    os.set_blocking(descriptor, True)
    return EventPipe(descriptor)


class Journal:
    """Appends events to a file. A run that starts from the first update removes the previous run's events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress_at, self._validations = -PROGRESS_SECONDS, 0

    def write(self, event: Event) -> None:
        """Append one entry with the current time; step records become one Progress every PROGRESS_SECONDS."""
        if isinstance(event, Begun):
            self._progress_at, self._validations = -PROGRESS_SECONDS, 0
        elif isinstance(event, StepRecord):
            self._validations += event.valid_loss is not None
            if time.monotonic() - self._progress_at < PROGRESS_SECONDS:
                return
            self._progress_at = time.monotonic()
            event = Progress(event.step, event.elapsed_seconds, self._validations)
        with contextlib.suppress(OSError):  # a failing disk must not end the supervisor
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(event, Begun) and event.resumed_from_step == 0 and self._path.is_file():
                before = self._path.read_text(encoding="utf-8", errors="replace")
                write_text(self._path, before[max(0, before.rfind(START)) :])
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{_line_of(event)}")  # on a new line: the previous one may be torn


def parse_event(line: bytes) -> Event | None:
    """Parse an event; None if the line is torn or was printed by a library."""
    entries = parse_journal(line)
    return entries[0].event if entries else None


def parse_journal(content: bytes) -> tuple[JournalEntry, ...]:
    """Parse a journal, without its torn lines."""
    entries = list[JournalEntry]()
    for line in content.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            value = json.loads(line)
            event = from_json(KINDS[value["type"]], value)
            entries.append(JournalEntry(value["wall_seconds"], value["monotonic_seconds"], event))
    return tuple(entries)


def _line_of(event: Event) -> str:
    times = {"wall_seconds": time.time(), "monotonic_seconds": time.monotonic()}
    return json.dumps({"type": type(event).__name__, **times, **dataclasses.asdict(event)})
