"""Follows training_metrics.csv, which may have a million lines: each is read once, and only their curves are kept."""

import csv
import dataclasses
import time
from collections.abc import Sequence

from safetrain.core.records.metrics import COLUMNS, StepRecord, parse_csv
from safetrain.watch.monitor_curves import Curve, Point
from safetrain.watch.monitor_records import Curves
from safetrain.watch.monitor_tail import Tail

HEADER = ",".join(COLUMNS).encode()
LOSSES = ("step", "epoch", "train_loss", "valid_loss")  # the first columns
SMOOTH = ("learning_rate", "labels_per_second", "footprint_bytes", "peak_memory_bytes")
ALWAYS_TOLD = [field.name for field in dataclasses.fields(StepRecord) if field.type in (int, float)]
SMOOTH_EVERY = 4  # lines of a long file: their curves have thousands to a point


class MetricsReader:
    """The curves of one metrics file, and of the one that is put in its place when a run is continued."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: Curve() for name in ("train_loss", "valid_loss", *SMOOTH)}
        self._last: StepRecord | None = None
        self._damaged = 0  # lines
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
        """All at once; where one of them is damaged, line by line."""
        told = [line for line in lines if line != HEADER]
        ours = [line for line in told if line.count(b",") == len(COLUMNS) - 1]
        try:
            self._take_columns(ours)
        except ValueError:
            for line in ours:
                try:
                    self._take_columns([line])
                except ValueError:
                    self._damaged += 1
        self._damaged += len(told) - len(ours)

    def _take_columns(self, lines: list[bytes]) -> None:
        """Only what is drawn: a million lines are read in seconds so. All or nothing of them; raises ValueError."""
        if not lines:
            return
        last = _step_record(lines[-1])
        if last is None:
            raise ValueError("the last line is damaged")
        front = [line.split(b",", len(LOSSES))[: len(LOSSES)] for line in lines]
        steps, _, train, valid = zip(*front, strict=True)
        found = {"train_loss": _told(steps, train), "valid_loss": _told(steps, valid)}
        some = lines[:: SMOOTH_EVERY if self._tail.unread_bytes else 1]
        columns = dict(zip(COLUMNS, zip(*(line.split(b",") for line in some), strict=True), strict=True))
        found |= {name: _told(columns["step"], columns[name]) for name in SMOOTH}
        rates = found["learning_rate"]  # there is none before the first update
        found["learning_rate"] = [(step, rate) for step, rate in rates if step]
        for name, told in found.items():
            self._curves[name].add([step for step, _ in told], [value for _, value in told])
        self._validated(found["valid_loss"])
        self._last = last

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
        return Curves(**found, last=self._last, last_train=train, last_valid=valid, best=self._best, base=self._base,
                      damaged_lines=self._damaged, unread_bytes=self._tail.unread_bytes)  # fmt: skip


def _told(steps: Sequence[bytes], texts: Sequence[bytes]) -> list[tuple[int, float]]:
    """What is told in a column."""
    return [(int(step), float(text)) for step, text in zip(steps, texts, strict=True) if text]


def _step_record(line: bytes) -> StepRecord | None:
    """The record of a line; None where one of its fields is damaged."""
    try:
        found = next(iter(parse_csv(f"{HEADER.decode()}\n{line.decode()}\n")), None)
    except (ValueError, csv.Error):
        return None
    whole = found is not None and all(getattr(found, name) is not None for name in ALWAYS_TOLD)
    return found if whole else None
