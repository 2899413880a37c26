"""What a training prints while it runs and when it has ended."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.events import Begun, Event, JournalEntry, Progress, Recorded, Said
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.metrics import StepRecord, TrainingSummary
from safetrain.core.storage import paths
from safetrain.watch.time_left import time_left

SAY_EVERY_SECONDS = 10.0
MOST_ENTRIES = 256  # to estimate the time left from; of more, every second one is dropped
LINE_CELLS = 80


class TrainProgress:
    """Prints what the training process reports, a plain line each."""

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
        elif isinstance(event, Recorded):
            self._show_record(event.record)
        elif isinstance(event, Said):
            say(event.text)

    def _show_record(self, record: StepRecord) -> None:
        self._validations += record.valid_loss is not None
        progress = Progress(record.step, record.elapsed_seconds, self._validations)
        self._journal.append(JournalEntry(time.time(), self._clock(), progress))
        if len(self._journal) > MOST_ENTRIES:
            self._journal = self._journal[::2]
        left = time_left(self._journal, self._clock())
        say(line_of(record, self._begun, left.seconds if left is not None else 0.0))


def say(text: str) -> None:
    """Print; a terminal that is gone must not end the run."""
    try:
        print(text, flush=True)
    except UnicodeError:  # letters that the terminal does not have
        say(text.encode("ascii", "replace").decode())
    except OSError:
        sys.stdout = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115 for the rest of the process


def line_of(record: StepRecord, begun: Begun, seconds_left: float) -> str:
    """One line for the terminal; ``seconds_left`` is 0 where it is unknown."""
    valid, bits = record.valid_loss, begun.bits_per_byte_of_nat
    parts = [f"step {record.step:>{len(str(begun.total_steps))}}/{begun.total_steps}"]
    parts += [f"loss {record.train_loss:.4f}"] if record.train_loss is not None else []
    parts += [f"valid {valid:.4f}"] if valid is not None else []
    parts += [f"{valid * bits:.3f} bits/byte"] if valid is not None and bits else []
    parts += [f"{record.labels_per_second:,.0f} labels/s"] if record.labels_per_second is not None else []
    parts += [f"{duration_text(seconds_left)} left"] if seconds_left else []
    line = " · ".join(parts)
    with_memory = f"{line} · process {size_text(record.footprint_bytes)}"
    return with_memory if len(with_memory) <= LINE_CELLS else line


def show_end(summary: TrainingSummary) -> None:
    """Print the last lines of a training."""
    metrics, outcome = summary.metrics, summary.outcome
    if outcome.stopped_early:
        say(f"Stopped early at step {metrics.steps}: validation no longer improved.")
    losses = f"{outcome.base_valid_loss:.4f} → {metrics.best_valid_loss:.4f} (best: step {metrics.best_step})"
    say(f"Done. Validation loss {losses}. Adapter: {paths.ADAPTERS}")


def say_on_terminal(text: str) -> None:
    """Print what only a waiting person needs: on stderr, because the output may be for a program, and not to a log."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError, UnicodeError):
            print(text, file=sys.stderr, flush=True)


class EvaluationProgress:
    """Says every ten seconds how far the evaluation of a model is, and how long this part still takes."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._part = ("", "")  # model and work
        self._start_seconds, self._line_seconds, self._start_done = 0.0, 0.0, 0.0  # of this part

    def __call__(self, name: str, work: str, total: int, done: float) -> None:
        """Take how much of this model's ``work`` (``questions answered``) is done, questions begun in parts."""
        now = self._clock()
        if (name, work) != self._part:
            self._part, self._start_seconds, self._line_seconds, self._start_done = (name, work), now, now, done
        elif now - self._line_seconds >= SAY_EVERY_SECONDS and done > self._start_done:
            self._line_seconds = now
            left = (now - self._start_seconds) * (total - done) / (done - self._start_done)
            self._say(f"{name:<6} {int(done)} of {total} {work}, about {duration_text(left)} left")


@contextmanager
def still_working(
    activity: str, say: Callable[[str], None] = say_on_terminal, every_seconds: float = SAY_EVERY_SECONDS
) -> Iterator[None]:
    """Say every ten seconds how long a block has run that cannot report its progress."""
    end, start_seconds = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not end.wait(every_seconds):
            say(f"{activity}, for {duration_text(time.monotonic() - start_seconds)} so far")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
