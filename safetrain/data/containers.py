"""Rows inside a file: of JSON lines, of one JSON array, of tables with a header, of Parquet and Arrow."""

import collections
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.data.forms import is_row
from safetrain.data.strict_json import RowError, StrictDecoder, load, said_of, shown

MOST_ROW_BYTES = 16 * 2**20  # of one row: some four million tokens, more than any model's context
TOO_LONG = "a row is longer than 16 MiB, which is beyond any model's context: split it"
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # texts are compressed to a third or a tenth, repeated rows to a fiftieth
BATCH_ROWS, BATCH_BYTES = 256, 4 * 2**20  # made into Python's values at once
JSON_CELLS = ("messages", "conversations", "conversation", "tools", "history", "functions")
BEFORE = re.compile(r"\s*\[\s*(?P<end>\])?")  # the first value of an array
AFTER = re.compile(r"\s*(?:,\s*|(?P<end>\]))")  # every value
UNDER_KEY = "take the rows out of the key that holds them: jq -c '.data[]' FILE > rows.jsonl"


class Place(NamedTuple):
    """The line in which a row begins, and in arrays and tables its number; both from 1, and 0 where there is none."""

    line: int
    row: int = 0

    @property
    def number(self) -> int:
        """The line; the row where there is none, and in an array that is one long line."""
        return max(self.line, self.row)

    def of(self, name: str, column: int = 0) -> str:
        """``a.jsonl:3``, as editors open it; ``a.csv, row 2 (line 3)``; ``a.parquet, row 2``."""
        if not self.row:
            return f"{name}:{self.line}:{column}" if column else f"{name}:{self.line}"
        return f"{name}, row {self.row}{f' (line {self.line})' if self.line else ''}"


Placed = tuple[Place, object]  # where a row stands, and its value, or the RowError for it
Lines = Iterable[tuple[int, str | None]]  # with their numbers; None for a line that is too long to be kept


def bomb(path: Path) -> DataError:
    """The error for a file that unpacks without bound."""
    what = f"The data file unpacks to more than {BOMB_RATIO} times its size: it is a bomb, not text."
    return DataError(what, where=str(path), do="do not use it; if it is yours, unpack it yourself and give that file")


# JSON


def line_rows(lines: Lines) -> Iterator[Placed]:
    """The values of JSON lines. A byte order mark, left where files were joined, is passed over."""
    is_first = True
    for number, line in lines:
        if line is None:
            yield Place(number), RowError(TOO_LONG, do=UNDER_KEY if is_first else "")
        elif not line.isspace():
            value = _loaded(line)
            yield Place(number), _not_rows_under_a_key(value) if is_first else value
        is_first = False


def _loaded(text: str) -> object:
    try:
        return load(text.lstrip("\ufeff").rstrip("\r\n"))
    except RowError as error:
        return error


def _not_rows_under_a_key(value: object) -> object:
    """The value, or a RowError where it is an object that holds the rows of the file under a key."""
    if isinstance(value, dict) and not is_row(value):
        for key, item in value.items():
            if isinstance(item, list) and item and is_row(item[0]):
                do = UNDER_KEY.replace("data", key if key.isidentifier() else "KEY")
                return RowError(f"the rows of the file stand under the key '{shown(key)}' of one object", do=do)
    return value


def array_rows(chunks: Iterator[str], path: Path) -> Iterator[Placed]:
    """The values of one JSON array, of which a value and a chunk are in memory; raises DataError."""
    decoder, text, line, row = StrictDecoder(), "", 1, 0
    for chunk in itertools.chain(chunks, [None]):
        text, at = text + (chunk or ""), 0
        while True:
            mark = (AFTER if row else BEFORE).match(text, at)
            if mark is None:
                if chunk is None or text[at:].strip():
                    raise _array_fault(path, Place(line, row), "expected a comma or the end of the array", text[at:])
                break
            start, first = mark.end(), line + text.count("\n", at, mark.end())
            if mark["end"]:
                if text[start:].strip() or any(map(str.strip, chunks)):
                    raise _array_fault(path, Place(first), "something stands after the array", text[start:])
                return
            try:
                value, end = decoder.value_at(text, start)
            except (ValueError, RecursionError) as error:
                said = _fatal(error, text, start, is_last=chunk is None)
                if said:
                    fault = getattr(error, "pos", start)
                    place = Place(first + text.count("\n", start, fault), row + 1)
                    raise _array_fault(path, place, said, text[fault:]) from None
                break
            if end == len(text) and chunk is not None:  # a number may go on
                break
            row += 1
            yield Place(first, row), value
            line, at = first + text.count("\n", start, end), end
        text = text[at:]


