"""The records of training steps as a CSV file, which anybody may tail. A resumed run writes it anew."""

import csv
import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.core.storage.files import write_text


@dataclass(frozen=True)
class StepRecord:
    """One line of training_metrics.csv. ``None`` is an empty field: not measured at that step."""

    step: int  # optimizer updates made
    epoch: float  # passes over the training rows made
    train_loss: float | None  # mean per trained token since the last record
    valid_loss: float | None  # mean per trained token over all validation rows
    learning_rate: float  # of the last update
    grad_norm: float | None  # of the last update, before clipping
    trained_tokens: int  # labels seen since the start of the run
    labels_per_second: float | None  # labels per second since the last record
    peak_memory_bytes: int  # mlx's own peak since the start of this process
    footprint_bytes: int  # of the process: resident; on macOS what is charged to it
    elapsed_seconds: float  # training time, pauses excluded


COLUMNS = tuple(field.name for field in dataclasses.fields(StepRecord))


def start_csv(path: Path, records: list[StepRecord]) -> None:
    """Write the header and the records made so far, whole or not at all."""
    write_text(path, _lines([list(COLUMNS), *(_fields(record) for record in records)]))


def append_csv(path: Path, record: StepRecord) -> None:
    """Append one line; a reader may tail the file."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(_lines([_fields(record)]))
        file.flush()


def read_csv(path: Path) -> list[StepRecord]:
    """Every record of a metrics file; raises ConfigError when there is none."""
    if not path.is_file():
        raise ConfigError(f"{path.name} is not there yet.", where=str(path), do="run 'dvc repro train' first")
    return parse_csv(path.read_text(encoding="utf-8"))


def parse_csv(text: str) -> list[StepRecord]:
    """Every record of such a file's text, or of its header and some of its lines."""
    return [_record(row) for row in csv.DictReader(io.StringIO(text, newline=""))]


def _record(row: dict[str, str]) -> StepRecord:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(StepRecord):
        text = row[field.name]
        values[field.name] = None if text == "" else (int(text) if field.type is int else float(text))
    return StepRecord(**values)


def _fields(record: StepRecord) -> list[object]:
    return ["" if value is None else value for value in dataclasses.astuple(record)]


def _lines(rows: list[list[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
