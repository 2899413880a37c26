"""What happened in a training, and when: a line of JSON each, appended by the supervisor, for whoever looks on.

Nothing depends on it: a line that cannot be written is left out, one that is half written is not read.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.protocol.events import Begun, Event, Failed, Finished, Recorded, Said
from safetrain.core.records.record_files import from_line, to_line

STARTED, BEGUN, MARK, SAID, DIED, FAILED, FINISHED = "started", "begun", "mark", "said", "died", "failed", "finished"
MARK_SECONDS = 10.0  # between marks: 8,640 a day
KEPT_BYTES = 2**20  # of the trainings before
MOST_LETTERS = 2000  # of a text


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``mark``: a record of metrics was made, told every MARK_SECONDS."""

    kind: str
    wall_seconds: float
    monotonic_seconds: float  # of the machine; stands still while a laptop sleeps
    text: str = ""
    step: int = 0  # updates made; of ``begun``, the step that it goes on from
    total_steps: int = 0  # of ``begun``
    elapsed_seconds: float = 0.0  # of ``mark``: in updates, since the run began
    validations: int = 0  # of ``mark``: since ``begun``


class Journal:
    """Appends to a file, which keeps the end of what earlier trainings wrote there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marked, self._validations = -MARK_SECONDS, 0
        with contextlib.suppress(OSError):  # a disk that fails must not end the one who watches
            path.parent.mkdir(parents=True, exist_ok=True)
            _shorten(path)
        self._is_cut = _is_cut(path)  # the line before: the next one begins on its own

    def showing(self, show: Callable[[Event], None]) -> Callable[[Event], None]:
        """``show``, with what it is shown written down."""

        def both(event: Event) -> None:
            self.keep(event)
            show(event)

        return both

    def saying(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """``say``, with what it says written down."""

        def both(text: str) -> None:
            self.note(SAID, text)
            say(text)

        return both

    def keep(self, event: Event) -> None:
        """Write down what the training process reports."""
        match event:
            case Begun():
                self._marked, self._validations = -MARK_SECONDS, 0
                self.note(BEGUN, event.description, step=event.resumed_from_step, total_steps=event.total_steps)
            case Recorded():
                self._validations += event.record.valid_loss is not None
                if time.monotonic() - self._marked >= MARK_SECONDS:
                    self._marked = time.monotonic()
                    made = event.record.step, event.record.elapsed_seconds
                    self.note(MARK, step=made[0], elapsed_seconds=made[1], validations=self._validations)
            case Said():
                self.note(SAID, event.text)
            case Failed():
                self.note(FAILED, event.message)
            case Finished():
                self.note(FINISHED, step=event.steps)

    def note(
        self,
        kind: str,
        text: str = "",
        *,
        step: int = 0,
        total_steps: int = 0,
        elapsed_seconds: float = 0.0,
        validations: int = 0,
    ) -> None:
        """Write one entry, as of now, in one piece."""
        now = time.time(), time.monotonic()
        entry = Entry(kind, *now, text[:MOST_LETTERS], step, total_steps, elapsed_seconds, validations)
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                line = b"\n" * self._is_cut + to_line(entry).encode() + b"\n"
                self._is_cut = os.write(descriptor, line) < len(line)
            finally:
                os.close(descriptor)


def parse_entry(line: bytes) -> Entry | None:
    """An entry from its line; None where it was cut off."""
    return from_line(line, (Entry,))


def _is_cut(path: Path) -> bool:
    """Whether the last line of a file has no end: power or disk failed while it was written."""
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except OSError:
        return False


def _shorten(path: Path) -> None:
    """Keep the last KEPT_BYTES, by a new file: a reader may have the old one open."""
    if not path.is_file() or path.stat().st_size <= 2 * KEPT_BYTES:
        return
    with path.open("rb") as file:
        file.seek(-KEPT_BYTES, os.SEEK_END)
        kept = file.read().partition(b"\n")[2]
    shorter = path.with_name(f".{path.name}.partial")
    shorter.write_bytes(kept)
    shorter.replace(path)