def _fatal(error: ValueError | RecursionError, text: str, start: int, *, is_last: bool) -> str:
    """What is wrong with the value at ``start``; empty where more text may complete it."""
    if is_last or not isinstance(error, json.JSONDecodeError):
        return said_of(error)
    if error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - len("-Infinity"):
        return TOO_LONG if len(text) - start > MOST_ROW_BYTES else ""
    return said_of(error)


def _array_fault(path: Path, place: Place, said: str, rest: str) -> DataError:
    do = "correct it there; if the file is cut off, copy or download it again"
    got, where = shown(rest.lstrip().split("\n")[0]), place.of(str(path))
    return DataError(f"The JSON array cannot be read on: {said}.", where=where, got=got, do=do)


# Tables


def table_rows(lines: Lines, separator: str, path: Path) -> Iterator[Placed]:
    """The rows of a table with a header; rows of empty cells are passed over."""
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(_whole(lines, path), delimiter=separator, strict=True)
    names, line, row = list[str](), 1, 0
    try:
        for cells in reader:
            begin, line = line, reader.line_num + 1
            if not any(map(str.strip, cells)):
                continue
            if not names:
                names = _header(cells, f"{path}:{begin}")
                continue
            row += 1
            yield Place(begin, row), _table_row(names, cells)
    except csv.Error as error:
        why = TOO_LONG if "field limit" in str(error) else error
        do = "correct that line: a cell with separators, quotes or line ends stands in quotes, and its quotes twice"
        where = Place(line, row + 1).of(str(path))
        raise DataError(f"The table cannot be read on: {why}.", where=where, do=do) from None


def _whole(lines: Lines, path: Path) -> Iterator[str]:
    for number, line in lines:
        if line is None:
            raise DataError(f"The table cannot be read on: {TOO_LONG}.", where=f"{path}:{number}")
        yield line


def _header(cells: list[str], where: str) -> list[str]:
    """The names of the columns; raises DataError where one stands twice."""
    names = [name.strip() or f"column {number}" for number, name in enumerate(cells, start=1)]
    ((name, count),) = collections.Counter(names).most_common(1)
    if count > 1:
        raise DataError(f"The table has two columns named {shown(name)}.", where=where, do="rename one")
    return names


def _table_row(names: list[str], cells: list[str]) -> object:
    if len(cells) != len(names):
        said = f"{counted(len(cells), 'cell')}, where the header names {counted(len(names), 'column')}"
        return RowError(said, do="put cells that hold a separator into quotes")
    row: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}  # CSV has no null
    for name in JSON_CELLS:
        cell = row.get(name)
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
            row[name] = value = _loaded(cell)
            if isinstance(value, RowError):
                return RowError(f"the cell {name} is not JSON: {value}")
    return row


# Parquet and Arrow


def columnar_rows(path: Path, kind: str) -> Iterator[Placed]:
    """The rows of a table that pyarrow reads, of the ``kind`` Parquet, Arrow file or Arrow stream; raises DataError."""
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(path) if kind == "Parquet" else _arrow_batches(path, kind):
            batch.validate(full=True)  # lengths that a damaged file gives, before anything is read by them
            times = [field.name for field in batch.schema if "[ns" in str(field.type)]  # Python has no type for them
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                for row in batch.slice(start, rows).drop_columns(times).to_pylist():
                    number += 1
                    yield Place(0, number), _plain_row(row)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        where, do = Place(0, number + 1).of(str(path)), "copy or make it again"
        raise DataError(f"The table cannot be read: {shown(said[0])}", where=where, do=do) from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
        if size > BOMB_BYTES and size > BOMB_RATIO * path.stat().st_size:
            raise bomb(path)
        yield from file.iter_batches(BATCH_ROWS)


def _arrow_batches(path: Path, kind: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if kind == "Arrow stream":
            yield from pyarrow.ipc.open_stream(source)
        else:
            file = pyarrow.ipc.open_file(source)
            yield from (file.get_batch(place) for place in range(file.num_record_batches))


def _plain_row(row: dict[str, object]) -> object:
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
            raise RowError(f"the column {shown(place)} holds bytes that are not text in UTF-8: drop it") from None
    return str(value)
