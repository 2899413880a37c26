"""Writes rows in the format of a file's name: JSONL, JSON, CSV, TSV, Parquet or Arrow, plain, .gz or .zst."""

import contextlib
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from safetrain.core.errors import ConfigError, DataError
from safetrain.data.folders import suffix_of

LINES, TABLES, COLUMNAR = ("", ".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".arrow")
PACKED = (".gz", ".zst")
ONE_FORM = "write .jsonl or .json, or rows of one form"
Write = Callable[[dict[str, object]], None]


def require_format(path: Path) -> None:
    """Raise ConfigError for a name whose format is not written here."""
    is_packed = path.suffix.casefold() in PACKED
    written = LINES + TABLES + (() if is_packed else COLUMNAR)
    if suffix_of(path) not in written or path.suffix.casefold() in (".bz2", ".xz"):
        expected = ".jsonl, .json, .csv or .tsv, plain, .gz or .zst; or .parquet, .arrow"
        raise ConfigError("The name of the copy is of a format that is not written.", got=path.name, expected=expected)


@contextlib.contextmanager
def row_writer(path: Path, name: Path) -> Iterator[Write]:
    """Write rows to ``path`` in the format of ``name``, one call a row; raises DataError for what it cannot hold."""
    suffix = suffix_of(name)
    if suffix in COLUMNAR:
        rows = list[dict[str, object]]()
        yield rows.append
        _write_columns(path, rows, suffix)
        return
    with contextlib.closing(_opened(path, name.suffix.casefold())) as file:
        if suffix in TABLES:
            yield _table_writer(file, "\t" if suffix == ".tsv" else ",")
            return
        is_array, count = suffix == ".json", 0

        def write(row: dict[str, object]) -> None:
            nonlocal count
            start = ("[\n" if count == 0 else ",\n") if is_array else ""
            file.write(f"{start}{json.dumps(row, ensure_ascii=False)}{'' if is_array else chr(10)}")
            count += 1

        yield write
        file.write("\n]\n" if is_array and count else "")


def _opened(path: Path, packing: str) -> TextIO:
    if packing == ".gz":
        return io.TextIOWrapper(gzip.open(path, "wb"), encoding="utf-8", newline="\n")
    if packing == ".zst":
        import pyarrow

        stream: Any = pyarrow.output_stream(str(path), compression="zstd")
        return io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
    return path.open("w", encoding="utf-8", newline="\n")


def _table_writer(file: TextIO, separator: str) -> Write:
    """Lists and objects become JSON in a cell, which is read again."""
    writers = list[Any]()

    def write(row: dict[str, object]) -> None:
        if not writers:
            writers.append(csv.DictWriter(file, list(row), delimiter=separator, lineterminator="\n"))
            writers[0].writeheader()
        if set(row) != set(writers[0].fieldnames):
            got = f"{', '.join(row)} after {', '.join(writers[0].fieldnames)}"
            raise DataError("A table has the same columns in all rows.", got=got, do=ONE_FORM)
        writers[0].writerow(
            {
                key: json.dumps(item, ensure_ascii=False) if isinstance(item, list | dict) else item
                for key, item in row.items()
            }
        )

    return write


def _write_columns(path: Path, rows: list[dict[str, object]], suffix: str) -> None:
    import pyarrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    except pyarrow.ArrowException as error:
        said = str(error).splitlines()[0]
        raise DataError(f"The rows are not a table: {said}.", where=str(path), do=ONE_FORM) from None
    if suffix == ".parquet":
        parquet.write_table(table, str(path), compression="zstd")
        return
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
