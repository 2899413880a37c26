"""Reads and writes JSONL files of rows. Every fault is named by file, line and column; none is skipped."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.forms import check_form, not_utf8
from safetrain.core.data.rows import Row, RowError, parse_row
from safetrain.core.data.strict_json import load
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_text

SHOWN_FAULTS = 20
SHOWN_PLACES = 5
FAULT = re.compile(r"(.*?:\d+)(:\d+)?: (.*)", re.DOTALL)
COLUMN = re.compile(r"column (\d+): ")


@dataclass(frozen=True, slots=True)
class SourcedRow:
    """A row and where it stands, as ``file:line``."""

    row: Row
    where: str


def parse_line(line: str) -> Row:
    """The row that one line says; raises RowError. A byte order mark, left where files were joined, is passed over."""
    try:
        return parse_row(load(line.removeprefix("\ufeff")))
    except RecursionError:
        raise RowError("brackets stand in brackets more than some hundred deep: no reader takes that") from None


def located(where: str, error: RowError) -> str:
    """The fault with its place, as editors open it: ``file:line:column: …`` where the column is known."""
    text = str(error)
    column = COLUMN.match(text)
    return f"{where}:{column[1]}: {text[column.end() :]}" if column else f"{where}: {text}"


def read_rows(path: Path) -> list[SourcedRow]:
    """Every row of ``path``. Blank lines are not rows. Raises one DataError that lists the bad lines."""
    check_form(path)
    rows, faults = [], []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line or line.isspace():
            continue
        where = f"{path}:{number}"
        try:
            rows.append(SourcedRow(parse_line(line), where))
        except RowError as error:
            faults.append(located(where, error))
    if faults:
        raise bad_rows(faults)
    if not rows:
        raise DataError("The data file has no rows.", where=str(path), do="put one JSON object on each line")
    return rows


def bad_rows(faults: list[str], total: int | None = None) -> DataError:
    """One error for all bad rows: twenty different faults are listed, each once, with the places that share it."""
    places: dict[str, list[str]] = {}
    for fault in faults:
        match = FAULT.fullmatch(fault)
        place, text = (match[1] + (match[2] or ""), match[3]) if match else ("", fault)
        places.setdefault(text, []).append(place)
    shown = [line for text, where in list(places.items())[:SHOWN_FAULTS] for line in _listed(text, where)]
    told = sum(len(where) for where in list(places.values())[:SHOWN_FAULTS])
    total = len(faults) if total is None else total  # of which these are the first
    rest = f"\n  and {total - told} more" if total > told else ""
    count = counted(total, "bad row")
    return DataError(
        "\n".join([f"The data has {count}:", *shown]) + rest, do="correct or remove them; nothing was written"
    )


def _listed(text: str, where: list[str]) -> list[str]:
    first = f"  {where[0]}: {text}" if where[0] else f"  {text}"
    if len(where) == 1:
        return [first]
    others = ", ".join(where[1 : SHOWN_PLACES + 1]) + (", …" if len(where) > SHOWN_PLACES + 1 else "")
    return [first, f"    the same in {counted(len(where) - 1, 'more row')}: {others}"]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSONL, whole or not at all."""
    write_text(path, "".join(json.dumps(row.as_json(), ensure_ascii=False) + "\n" for row in rows))


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"The data file cannot be read: {error.strerror}.", where=str(path)) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(content, error, path, first_line=1) from None
