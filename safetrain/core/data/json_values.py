"""JSON that is no JSONL (one array, rows inside an object, objects over several lines), read a piece at a time."""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.decompression import CHUNK_BYTES, MOST_ROW_BYTES
from safetrain.core.data.places import Place
from safetrain.core.data.rows import is_row
from safetrain.core.data.strict_json import DEEP, DIGITS, TOO_LONG, RowError, shown, strict_decoder
from safetrain.core.errors import DataError

SPACE = re.compile(r"[ \t\n\r\ufeff]*")
NEAR_THE_END = 16  # characters in which a number, a word or an escape may be cut
STRICT = strict_decoder()
# Finds the end of a value that the strict one refuses: a key that stands twice, NaN, a number of 5,000 digits.
LENIENT = json.JSONDecoder(parse_int=len, parse_float=len)


@dataclass(frozen=True, slots=True)
class Beside:
    """Stands behind the last row: the keys of the object around the rows that nothing reads."""

    keys: tuple[str, ...]


Placed = tuple[Place, object]  # where a row stands, and its value, or the RowError for it


class Scanner:
    """Takes one value after the other from text of which only a part is in memory."""

    def __init__(self, chunks: Iterator[bytes], path: Path) -> None:
        self.row = 0  # of the array that is read
        self.line = 1  # of the character at ``_counted``: lines are counted once
        self._chunks, self._path = chunks, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended, self._column = "", 0, False, 0
        self._counted = 0

    def next(self) -> str:
        """The next character that is no space, which is not taken; empty at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def take(self, character: str, what: str) -> None:
        """Pass over ``character``; raises DataError where another one stands."""
        if self.next() != character:
            raise self.fault(f"expected {what}")
        self._at += 1

    def place(self) -> tuple[int, int]:
        """Line and column of what is next."""
        self.line, column = self._place(self._at)
        self._column, self._counted = column - 1, self._at
        return self.line, column

    def value(self) -> object:
        """The next value, or a RowError in its place; raises DataError where no JSON goes on."""
        self.next()
        while True:
            try:
                found: tuple[object, int] = STRICT.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_cut(error):
                    continue
                raise self.fault(f"not valid JSON: {error.msg}", error.pos) from None
            except RecursionError:
                raise self.fault(DEEP) from None
            except ValueError as error:
                end = self._end_of_refused()
                if end is None:
                    continue
                found = (error if isinstance(error, RowError) else RowError(DIGITS), end)
            if found[1] == len(self._text) and not self._ended:  # a number may go on
                self._read_more()
                continue
            self._at = found[1]
            return found[0]

    def fault(self, text: str, position: int | None = None) -> DataError:
        """The error for what stands at ``position``, or is next."""
        position = self._at if position is None else position
        line, column = self._place(position)
        cut = position >= len(self._text.rstrip()) and self._ended
        return DataError(
            f"The data file cannot be read on: {text}.",
            where=Place(line, self.row).of(str(self._path), column),
            do="the file is cut off: copy or download it again" if cut else "correct it there",
        )

    def _end_of_refused(self) -> int | None:
        """Where a value ends that is JSON and cannot be used; None where more of it has been read."""
        try:
            _, end = LENIENT.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            if self._is_cut(error):
                return None
            raise self.fault(f"not valid JSON: {error.msg}", error.pos) from None
        except RecursionError:
            raise self.fault(DEEP) from None
        return end

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value goes on in what is not read yet; if so, more of it is."""
        if self._ended:
            return False
        if len(self._text) - self._at > MOST_ROW_BYTES:
            if error.msg.startswith("Unterminated") or error.pos >= len(self._text) - NEAR_THE_END:
                raise self.fault(TOO_LONG)
            return False
        self._read_more()
        return True

    def _read_more(self) -> None:
        """At least as much again as is in memory, so that a long value is not begun too often."""
        self.place()
        parts = [self._text[self._at :]]
        wanted = max(CHUNK_BYTES, len(parts[0]))
        try:
            for chunk in self._chunks:
                parts.append(self._decoder.decode(chunk))
                wanted -= len(chunk)
                if wanted <= 0:
                    break
            else:
                parts.append(self._decoder.decode(b"", final=True))
                self._ended = True
        except UnicodeDecodeError:
            raise DataError(
                "The data file is not UTF-8.",
                where=f"{self._path}, behind line {self.line}",
                do="save it as UTF-8, or read it once as what it is: safetrain validate FILE --fix OUT --encoding NAME",
            ) from None
        self._text, self._at, self._counted = "".join(parts), 0, 0

    def _place(self, position: int) -> tuple[int, int]:
        passed = self._text.count("\n", self._counted, position)
        if passed:
            return self.line + passed, position - self._text.rfind("\n", self._counted, position)
        return self.line, self._column + position - self._counted + 1


def objects_of(chunks: Iterator[bytes], path: Path) -> Iterator[Placed]:
    """Objects one after the other, each over any number of lines."""
    scanner = Scanner(chunks, path)
    while scanner.next():
        line, _ = scanner.place()
        yield Place(line), scanner.value()


def array_of(chunks: Iterator[bytes], path: Path) -> Iterator[Placed]:
    """The values of one array."""
    scanner = Scanner(chunks, path)
    yield from _array(scanner)
    if scanner.next():
        raise scanner.fault("something stands behind the array")


def rows_inside(chunks: Iterator[bytes], path: Path, key: str) -> Iterator[Placed]:
    """The values of the array under ``key`` of one object, and then, where there are any, the keys beside it."""
    scanner = Scanner(chunks, path)
    scanner.take("{", "an object")
    beside: dict[str, object] = {}
    while scanner.next() != "}":
        name = scanner.value()
        scanner.take(":", "a colon")
        if name == key:
            yield from _array(scanner)
        else:
            value = scanner.value()
            if isinstance(value, list) and value and isinstance(value[0], dict):
                raise scanner.fault(f"rows stand under two keys, '{key}' and another: give each a file")
            beside[str(name)] = value
        if scanner.next() != "}":
            scanner.take(",", "a comma or the end of the object")
    if is_row(beside):
        raise scanner.fault(f"the object is a row itself, by {', '.join(map(shown, beside))}, beside those in '{key}'")
    scanner.take("}", "the end of the object")
    if scanner.next():
        raise scanner.fault("something stands behind the object")
    unread = tuple(name for name, value in beside.items() if value not in (None, "", [], {}))
    if unread:
        yield Place(0), Beside(unread)


def _array(scanner: Scanner) -> Iterator[Placed]:
    scanner.take("[", "an array")
    while scanner.next() != "]" or scanner.row:
        scanner.row += 1
        line, _ = scanner.place()
        yield Place(line, scanner.row), scanner.value()
        if scanner.next() == "]":
            break
        scanner.take(",", "a comma or the end of the array")
    scanner.take("]", "the end of the array")
    scanner.row = 0
