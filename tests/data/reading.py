"""The rows of a file with their places, and what validation says of files."""

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet as parquet_files

from safetrain.core.errors import DataError
from safetrain.core.records.reports import DataReport, Finding
from safetrain.data.files import rows_of
from safetrain.data.forms import Columns, parse_row
from safetrain.data.rows import Row, RowError
from safetrain.data.tokenize import DataSettings
from safetrain.data.validate import validate
from tests.conftest import EMBEDDED
from tests.data.models import with_context


@dataclass(frozen=True, slots=True)
class SourcedRow:
    """A row and where it stands, in words."""

    row: Row
    where: str


def read_rows(path: Path, columns: Columns | None = None) -> list[SourcedRow]:
    """Every row of ``path``; raises DataError."""
    rows, faults = list[SourcedRow](), list[str]()
    for place, value in rows_of(path):
        try:
            rows.append(SourcedRow(parse_row(value, columns), place.of(str(path))))
        except RowError as error:
            faults.append(f"{place.of(str(path), error.column)}: {error}")
    if faults:
        raise DataError("\n".join(faults))
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


def settings_in(error: RowError) -> list[str]:
    """The settings of data.columns that an error gives to look at."""
    return re.findall(r"data\.columns=(\{.*\})", error.do)


def gate(
    source: Path,
    into: Path,
    shares: tuple[float, float] = (0.1, 0.1),
    model: Path = EMBEDDED,
    context: int | None = None,
    downgrade: tuple[str, ...] = (),
    **more: Any,
) -> DataReport:
    """What the stage writes into ``into/validated``, and its report; ``context``: other than the model's own."""
    settings = DataSettings(downgrade=downgrade, shares={"valid": shares[0], "test": shares[1]}, **more)
    model = model if context is None else with_context(into / "model", context)
    return validate([source], model, settings, into / "validated").report


def by_id(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Each finding by its name."""
    return {finding.id: finding for finding in findings}


ROWS: list[dict[str, Any]] = [
    {"prompt": "Symbol of iron?", "completion": "Fé."},
    {"prompt": "Of gold?", "completion": 'Au, "aurum";\nit is.\t🦊'},
    {"prompt": "中文?", "completion": "Zinn | Sn"},
]
Rows = Sequence[Mapping[str, Any]]
Make = Callable[[Rows], str]


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows: Rows, separator: str, end: str = "\r\n") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


CONTAINERS: dict[str, tuple[str, Make]] = {
    "lines": (".jsonl", lines),
    "lines with CRLF and blank ones": (".jsonl", lambda rows: lines(rows).replace("\n", "\r\n\r\n")),
    "an array": (".json", lambda rows: json.dumps(rows)),
    "an array over lines": (".json", lambda rows: json.dumps(rows, indent=2, ensure_ascii=False)),
    "an array of lines": (".json", lambda rows: "[\n" + ",\n".join(lines(rows).splitlines()) + "\n]\n"),
    "CSV": (".csv", lambda rows: table(rows, ",")),
    "CSV with semicolons": (".csv", lambda rows: table(rows, ";", "\n")),
    "TSV": (".tsv", lambda rows: table(rows, "\t")),
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


COMPRESSIONS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": ("", lambda content: content),
    "gzip": (".gz", gzip.compress),
    "Zstandard": (".zst", zstd),
}


def parquet(path: Path, rows: Rows) -> Path:
    parquet_files.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def arrow_stream(path: Path, rows: Rows, *, file: bool = False) -> Path:
    found = pyarrow.Table.from_pylist(list(rows))
    open_new = pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream
    with open_new(str(path), found.schema) as writer:
        writer.write_table(found, max_chunksize=2)
    return path
