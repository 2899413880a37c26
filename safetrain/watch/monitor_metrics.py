"""Follows training_metrics.csv, which may have a million lines: each is read once, and only their curves are kept."""

import time

from safetrain.core.records.metrics import COLUMNS, StepRecord, parse_csv
from safetrain.watch.monitor_curves import Curve, Point
from safetrain.watch.monitor_records import Curves
from safetrain.watch.monitor_tail import Tail

HEADER = ",".join(COLUMNS).encode()
LOSSES = ("step", "epoch", "train_loss", "valid_loss")  # the first columns
SMOOTH = ("learning_rate", "labels_per_second", "footprint_bytes", "peak_memory_bytes")
SMOOTH_EVERY = 4  # lines of a long file: their curves have thousands to a point


class MetricsReader:
    """The curves of one metrics file, and of the one that is put in its place when a run is continued."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: Curve() for name in ("train_loss", "valid_loss", *SMOOTH)}
        self._last = b""
        self._best: Point | None = None
        self._base: Point | None = None

    def read(self, most_seconds: float) -> None:
        """Take up new lines, for about ``most_seconds``."""
        end = time.monotonic() + most_seconds
        while True:
            lines = self._tail.lines()
            if self._tail.is_new:
                self._forget()
            self._take(lines)
            if not self._tail.unread_bytes or time.monotonic() >= end:
                return

    def _take(self, lines: list[bytes]) -> None:
        """Column by column, and only what is drawn: a million lines are read in seconds so."""
        lines = [line for line in lines if line.count(b",") == len(COLUMNS) - 1 and line != HEADER]
        if not lines:
            return
        try:
            front = [line.split(b",", len(LOSSES))[: len(LOSSES)] for line in lines]
            steps, _, train, valid = zip(*front, strict=True)
            self._add("train_loss", steps, train)
            self._validated(self._add("valid_loss", steps, valid))
            some = lines[:: SMOOTH_EVERY if self._tail.unread_bytes else 1]
            columns = dict(zip(COLUMNS, zip(*(line.split(b",") for line in some), strict=True), strict=True))
            for name in SMOOTH:
                self._add(name, columns["step"], columns[name])
        except ValueError:  # no lines of ours
            return
        self._last = lines[-1]

    def _add(self, name: str, steps: tuple[bytes, ...], texts: tuple[bytes, ...]) -> list[tuple[int, float]]:
        """What is told in a column goes to its curve; there is no learning rate before the first update."""
        told = [(int(step), float(text)) for step, text in zip(steps, texts, strict=True) if text]
        if name == "learning_rate":
            told = [(step, rate) for step, rate in told if step]
        self._curves[name].add([step for step, _ in told], [value for _, value in told])
        return told

    def _validated(self, told: list[tuple[int, float]]) -> None:
        for step, loss in told:
            if step == 0:
                self._base = Point(step, loss)
            elif self._best is None or loss < self._best.value:
                self._best = Point(step, loss)

    def curves(self) -> Curves:
        """What has been read."""
        found = {name: curve.points() for name, curve in self._curves.items()}
        train, valid = self._curves["train_loss"].last, self._curves["valid_loss"].last
        unread, last = self._tail.unread_bytes, _step_record(self._last)
        return Curves(**found, last=last, last_train=train, last_valid=valid, best=self._best, base=self._base,
                      unread_bytes=unread)  # fmt: skip


def _step_record(line: bytes) -> StepRecord | None:
    try:
        return next(iter(parse_csv(f"{HEADER.decode()}\n{line.decode()}\n")), None) if line else None
    except ValueError:
        return None
