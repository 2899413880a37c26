"""Follows training_metrics.csv, which may have a million lines: each is read once, and only their curves are kept."""

import time

from safetrain.core.records.metrics import COLUMNS, StepRecord
from safetrain.watch.monitor_curves import Curve, Point
from safetrain.watch.monitor_records import Curves
from safetrain.watch.monitor_tail import Tail

HEADER = ",".join(COLUMNS).encode()
DRAWN = ("train_loss", "valid_loss", "learning_rate", "labels_per_second", "footprint_bytes", "peak_memory_bytes")


class MetricsReader:
    """The curves of one metrics file, and of the one that is put in its place when a run is continued."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: Curve() for name in DRAWN}
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
        """The columns by their places: with names, a million lines would take four times as long."""
        train, valid, rate, speed, footprint, peak = (self._curves[name] for name in DRAWN)
        for line in lines:
            values = line.split(b",")
            if len(values) != len(COLUMNS) or line == HEADER:
                continue
            try:
                step, rate_now = int(values[0]), float(values[4])
                train_loss, valid_loss, labels = values[2], values[3], values[7]
                peak.add(step, float(values[8]))
                footprint.add(step, float(values[9]))
                if train_loss:
                    train.add(step, float(train_loss))
                if labels:
                    speed.add(step, float(labels))
                if step:
                    rate.add(step, rate_now)
                if valid_loss:
                    self._validated(valid, step, float(valid_loss))
            except ValueError:  # no line of ours
                continue
            self._last = line

    def _validated(self, curve: Curve, step: int, loss: float) -> None:
        curve.add(step, loss)
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
    if not line:
        return None
    step, epoch, train, valid, rate, norm, tokens, speed, peak, footprint, elapsed = line.decode("ascii").split(",")

    def number(text: str) -> float | None:
        return float(text) if text else None

    return StepRecord(
        int(step), float(epoch), number(train), number(valid), float(rate), number(norm), int(tokens), number(speed),
        int(peak), int(footprint), float(elapsed),
    )  # fmt: skip
