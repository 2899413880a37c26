"""Follows training_metrics.csv, which may have a million lines: each is read once, and only their curves are kept."""

import time

from safetrain.core.records.metrics import COLUMNS, StepRecord, parse_csv
from safetrain.watch.monitor_curves import Curve, Point
from safetrain.watch.monitor_records import Curves
from safetrain.watch.monitor_tail import Tail

STEP = COLUMNS.index("step")
HEADER = ",".join(COLUMNS).encode()
DRAWN = ("train_loss", "valid_loss", "learning_rate", "labels_per_second", "footprint_bytes", "peak_memory_bytes")
SPARSE = ("valid_loss", "learning_rate")  # in these, steps are left out


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
        """Column by column: line by line, a million of them would take four times as long."""
        split = [values for line in lines if len(values := line.split(b",")) == len(COLUMNS) and line != HEADER]
        if not split:
            return
        columns = list(zip(*split, strict=True))
        try:
            steps = [int(text) for text in columns[STEP]]
            for name, curve in self._curves.items():
                texts = columns[COLUMNS.index(name)]
                if all(texts) and name not in SPARSE:
                    curve.add(steps, [float(text) for text in texts])
                    continue
                told = [(step, float(text)) for step, text in zip(steps, texts, strict=True) if text]
                if name == "learning_rate":  # there is none before the first update
                    told = [(step, value) for step, value in told if step]
                curve.add([step for step, _ in told], [value for _, value in told])
                if name == "valid_loss":
                    self._validated(told)
        except ValueError:  # no lines of ours
            return
        self._last = b",".join(split[-1])

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
