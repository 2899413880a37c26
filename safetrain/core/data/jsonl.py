"""What was read of a file as a row, and its faults by file, line and column."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.places import Place
from safetrain.core.data.row_blocks import Raw
from safetrain.core.data.rows import Row, RowError, parse_row
from safetrain.core.data.strict_json import Remedy, load
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted

SHOWN_FAULTS = 20
SHOWN_PLACES = 5
COLUMN = re.compile(r"column (\d+): ")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why something is no row, and where it stands."""

    where: str
    text: str
    remedy: Remedy


def parse_line(line: str) -> Row:
    """The row that one line says; raises RowError. A byte order mark, left where files were joined, is passed over."""
    return parse_row(decoded(line))


def decoded(raw: Raw) -> object:
    """The value of what was read of a file; raises RowError."""
    if isinstance(raw, str):
        return load(raw.removeprefix("\ufeff"))
    if isinstance(raw, RowError):
        raise raw
    return raw.value


def parse_raw(raw: Raw, columns: Columns | None = None) -> Row:
    """The row in what was read of a file; raises RowError."""
    return parse_row(decoded(raw), columns)


def located(path: Path | str, place: Place, error: RowError) -> Fault:
    """The fault with its place, and the column where that is known."""
    text = str(error)
    column = COLUMN.match(text)
    where = place.of(str(path), int(column[1]) if column else 0)
    return Fault(where, text[column.end() :] if column else text, error.remedy)


def bad_rows(faults: Sequence[Fault], total: int | None = None, do: str = "") -> DataError:
    """One error for all bad rows: twenty different faults are listed, each once, with the places that share it."""
    places: dict[str, list[str]] = {}
    for fault in faults:
        places.setdefault(fault.text, []).append(fault.where)
    shown = [line for text, where in list(places.items())[:SHOWN_FAULTS] for line in _listed(text, where)]
    told = sum(len(where) for where in list(places.values())[:SHOWN_FAULTS])
    total = len(faults) if total is None else total  # of which these are the first
    rest = f"\n  and {total - told} more" if total > told else ""
    count = counted(total, "bad row")
    return DataError(
        "\n".join([f"The data has {count}:", *shown]) + rest, do=do or "correct or remove them; nothing was written"
    )


def _listed(text: str, where: list[str]) -> list[str]:
    first = f"  {where[0]}: {text}"
    if len(where) == 1:
        return [first]
    others = "; ".join(where[1 : SHOWN_PLACES + 1]) + ("; …" if len(where) > SHOWN_PLACES + 1 else "")
    return [first, f"    the same in {counted(len(where) - 1, 'more row')}: {others}"]
