"""How long a training still takes, and how sure that is. A pure function of what has been recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import localtime, strftime
from typing import Generic, TypeVar

from safetrain.core.formatting import duration_text

STRETCHES = 8  # of the recent half, whose paces are compared
PAUSE = 5.0  # an update of so many times the usual: the process was stopped meanwhile
DAY_SECONDS, YEAR_DAYS = 86400, 300
MOST_MARKS = 2048


@dataclass(frozen=True)
class Mark:
    """How far a training was at a moment of one process."""

    seconds: float  # of a clock that only runs on
    step: int
    elapsed_seconds: float  # in updates, since the run began
    validations: int  # made by this process


@dataclass(frozen=True)
class TimeLeft:
    """Seconds; ``least`` and ``most`` are None while too little has been seen to say how sure it is."""

    seconds: float
    least: float | None
    most: float | None


Kind = TypeVar("Kind")


class Marks(Generic[Kind]):
    """The marks of a process of any length: where there are too many, every second one is forgotten."""

    def __init__(self) -> None:
        self.kept = list[Kind]()

    def add(self, mark: Kind) -> None:
        """A newer one."""
        self.kept.append(mark)
        if len(self.kept) > MOST_MARKS:
            self.kept = self.kept[::2]

    def clear(self) -> None:
        """Another process begins."""
        self.kept.clear()


def time_left(marks: Sequence[Mark], total_steps: int, eval_steps: int, now_seconds: float) -> TimeLeft | None:
    """``marks``, oldest first, the first as the process began; None before an update's time is known.

    The updates that are left at the pace of the recent half, and the validations that are left, with what goes with
    them (saving), at what the usual one has taken. From least to most: as if all the rest went as fast as the fastest
    or as slowly as the slowest of STRETCHES recent stretches.
    """
    made = _without_pauses([mark for mark in marks if mark.elapsed_seconds > 0 or mark.step == 0])
    if len(made) < 2 or made[-1].step <= made[0].step:
        return None
    last = made[-1]
    recent = [mark for mark in made if mark.step >= last.step - max(1, (last.step - made[0].step) // 2)]
    recent = recent if len(recent) > 1 else made[-2:]
    left = max(0, total_steps - last.step)
    beside = _seconds_beside(marks) * _validations_left(last.step, total_steps, eval_steps)
    since = max(0.0, now_seconds - last.seconds)

    def rest(pace: float) -> float:
        return max(0.0, left * pace + beside - since)

    paces = _paces(recent)
    typical = (last.elapsed_seconds - recent[0].elapsed_seconds) / (last.step - recent[0].step)
    if len(paces) < 3:
        return TimeLeft(rest(typical), None, None)
    return TimeLeft(rest(typical), rest(min(paces)), rest(max(paces)))


def time_left_text(left: TimeLeft, now_wall_seconds: float, *, short: bool = False) -> str:
    """``about 3 min left, until 14:32``; with what it may be between, where that is known and not short."""
    sure = ""
    if left.least is not None and left.most is not None and not short:
        least, most = duration_text(left.least), duration_text(left.most)
        sure = f" ({least} to {most})" if least != most else ""
    until = clock_text(now_wall_seconds + left.seconds, now_wall_seconds)
    return f"about {duration_text(left.seconds)} left{sure}, until {until}"


def clock_text(wall_seconds: float, now_wall_seconds: float) -> str:
    """``14:32``; with its day where that is another one, and with its year where days alone do not tell it."""
    there, now = localtime(wall_seconds), localtime(now_wall_seconds)
    if there[:3] == now[:3]:
        return strftime("%H:%M", there)
    days = abs(wall_seconds - now_wall_seconds) / DAY_SECONDS
    return strftime("%a %H:%M" if days < 6 else "%d %b %H:%M" if days < YEAR_DAYS else "%d %b %Y", there)


def _without_pauses(marks: Sequence[Mark]) -> list[Mark]:
    """As if a stretch in which the process was stopped (Ctrl-Z) had taken as long as the others; its clock ran on."""
    steps = [(before, after) for before, after in pairwise(marks) if after.step > before.step]
    if len(steps) < 3:
        return list(marks)
    usual = median(
        (after.elapsed_seconds - before.elapsed_seconds) / (after.step - before.step) for before, after in steps
    )
    if usual <= 0:
        return list(marks)
    found, paused = list(marks[:1]), 0.0
    for before, after in pairwise(marks):
        took, typical = after.elapsed_seconds - before.elapsed_seconds, usual * (after.step - before.step)
        paused += took - typical if after.step > before.step and took > PAUSE * typical else 0.0
        found.append(replace(after, elapsed_seconds=after.elapsed_seconds - paused))
    return found


def _paces(marks: Sequence[Mark]) -> list[float]:
    """Seconds of an update in each of STRETCHES stretches of about as many updates."""
    size = max(1.0, (marks[-1].step - marks[0].step) / STRETCHES)
    found, first = list[float](), marks[0]
    for mark in marks[1:]:
        if mark.step - first.step >= size and mark.elapsed_seconds > first.elapsed_seconds:
            found.append((mark.elapsed_seconds - first.elapsed_seconds) / (mark.step - first.step))
            first = mark
    return found


def _seconds_beside(marks: Sequence[Mark]) -> float:
    """What a validation takes, with saving and what else is no update: the usual one, as pauses are none."""
    found = [
        max(0.0, (after.seconds - before.seconds) - (after.elapsed_seconds - before.elapsed_seconds))
        / (after.validations - before.validations)
        for before, after in pairwise(marks)
        if after.validations > before.validations and after.elapsed_seconds >= before.elapsed_seconds
    ]
    return median(found) if found else 0.0


def _validations_left(step: int, total_steps: int, eval_steps: int) -> int:
    """At each multiple of ``eval_steps``, and at the last update."""
    if step >= total_steps:
        return 0
    return (total_steps - 1) // max(1, eval_steps) - step // max(1, eval_steps) + 1
