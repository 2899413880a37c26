"""What training prints while it runs and at its end, and how much time is left."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from safetrain.core.events import Begun, Event, JournalEntry, Progress, Said
from safetrain.core.formatting import counted, duration_text, print_text, rows_text
from safetrain.core.records.metrics import StepRecord, TrainingSummary
from safetrain.core.records.settings import updates_per_epoch
from safetrain.core.storage import paths

SAY_EVERY_SECONDS, LOG_EVERY_SECONDS, LOOK_SECONDS = 10.0, 60.0, 0.5  # on a terminal; in a log
CLEAR = "\r\x1b[2K"  # the line of a terminal
MEASURE = "safetrain run"  # the command that follows a training run
MOST_ENTRIES = 256  # entries for estimating the time left; if more, every second one is dropped


def time_left(journal: Sequence[JournalEntry], now_seconds: float) -> float | None:
    """Estimate the seconds until updates, validations and the adapter check are over; ``now_seconds``: monotonic clock.

    0: they take longer than estimated; None: the time of an update is not known yet. The medians ignore pauses.
    """
    begun, marks = None, list[tuple[float, int, float, int]]()  # of the newest process
    for entry in journal:
        event = entry.event
        if isinstance(event, Begun):  # a continued run has no time of an update before its first progress
            begun, marks = event, [] if event.resumed_from_step else [(entry.monotonic_seconds, 0, 0.0, 0)]
        elif isinstance(event, Progress):
            marks.append((entry.monotonic_seconds, event.step, event.elapsed_seconds, event.validations))
    if begun is None or len(marks) < 2 or marks[-1][1] <= marks[0][1]:
        return None
    clock, steps, elapsed, validations = np.diff(np.array(marks, np.float64), axis=0).T
    paces, waits = elapsed[steps > 0] / steps[steps > 0], (clock - elapsed)[validations > 0]
    waits = waits / validations[validations > 0]  # between two marks, but in no update
    last_seconds, last_step = marks[-1][:2]
    every = begun.eval_steps or begun.total_steps
    still = 1 + (begun.total_steps - 1) // every - last_step // every if last_step < begun.total_steps else 0
    seconds = max(0, begun.total_steps - last_step) * float(np.median(paces[-len(paces) // 2 :]))
    seconds += (still + begun.check_validations) * max(0.0, float(np.median(waits)) if len(waits) else 0.0)
    return max(0.0, seconds - max(0.0, now_seconds - last_seconds))


def time_left_text(seconds: float, now_wall_seconds: float) -> str:
    """``about 3 min left, until 14:32``."""
    if not seconds:
        return "takes longer than estimated"
    return f"about {duration_text(seconds)} left, until {clock_text(now_wall_seconds + seconds, now_wall_seconds)}"


def clock_text(wall_seconds: float, now_wall_seconds: float) -> str:
    """``14:32``; on another day ``Tue 03 Mar 14:32``."""
    there, now = time.localtime(wall_seconds), time.localtime(now_wall_seconds)
    return time.strftime("%H:%M" if there[:3] == now[:3] else "%a %d %b %H:%M", there)


class TrainProgress:
    """Prints a plain line for each report of the training process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._journal = list[JournalEntry]()  # of this process
        self._begun, self._validations = Begun(0, 0, ""), 0

    def show(self, event: Event) -> None:
        """Print one event. The command prints how the training ended."""
        if isinstance(event, Begun):
            self._begun, self._validations = event, 0
            self._journal = [JournalEntry(time.time(), self._clock(), event)]
            say(event.description)
            if event.resumed_from_step:
                say(f"continuing from step {event.resumed_from_step}")
        elif isinstance(event, StepRecord):
            self._validations += event.valid_loss is not None
            progress = Progress(event.step, event.elapsed_seconds, self._validations)
            self._journal.append(JournalEntry(time.time(), self._clock(), progress))
            if len(self._journal) > MOST_ENTRIES:
                self._journal = self._journal[::2]
            say(line_of(event, self._begun, time_left(self._journal, self._clock()) or 0.0))
        elif isinstance(event, Said):
            say(event.text)


def say(text: str) -> None:
    """Print; a terminal that is gone must not end the run."""
    try:
        print_text(text)
    except OSError:
        sys.stdout = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115 for the rest of the process


