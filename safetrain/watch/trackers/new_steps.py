"""The steps of a metrics file that a tracker has not: read once, in pieces, and from where the last export ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.records.metrics import COLUMNS, StepRecord, parse_csv

GIB = 2**30
PIECE_BYTES = 2**19  # some thousand steps: a million take no memory to speak of
LINE_BYTES = 4096  # more than a line has
HEADER = ",".join(COLUMNS)


@dataclass(frozen=True)
class Scalar:
    """A number with its name, as ``loss/train``."""

    name: str
    value: float


@dataclass(frozen=True)
class TrackedStep:
    """What is sent of a step."""

    step: int
    elapsed_seconds: float  # of the training
    scalars: tuple[Scalar, ...]


class NewSteps:
    """Those after ``after_step``; each is given once. A training may be writing, or have written the file anew."""

    def __init__(self, path: Path, after_step: int = -1, read_bytes: int = 0) -> None:
        """``read_bytes``: where the line of ``after_step`` has ended."""
        self.count, self.last_step = 0, after_step
        self.read_bytes = read_bytes if _ends_there(path, after_step, read_bytes) else 0
        self._path = path
        self._pieces = self._read()
        self._first = next(self._pieces, ())

    def __bool__(self) -> bool:
        """Whether there is any that was not given yet."""
        return bool(self._first)

    def __iter__(self) -> Iterator[TrackedStep]:
        piece, self._first = self._first, ()
        while piece:
            for step in piece:
                self.count, self.last_step = self.count + 1, step.step
                yield step
            piece = next(self._pieces, ())

    def _read(self) -> Iterator[tuple[TrackedStep, ...]]:
        known = self.last_step
        with self._path.open("rb") as file:
            file.seek(self.read_bytes)
            while piece := file.read(PIECE_BYTES):
                whole = piece[: piece.rfind(b"\n") + 1]  # a line may be half written
                if not whole:
                    return
                file.seek(len(whole) - len(piece), 1)
                lines = whole.decode("utf-8", "replace").splitlines()
                wanted = [line for line in lines if line and line != HEADER and int(line.partition(",")[0]) > known]
                self.read_bytes += len(whole)
                if wanted:
                    yield tuple(map(_step, parse_csv("\n".join([HEADER, *wanted, ""]))))


def _ends_there(path: Path, step: int, place: int) -> bool:
    """Whether the line of ``step`` ends at ``place``: in a file that was written anew it need not."""
    start = max(0, place - LINE_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        before = file.read(place - start)
    lines = before.splitlines(keepends=True)
    return len(before) == place - start > 0 and lines[-1].endswith(b"\n") and lines[-1].startswith(b"%d," % step)


def _step(record: StepRecord) -> TrackedStep:
    values = {
        "loss/train": record.train_loss,
        "loss/valid": record.valid_loss,
        "train/learning_rate": record.learning_rate if record.step else None,
        "train/grad_norm": record.grad_norm,
        "train/epoch": record.epoch,
        "train/labels_per_second": record.labels_per_second,
        "memory/mlx_peak_gib": record.peak_memory_bytes / GIB,
        "memory/process_gib": record.footprint_bytes / GIB,
    }
    scalars = tuple(Scalar(name, value) for name, value in values.items() if value is not None)
    return TrackedStep(record.step, record.elapsed_seconds, scalars)
