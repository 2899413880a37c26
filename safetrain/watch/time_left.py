"""How long a training still takes, from its journal. Pure: train's own lines and the monitor both use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from time import localtime, strftime

from safetrain.core.events import Begun, JournalEntry, Progress
from safetrain.core.formatting import duration_text

STRETCHES = 8  # of the recent half of the updates, whose paces are compared
LEAST_STRETCHES = 4  # from which the fastest and the slowest count as exceptions

Mark = tuple[float, Progress]  # monotonic clock


@dataclass(frozen=True)
class TimeLeft:
    """Seconds until updates, validations and the adapter check are over; 0: they take longer than estimated."""

    seconds: float
    least: float | None  # as if the rest went like the fastest recent stretch; None: too early to tell
    most: float | None
    updates_seconds: float  # of all updates of the run


def time_left(journal: Sequence[JournalEntry], now_seconds: float) -> TimeLeft | None:
    """Time left at ``now_seconds`` of the monotonic clock; None before the time of an update is known."""
    begun, marks = _marks_of(journal)
    if begun is None or len(marks) < 2 or marks[-1][1].step <= marks[0][1].step:
        return None
    last_seconds, last = marks[-1]
    paces = sorted(_paces(marks))
    is_sure = len(paces) >= LEAST_STRETCHES
    paces = paces[1:-1] if is_sure else paces  # a process that was stopped for a while shows as one slow stretch
    updates = max(0, begun.total_steps - last.step)
    validation = _validation_seconds(marks)
    validations = _validations_left(last.step, begun) + begun.check_validations
    since = max(0.0, now_seconds - last_seconds)

    def rest(pace: float) -> float:
        return max(0.0, updates * pace + validations * validation - since)

    least, most = (rest(paces[0]), rest(paces[-1])) if is_sure else (None, None)
    return TimeLeft(rest(mean(paces)), least, most, last.elapsed_seconds + updates * mean(paces))


def time_left_text(left: TimeLeft, now_wall_seconds: float) -> str:
    """``about 3 min left (2 min to 4 min), until 14:32``."""
    if not left.seconds:
        return "takes longer than estimated"
    text = f"about {duration_text(left.seconds)} left"
    if left.least is not None and left.most is not None:
        least, most = duration_text(left.least), duration_text(left.most)
        text += f" ({least} to {most})" if least != most else ""
    return f"{text}, until {clock_text(now_wall_seconds + left.seconds, now_wall_seconds)}"


def clock_text(wall_seconds: float, now_wall_seconds: float) -> str:
    """``14:32``; on another day ``Tue 03 Mar 14:32``."""
    there, now = localtime(wall_seconds), localtime(now_wall_seconds)
    return strftime("%H:%M" if there[:3] == now[:3] else "%a %d %b %H:%M", there)


def _marks_of(journal: Sequence[JournalEntry]) -> tuple[Begun | None, list[Mark]]:
    """The newest process's Begun and progress. A resumed run's updates have no time before the first progress."""
    begun, marks = None, list[Mark]()
    for entry in journal:
        if isinstance(entry.event, Begun):
            begun = entry.event
            marks = [] if begun.resumed_from_step else [(entry.monotonic_seconds, Progress(0, 0.0, 0))]
        elif isinstance(entry.event, Progress):
            marks.append((entry.monotonic_seconds, entry.event))
    return begun, marks


def _paces(marks: Sequence[Mark]) -> list[float]:
    """Seconds of an update in each of about STRETCHES stretches of the recent half of the updates."""
    steps = [progress for _, progress in marks]
    middle = steps[-1].step - (steps[-1].step - steps[0].step + 1) // 2
    first = next(progress for progress in reversed(steps) if progress.step <= middle)
    size, paces = max(1.0, (steps[-1].step - first.step) / STRETCHES), list[float]()
    for progress in steps:
        if progress.step - first.step >= size:
            paces.append((progress.elapsed_seconds - first.elapsed_seconds) / (progress.step - first.step))
            first = progress
    return paces


def _validation_seconds(marks: Sequence[Mark]) -> float:
    """The median time of a validation: time between two marks that was not an update. 0: no validation yet."""
    times = [
        ((now - before) - (after.elapsed_seconds - earlier.elapsed_seconds)) / (after.validations - earlier.validations)
        for (before, earlier), (now, after) in pairwise(marks)
        if after.validations > earlier.validations
    ]
    return max(0.0, median(times)) if times else 0.0


def _validations_left(step: int, begun: Begun) -> int:
    """At each multiple of ``eval_steps``, and after the last update."""
    if step >= begun.total_steps:
        return 0
    every = begun.eval_steps or begun.total_steps
    return 1 + (begun.total_steps - 1) // every - step // every