def line_of(record: StepRecord, begun: Begun, seconds_left: float) -> str:
    """One line for the terminal; ``seconds_left`` is 0 where it is unknown."""
    valid, bits = record.valid_loss, begun.bits_per_byte_of_nat
    parts = [f"step {record.step:>{len(str(begun.total_steps))}}/{begun.total_steps}"]
    parts += [f"loss {record.train_loss:.4f}"] if record.train_loss is not None else []
    parts += [f"valid {valid:.4f}"] if valid is not None else []
    parts += [f"{valid * bits:.3f} bits/byte"] if valid is not None and bits else []
    parts += describe_pairs(record)[:2]
    parts += [f"{record.labels_per_second:,.0f} labels/s"] if record.labels_per_second is not None else []
    parts += [f"{duration_text(seconds_left)} left"] if seconds_left else []
    return " · ".join(parts)


def show_end(summary: TrainingSummary) -> None:
    """Print the last lines of a training run."""
    if summary.stopped_early:
        say(f"Stopped early at step {summary.steps}: validation no longer improved.")
    losses = f"{summary.base_valid_loss:.4f} → {summary.best_valid_loss:.4f} (best: step {summary.best_step})"
    say(f"Done. Validation loss {losses}. Adapter: {paths.ADAPTERS}")


class EvaluationProgress:
    """How far the evaluation of a model is, and how much time its current part still needs."""

    def __init__(self) -> None:
        self._part = ("", "")  # model and work
        self._start_seconds, self._start_done, self._total, self._done = 0.0, 0.0, 0, 0.0  # of this part

    def __call__(self, name: str, work: str, total: int, done: float) -> None:
        """Report how much of a model's ``work`` (``questions answered``) is done; begun questions count in part."""
        if (name, work) != self._part:
            self._part, self._start_seconds, self._start_done = (name, work), time.monotonic(), done
        self._total, self._done = total, done

    def text(self) -> str:
        """The progress in a line."""
        name, work = self._part
        if not name:
            return "loading both models"
        done = self._done - self._start_done
        left = (time.monotonic() - self._start_seconds) * (self._total - self._done) / done if done > 0 else 0.0
        time_needed = f", about {duration_text(left)} left" if left else ""
        return f"{name:<6} {int(self._done)} of {self._total} {work}{time_needed}"


@contextmanager
def still_working(activity: str | Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Show what the ``with`` block does: each ten seconds on a terminal, in one line, and each minute in a log.

    Yields a function to call before a line is printed in the block: it removes that line, and the time begins again.
    """
    end, start_seconds = threading.Event(), time.monotonic()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    every, shown_seconds, is_shown = SAY_EVERY_SECONDS if on_terminal else LOG_EVERY_SECONDS, start_seconds, False

    def show(text: str, *, ends: bool) -> None:
        nonlocal shown_seconds, is_shown
        shown_seconds, is_shown = time.monotonic(), not ends
        with suppress(OSError, UnicodeError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def repeat() -> None:
        while not end.wait(LOOK_SECONDS):
            if time.monotonic() - shown_seconds >= every:
                spent = duration_text(time.monotonic() - start_seconds)
                text = activity() if callable(activity) else f"{activity}, for {spent} so far"
                width = shutil.get_terminal_size().columns - 1
                show(f"{CLEAR}{text[:width]}\r" if on_terminal else f"{text}\n", ends=not on_terminal)

    def before_a_line() -> None:
        show(CLEAR if is_shown else "", ends=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield before_a_line
    finally:
        end.set()
        thread.join()
        before_a_line()


def describe_pairs(record: StepRecord | None) -> list[str]:
    """Accuracy, margin and log-probabilities of a validation on pairs, with their names; empty without one."""
    if record is None or record.valid_accuracy is None:
        return []
    texts = [f"accuracy {100 * record.valid_accuracy:.1f} %"]
    logs = {"margin": record.valid_margin, "chosen": record.chosen_logp, "rejected": record.rejected_logp}
    return texts + [f"{name} {round(value or 0.0, 4) + 0.0:.3g}" for name, value in logs.items()]


def coverage_of(summary: TrainingSummary) -> str:
    """A text such as ``484 pairs, each seen 6 times; 41,838 labels trained; no row truncated``."""
    times = summary.steps / max(1, updates_per_epoch(summary.train_rows, summary.rows_per_update))
    seen = f"each seen {times:.0f} times" if times.is_integer() else f"seen {times:.2f} times on average"
    text = f"{rows_text(summary.train_rows, summary.method)}, {'each seen once' if times == 1 else seen}"
    cut = f"{counted(summary.cut_rows, 'row') if summary.cut_rows else 'no row'} truncated"
    return f"{text}; {summary.labels:,} labels trained" + ("" if summary.cut_rows is None else f"; {cut}")
