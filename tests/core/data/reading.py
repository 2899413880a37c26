"""Whole files of rows, read as a validation reads them, block by block."""

from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.jsonl import bad_rows, located, parse_line
from safetrain.core.data.rows import Row, RowError
from safetrain.core.errors import DataError
from safetrain.plan.sources import blocks_of


@dataclass(frozen=True, slots=True)
class SourcedRow:
    """A row and where it stands, as ``file:line``."""

    row: Row
    where: str


def read_rows(path: Path) -> list[SourcedRow]:
    """Every row of ``path``; raises one DataError that lists the bad lines."""
    rows, faults = [], []
    for number, line in (numbered for block in blocks_of(path) for numbered in block.numbered()):
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
