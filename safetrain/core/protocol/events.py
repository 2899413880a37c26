"""What the training process says to the one that supervises it: a line of JSON each, over a pipe of their own."""

import os
import stat
import sys
from dataclasses import dataclass

from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.record_files import from_line, to_line


@dataclass(frozen=True)
class Begun:
    """Everything is loaded; the first update comes next."""

    total_steps: int
    resumed_from_step: int
    description: str
    bits_per_byte_of_nat: float = 0.0  # 1 nat per label in bits per byte of the text; 0: not known


@dataclass(frozen=True)
class Recorded:
    """A line of the metrics file was written."""

    record: StepRecord


@dataclass(frozen=True)
class Said:
    """Something out of the ordinary."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The training ended itself with an error."""

    kind: str  # name of the exception
    message: str
    exit_code: int


@dataclass(frozen=True)
class Finished:
    """The training is complete and everything is written."""

    best_valid_loss: float
    best_step: int
    steps: int
    total_steps: int
    skipped_updates: int
    stopped_early: bool
    base_valid_loss: float  # before the first update


Event = Begun | Recorded | Said | Failed | Finished
KINDS: tuple[type[Event], ...] = (Begun, Recorded, Said, Failed, Finished)


class EventPipe:
    """The sending end. A supervisor that is gone is no reason to fail: the run then saves and ends by itself."""

    def __init__(self, descriptor: int, *, failures_alone: bool = False) -> None:
        self._descriptor, self._failures_alone = descriptor, failures_alone

    def send(self, event: Event) -> None:
        """Send one event, whole."""
        if self._failures_alone and not isinstance(event, Failed):
            return
        line = to_line(event).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BrokenPipeError:
            pass


def open_events(place: str, *, required: bool = True) -> EventPipe:
    """An event pipe that is named by its descriptor's number, or by the path of a FIFO; raises OSError.

    One that is not ``required`` is not waited for: on another machine nobody reads it, though a shared folder may show
    it. What ends the training there goes to stderr, which mlx.launch brings to the supervisor.
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
        return EventPipe(sys.stderr.fileno(), failures_alone=True)
    os.set_blocking(descriptor, True)
    return EventPipe(descriptor)


def parse_event(line: bytes) -> Event | None:
    """An event from its line; None when the line was cut off by a sudden end."""
    return from_line(line, KINDS)
