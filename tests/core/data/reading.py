"""The rows of a file with their places, or one error for all that are bad, as validation reads them."""

from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.jsonl import bad_rows, located, parse_raw
from safetrain.core.data.row_blocks import blocks_of
from safetrain.core.data.rows import Row, RowError
from safetrain.core.errors import DataError


@dataclass(frozen=True, slots=True)
class SourcedRow:
    """A row and where it stands, in words."""

    row: Row
    where: str


def read_rows(path: Path, columns: Columns | None = None) -> list[SourcedRow]:
    """Every row of ``path``; raises DataError."""
    rows, faults = [], []
    for block in blocks_of(path):
        for place, raw in block.rows:
            try:
                rows.append(SourcedRow(parse_raw(raw, columns), place.of(str(path))))
            except RowError as error:
                faults.append(located(path, place, error))
    if faults:
        raise bad_rows(faults)
    if not rows:
        raise DataError("The data file has no rows.", where=str(path))
    return rows


def values(path: Path, columns: Columns | None = None) -> list[object]:
    """The rows in the canonical form."""
    return [sourced.row.as_json() for sourced in read_rows(path, columns)]


def refusal_of(path: Path) -> str:
    """What is said of a file that cannot be read whole; empty where it can."""
    try:
        read_rows(path)
    except DataError as error:
        return str(error)
    return ""
