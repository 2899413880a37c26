"""Rows of tables: CSV and its relatives, Parquet and Arrow (both with pyarrow, which is optional)."""

import collections
import csv
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetrain.core.data.decompression import BOMB_BYTES, BOMB_RATIO, MOST_ROW_BYTES, missing_library
from safetrain.core.data.foreign_rows import ANSWERS, KNOWN_KEYS, QUESTIONS
from safetrain.core.data.json_values import Placed
from safetrain.core.data.places import Place
from safetrain.core.data.strict_json import TOO_LONG, Remedy, RowError, load, shown
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted

PARQUET, ARROW_FILE, ARROW_STREAM = "a Parquet table", "an Arrow table", "an Arrow stream"
BATCH_ROWS, BATCH_BYTES = 256, 4 * 2**20  # that are made into Python's values at once, about
JSON_COLUMNS = ("messages", "conversations", "conversation", "tools", "history", "functions")
IN_QUOTES = Remedy("put cells that hold a separator into quotes, or name as many columns as there are cells")


def csv_rows(lines: Iterator[str], separator: str, path: Path) -> Iterator[Placed]:
    """The rows of a table with a header, counted from 1 behind it; ``lines`` with their ends.

    Empty rows are no rows, nor is the first line where it names the separator, as Excel writes it.
    """
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    at, names = Place(1), list[str]()  # what is next
    try:
        for cells in reader:
            line, at = at.line, Place(reader.line_num + 1, at.row)
            if not any(map(str.strip, cells)) or (not names and named_separator(separator.join(cells))):
                continue
            if not names:
                names, at = _header(cells, f"{path}:{line}"), Place(at.line, 1)
            else:
                if at.row == 1:
                    _refuse_title(names, cells, f"{path}:{line}")
                yield Place(line, at.row), _csv_row(names, cells)
                at = Place(at.line, at.row + 1)
    except csv.Error as error:
        why = TOO_LONG if "field limit" in str(error) else str(error)
        raise DataError(
            f"The table cannot be read on: {why}.",
            where=at.of(str(path)),
            do="correct that line: a cell with separators, quotes or line ends stands in quotes, and its quotes twice",
        ) from None


def _header(cells: Sequence[str], where: str) -> list[str]:
    names = [name.strip().removeprefix("\ufeff") or f"column {place}" for place, name in enumerate(cells, start=1)]
    if len(set(names)) < len(names):
        twice = collections.Counter(names).most_common(1)[0][0]
        raise DataError(f"The table has two columns named {shown(twice)}.", where=where, do="rename one")
    return names


def named_separator(line: str) -> str:
    """What the first line says to Excel that stands between the cells (``sep=;``); empty where it is no such line."""
    found = re.fullmatch(r"\ufeff?sep=(\W)", line, re.IGNORECASE)
    return found[1] if found else ""


def _refuse_title(names: Sequence[str], cells: Sequence[str], where: str) -> None:
    """Raise DataError where the first row is the header, and a title was taken for it: fewer cells, and no name."""
    usual = {cell.strip().casefold() for cell in cells}
    titled = sum(not name.startswith("column ") for name in names) < sum(map(bool, cells))
    if titled and usual & {*QUESTIONS} and usual & {*ANSWERS} and KNOWN_KEYS.isdisjoint(map(str.casefold, names)):
        raise DataError(
            "The table's header is not its first line: a title stands above it.",
            where=where,
            got=", ".join(map(shown, names)),
            do="remove what stands above the header",
        )


def _csv_row(names: Sequence[str], cells: Sequence[str]) -> dict[str, object] | RowError:
    if len(cells) != len(names):
        said = f"{counted(len(cells), 'cell')}, where the header names {counted(len(names), 'column')}"
        return RowError(said, IN_QUOTES)
    row: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}  # it has no null
    for name in JSON_COLUMNS:
        cell = row.get(name)
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
            try:
                row[name] = load(cell)
            except RowError as error:
                return RowError(f"the cell {name} is no JSON: {error}", error.remedy)
    return row


def column_rows(path: Path, kind: str) -> Iterator[Placed]:
    """The rows of a Parquet or Arrow file, counted from 1; raises DataError, also where pyarrow is missing."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError:
        raise missing_library(path, kind, "parquet") from None
    number = 0
    try:
        for batch in _parquet_batches(path) if kind == PARQUET else _arrow_batches(arrow, path, kind):
            batch.validate(full=True)  # lengths that a damaged file says, before anything is read by them
            for row in _with_times_as_texts(arrow, batch).to_pylist():
                number += 1
                yield Place(0, number), _row(row)
    except (arrow.ArrowException, OSError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"The table cannot be read: {shown(said[0])}",
            where=Place(0, number + 1).of(str(path)),
            do="copy or make it again",
        ) from None


def _with_times_as_texts(arrow: Any, batch: Any) -> Any:
    """Times to the nanosecond become texts: Python's own types hold none, and pyarrow then asks for pandas."""
    kinds = [_sayable(arrow, kind) for kind in batch.schema.types]
    if kinds == batch.schema.types:
        return batch
    columns = [column.cast(kind) for column, kind in zip(batch.columns, kinds, strict=True)]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _sayable(arrow: Any, kind: Any) -> Any:
    types = arrow.types
    if types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        return arrow.string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inside = _sayable(arrow, kind.value_type)
        return kind if inside == kind.value_type else arrow.large_list(inside)
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        found = [_sayable(arrow, field.type) for field in fields]
        if found == [field.type for field in fields]:
            return kind
        return arrow.struct([(field.name, inside) for field, inside in zip(fields, found, strict=True)])
    return kind


def _parquet_batches(path: Path) -> Iterator[Any]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
        if size > BOMB_BYTES and size > BOMB_RATIO * path.stat().st_size:
            raise DataError(
                f"The table unpacks to more than {BOMB_RATIO} times its size: that is no text, but a bomb.",
                where=str(path),
                do="do not use it",
            )
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * file.metadata.num_rows // max(1, size)))
        yield from file.iter_batches(batch_size=rows)


def _arrow_batches(arrow: Any, path: Path, kind: str) -> Iterator[Any]:
    importlib.import_module("pyarrow.ipc")
    with arrow.memory_map(str(path)) as source:
        if kind == ARROW_STREAM:
            batches: Any = arrow.ipc.open_stream(source)
        else:
            file = arrow.ipc.open_file(source)
            batches = (file.get_batch(place) for place in range(file.num_record_batches))
        for batch in batches:
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def _row(row: dict[str, object]) -> dict[str, object] | RowError:
    try:
        return {name: _plain(value, name) for name, value in row.items()}
    except RowError as error:
        return error


def _plain(value: object, place: str) -> object:
    """What JSON can say: times and decimals, which it cannot, become texts, and so does text in a column of bytes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            said = f"the column {shown(place)} holds bytes that are no text in UTF-8: drop it from the table"
            raise RowError(said) from None
    return str(value)
