"""Rows inside a file: of JSON over several lines, of tables with a header, of Parquet and Arrow."""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.data.forms import is_row
from safetrain.data.strict_json import DEEP, DIGITS, RowError, StrictDecoder, load, shown

CHUNK_CHARACTERS = 2**19
MOST_ROW_BYTES = 16 * 2**20  # of one row: some four million tokens, more than any model's context
TOO_LONG = "a row is longer than 16 MiB, which is beyond any model's context: split it"
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # texts are compressed to a third or a tenth, repeated rows to a fiftieth
BATCH_ROWS, BATCH_BYTES = 256, 4 * 2**20  # made into Python's values at once
JSON_CELLS = ("messages", "conversations", "conversation", "tools", "history", "functions")
SPACE = re.compile(r"[ \t\n\r\ufeff]*")
AGAIN = "copy or make it again"


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
        line = f" (line {self.line}, column {column})" if column else f" (line {self.line})" if self.line else ""
        return f"{name}, row {self.row}{line}"


Placed = tuple[Place, object]  # where a row stands, and its value, or the RowError for it


def table_rows(lines: Iterable[tuple[int, str | None]], separator: str, path: Path) -> Iterator[Placed]:
    """The rows of a table with a header; empty rows are passed over, as is Excel's first line ``sep=;``."""
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(_whole(lines, path), delimiter=separator, strict=True)
    names, line, row = list[str](), 1, 0
    try:
        for cells in reader:
            begin, line = line, reader.line_num + 1
            if not any(map(str.strip, cells)) or (
                not names and re.fullmatch(r"sep=\W?", separator.join(cells).strip())
            ):
                continue
            if names:
                row += 1
                yield Place(begin, row), _table_row(names, cells)
                continue
            names = [name.strip() or f"column {number}" for number, name in enumerate(cells, start=1)]
            twice = next((name for name in names if names.count(name) > 1), None) if len(names) < 1000 else None
            if twice is not None:
                what = f"The table has two columns named {shown(twice)}."
                raise DataError(what, where=f"{path}:{begin}", do="rename one")
    except csv.Error as error:
        where = Place(line, row + 1).of(str(path))
        do = "correct that line: a cell with separators, quotes or line ends stands in quotes, and its quotes twice"
        why = TOO_LONG if "field limit" in str(error) else error
        raise DataError(f"The table cannot be read on: {why}.", where=where, do=do) from None


def _whole(lines: Iterable[tuple[int, str | None]], path: Path) -> Iterator[str]:
    for number, line in lines:
        if line is None:
            raise DataError(f"The table cannot be read on: {TOO_LONG}.", where=f"{path}:{number}")
        yield line


def _table_row(names: list[str], cells: list[str]) -> object:
    if len(cells) != len(names):
        said = f"{counted(len(cells), 'cell')}, where the header names {counted(len(names), 'column')}"
        return RowError(said, do="put cells that hold a separator into quotes")
    row: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}  # CSV has no null
    for name in JSON_CELLS:
        cell = row.get(name)
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
            try:
                row[name] = load(cell)
            except RowError as error:
                return RowError(f"the cell {name} is not JSON: {error}")
    return row


