"""Reads and writes JSONL files of rows. Every fault is named by file, line and column; none is skipped."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.rows import Row, RowError, parse_row
from safetrain.core.errors import DataError
from safetrain.core.files import write_text
from safetrain.core.words import counted

SHOWN_FAULTS = 20


@dataclass(frozen=True)
class SourcedRow:
    """A row and where it stands, as ``file:line``."""

    row: Row
    where: str


def read_rows(path: Path) -> list[SourcedRow]:
    """Every row of ``path``. Blank lines are not rows. Raises one DataError that lists the bad lines."""
    rows, faults = [], []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            rows.append(SourcedRow(parse_row(json.loads(line, parse_constant=_refuse_constant)), where))
        except json.JSONDecodeError as error:
            faults.append(f"{where}:{error.colno}: not valid JSON: {error.msg}")
        except RowError as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise bad_rows(faults)
    if not rows:
        raise DataError("The data file has no rows.", where=str(path), do="put one JSON object on each line")
    return rows


def bad_rows(faults: list[str]) -> DataError:
    """One error for all bad rows; the first twenty are listed."""
    shown = "\n".join(f"  {fault}" for fault in faults[:SHOWN_FAULTS])
    rest = f"\n  and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
    count = counted(len(faults), "bad row")
    return DataError(f"The data has {count}:\n{shown}{rest}", do="correct or remove them; nothing was written")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSONL, whole or not at all."""
    write_text(path, "".join(json.dumps(row.as_json(), ensure_ascii=False) + "\n" for row in rows))


def _refuse_constant(name: str) -> None:
    raise RowError(f"{name} is not valid JSON")


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            "The data file does not exist.", where=str(path), do="correct data.path in params.yaml"
        ) from None
    except OSError as error:
        raise DataError(f"The data file cannot be read: {error.strerror}.", where=str(path)) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            "The data file is not UTF-8.",
            where=f"{path}:{line} (byte {error.start})",
            do=f"convert it: iconv -f WINDOWS-1252 -t UTF-8 {path}",
        ) from None
