"""What a training says while it runs and when it has ended."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.protocol.events import Begun, Event, Failed, Finished, Recorded, Said
from safetrain.core.records.metrics import StepRecord
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import BAD_UPDATES
from safetrain.watch.time_left import Mark, Marks, time_left, time_left_text

SAY_EVERY_SECONDS = 10.0


class TrainProgress:
    """Prints what the training process reports: a plain line each, no screen."""

    def __init__(self, eval_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``eval_steps``: updates between two validations."""
        self._eval_steps, self._clock = eval_steps, clock
        self._total, self._validations, self._bits = 0, 0, 0.0
        self._marks = Marks[Mark]()

    def show(self, event: Event) -> None:
        """Print one event."""
        match event:
            case Begun():
                self._begin(event)
            case Recorded():
                self._record(event.record)
            case Said():
                say(event.text)
            case Failed() | Finished():
                pass  # told at the end

    def _begin(self, begun: Begun) -> None:
        """Of this process, which may be another than before."""
        self._total, self._validations = begun.total_steps, 0
        self._bits = begun.bits_per_byte_of_nat
        self._marks.clear()
        if begun.resumed_from_step == 0:
            self._marks.add(Mark(self._clock(), 0, 0.0, 0))
        say(begun.description)
        if begun.resumed_from_step:
            say(f"continuing from step {begun.resumed_from_step}")

    def _record(self, record: StepRecord) -> None:
        self._validations += record.valid_loss is not None
        self._marks.add(Mark(self._clock(), record.step, record.elapsed_seconds, self._validations))
        left = time_left(self._marks.kept, self._total, self._eval_steps, self._clock())
        unfinished = left is not None and record.step < self._total
        when = time_left_text(left, time.time(), short=True) if left and unfinished else ""
        say(line_of(record, self._total, when, self._bits))


def say(text: str) -> None:
    """Print; a terminal that is gone must not end the run."""
    try:
        print(text, flush=True)
    except (OSError, UnicodeError):
        sys.stdout = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115 for the rest of the process


def line_of(step: StepRecord, total_steps: int, left: str, bits_per_byte_of_nat: float = 0.0) -> str:
    """One line for the terminal; ``left``: how long it still takes, empty where that is not known."""
    valid, bits = step.valid_loss, bits_per_byte_of_nat
    width = len(str(total_steps))
    parts = [f"step {step.step:>{width}}/{total_steps}"]
    parts += [f"loss {step.train_loss:.4f}"] if step.train_loss is not None else []
    parts += [f"valid {valid:.4f}"] if valid is not None else []
    parts += [f"{valid * bits:.3f} bits/byte"] if valid is not None and bits else []
    parts += [f"lr {step.learning_rate:.2e}"] if step.step else []
    parts += [f"{step.labels_per_second:,.0f} labels/s"] if step.labels_per_second is not None else []
    parts += [f"process {size_text(step.footprint_bytes)}"]
    return "  ".join([*parts, left] if left else parts)


def show_end(finished: Finished) -> None:
    """Print the last lines of a training."""
    if finished.skipped_updates:
        say(f"{finished.skipped_updates} updates were skipped, see {paths.OUTPUT / BAD_UPDATES}")
    if finished.stopped_early:
        say(f"stopped early at step {finished.steps} of {finished.total_steps}: validation no longer improved")
    losses = f"{finished.base_valid_loss:.4f} before, {finished.best_valid_loss:.4f} at step {finished.best_step}"
    say(f"done: validation loss {losses}; what that step learnt is in {paths.ADAPTERS}")


def say_on_terminal(text: str) -> None:
    """Print what is only for whoever waits: a pipe or a log gets the result alone."""
    if sys.stdout.isatty():
        say(text)


def tell_on_terminal(text: str) -> None:
    """The same beside the output, which may be for a program."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError, UnicodeError):
            print(text, file=sys.stderr, flush=True)


class EvaluationProgress:
    """Says every ten seconds how far the evaluation of a model is, and how long that part takes at its pace."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._part, self._began, self._said, self._before = ("", ""), 0.0, 0.0, 0.0

    def __call__(self, name: str, work: str, total: int, done: float) -> None:
        """The model of this ``name`` has done so much of its ``work`` (``questions answered``), open ones in parts."""
        now = self._clock()
        if (name, work) != self._part:
            self._part, self._began, self._said, self._before = (name, work), now, now, done
        elif now - self._said >= SAY_EVERY_SECONDS and done > self._before:
            self._said = now
            left = (now - self._began) * (total - done) / (done - self._before)
            self._say(f"{name:<6} {int(done)} of {total} {work}, about {duration_text(left)} left")


@contextmanager
def still_working(
    what: str, tell: Callable[[str], None] = tell_on_terminal, every_seconds: float = SAY_EVERY_SECONDS
) -> Iterator[None]:
    """Tell every ten seconds for how long a block has been at it, which cannot say more of itself."""
    ended, began = threading.Event(), time.monotonic()

    def tell_again() -> None:
        while not ended.wait(every_seconds):
            tell(f"{what}, for {duration_text(time.monotonic() - began)} so far")

    teller = threading.Thread(target=tell_again, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