def columnar_rows(path: Path, kind: str) -> Iterator[tuple[int, object]]:
    """The rows of a Parquet or Arrow file, counted from 1; raises DataError."""
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(path) if "Parquet" in kind else _arrow_batches(path, kind):
            batch.validate(full=True)  # lengths that a damaged file gives, before anything is read by them
            for row in _without_nanoseconds(batch).to_pylist():
                number += 1
                try:
                    yield number, {name: _plain(value, name) for name, value in row.items()}
                except RowError as error:
                    yield number, error
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        where = Place(0, number + 1).of(str(path))
        raise DataError(f"The table cannot be read: {shown(said[0])}", where=where, do=AGAIN) from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
        if size > BOMB_BYTES and size > BOMB_RATIO * path.stat().st_size:
            what = f"The table unpacks to more than {BOMB_RATIO} times its size: it is a bomb, not text."
            raise DataError(what, where=str(path), do="do not use it")
        yield from file.iter_batches(max(1, min(BATCH_ROWS, BATCH_BYTES * file.metadata.num_rows // max(1, size))))


def _arrow_batches(path: Path, kind: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if "stream" in kind:
            batches: Any = pyarrow.ipc.open_stream(source)
        else:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(place) for place in range(file.num_record_batches))
        for batch in batches:
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _without_nanoseconds(batch: Any) -> Any:
    """The batch without its columns of times to the nanosecond, which nothing reads and Python has no type for."""
    names = [field.name for field in batch.schema if "[ns" in str(field.type)]
    return batch.drop_columns(names) if names else batch


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


class Scanner:
    """Takes one JSON value after the other from text of which only a part is in memory."""

    def __init__(self, chunks: Iterator[str], path: Path) -> None:
        self._chunks, self._path, self._decoder = chunks, path, StrictDecoder()
        self._text, self._at, self._ended = "", 0, False
        self._line, self._counted, self._column, self._row = 1, 0, 0, 0

    def objects(self) -> Iterator[Placed]:
        """Objects one after the other, each over any number of lines."""
        while self._next():
            yield Place(self._count_lines()), self._value()

    def array(self) -> Iterator[Placed]:
        """The values of one array."""
        self._take("[", "an array")
        while self._next() != "]" or self._row:
            self._row += 1
            yield Place(self._count_lines(), self._row), self._value()
            if self._next() == "]":
                break
            self._take(",", "a comma or the end of the array")
        self._take("]", "the end of the array")
        self._row = 0

    def rows_under(self, key: str, ignored: list[str]) -> Iterator[Placed]:
        """The values of the array under ``key`` of one object; names of its other keys go into ``ignored``."""
        self._take("{", "an object")
        others: dict[str, object] = {}
        while self._next() != "}":
            name = self._value()
            self._take(":", "a colon")
            if name == key:
                yield from self.array()
            else:
                others[str(name)] = value = self._value()
                if isinstance(value, list) and value and isinstance(value[0], dict):
                    raise self._fault(f"rows stand under two keys, '{key}' and another: give each a file")
            if self._next() != "}":
                self._take(",", "a comma or the end of the object")
        if is_row(others):
            raise self._fault(
                f"the object is a row itself, by {', '.join(map(shown, others))}, beside those in '{key}'"
            )
        self._take("}", "the end of the object")
        self.end("something stands after the object")
        ignored += [name for name, value in others.items() if value not in (None, "", [], {})]

    def end(self, said: str) -> None:
        """Raise DataError where anything follows."""
        if self._next():
            raise self._fault(said)

    def _next(self) -> str:
        """The next character that is not a space, which is not taken; empty at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def _take(self, character: str, what: str) -> None:
        if self._next() != character:
            raise self._fault(f"expected {what}")
        self._at += 1

    def _value(self) -> object:
        """The next value, or a RowError in its place; raises DataError where no JSON goes on."""
        self._next()
        while True:
            try:
                value, end = self._decoder.value_at(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or self._is_broken(error):
                    raise self._fault(f"not valid JSON: {error.msg}", error.pos) from None
                self._read_more()
                continue
            except RecursionError:
                raise self._fault(DEEP) from None
            except ValueError:
                raise self._fault(DIGITS) from None
            if end == len(self._text) and not self._ended:  # a number may go on
                self._read_more()
                continue
            self._at = end
            return value

    def _is_broken(self, error: json.JSONDecodeError) -> bool:
        """Whether a fault is none that more text can mend; raises DataError for a value that is too long."""
        if len(self._text) - self._at <= MOST_ROW_BYTES:
            return False
        if error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16:
            raise self._fault(TOO_LONG)
        return True

    def _read_more(self) -> None:
        """Read at least as much again as is in memory, so that a long value is not begun too often."""
        self._count_lines()
        parts, wanted = [self._text[self._at :]], max(CHUNK_CHARACTERS, len(self._text) - self._at)
        for chunk in self._chunks:
            parts.append(chunk)
            wanted -= len(chunk)
            if wanted <= 0:
                break
        else:
            self._ended = True
        self._text, self._at, self._counted = "".join(parts), 0, 0

    def _count_lines(self) -> int:
        """The line of what is next; lines are counted once."""
        self._line, column = self._place(self._at)
        self._column, self._counted = column - 1, self._at
        return self._line

    def _place(self, position: int) -> tuple[int, int]:
        passed = self._text.count("\n", self._counted, position)
        if passed:
            return self._line + passed, position - self._text.rfind("\n", self._counted, position)
        return self._line, self._column + position - self._counted + 1

    def _fault(self, text: str, position: int | None = None) -> DataError:
        """The error for what stands at ``position``, or is next."""
        position = self._at if position is None else position
        line, column = self._place(position)
        cut = position >= len(self._text.rstrip()) and self._ended
        return DataError(
            f"The data file cannot be read on: {text}.",
            where=Place(line, self._row).of(str(self._path), column),
            do="the file is cut off: copy or download it again" if cut else "correct it there",
        )
