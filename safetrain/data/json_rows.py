"""Reads rows of strict JSON, as lines or as one array: no NaN, no repeated keys, no half surrogate pairs.

For a row with an error, the reader yields a RowError instead.
"""

import collections
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from safetrain.core.errors import DataError

MOST_ROW_BYTES = 16 * 2**20  # about four million tokens, more than any model's context
MOST_ARRAY = 2**30  # characters
TOO_LONG = "a row is longer than 16 MiB, which is beyond any model's context"
BEFORE = re.compile(r"\s*\[\s*(?P<end>\])?")  # an array's first value
AFTER = re.compile(r"\s*(?:,\s*|(?P<end>\]))")  # every value
MOST_SHOWN = 60
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object",
         type(None): "null or an empty cell"}  # fmt: skip
MOST_DEEP = 300
DEEP = "brackets are nested hundreds of levels deep"
DIGITS = "a number has too many digits: write it as a string, in quotes"
CUT = "the line is cut off, or the object continues on the next line: it must be one line"
PYTHON = "this is how Python prints it: write the file with json.dumps"


class RowError(ValueError):
    """An error in one row; the reader adds the file and line.

    ``column`` is the error's position in its line; ``do`` is the remedy, unless that is to correct the row.
    """

    def __init__(self, message: str, *, column: int = 0, do: str = "") -> None:
        super().__init__(message)
        self.column, self.do = column, do


class Place(NamedTuple):
    """The line in which a row begins, and its number in an array or table; both from 1, or 0 if there is none."""

    line: int = 0
    row: int = 0

    def of(self, name: str, column: int = 0) -> str:
        """``a.jsonl:3``, as editors open it; ``a.csv, row 2 (line 3)``; ``a.parquet, row 2``; or only the name."""
        if self.row:
            return f"{name}, row {self.row}{f' (line {self.line})' if self.line else ''}"
        return ":".join([name, *(str(number) for number in (self.line, column) if number)])


Placed = tuple[Place, object]  # the place of a row, and its value or its RowError


class StrictDecoder:
    """Decodes JSON values. It collects violations of the standard instead of raising, so that decoding reaches the end.

    One decoder serves all lines: with options, json.loads would build one for each call.
    """

    def __init__(self) -> None:
        self._faults: list[RowError] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_constant=self._constant)

    def load(self, text: str) -> object:
        """Decode one line to its value or a RowError."""
        self._faults.clear()
        try:
            value: object = self._decoder.decode(text)
        except json.JSONDecodeError as error:
            return RowError(f"{said_of(error)}{_hint(text, error)}", column=error.colno)
        except (ValueError, RecursionError) as error:
            return RowError(said_of(error))
        return self._fault(value, text, 0, len(text)) or value

    def value_at(self, text: str, start: int) -> tuple[object, int]:
        """Decode the value that begins at ``start`` to the value or a RowError, and its end.

        Raises JSONDecodeError if the text is not JSON or the value is incomplete, ValueError, RecursionError.
        """
        self._faults.clear()
        value, end = self._decoder.raw_decode(text, start)
        return self._fault(value, text, start, end) or value, end

    def _fault(self, value: object, text: str, start: int, end: int) -> RowError | None:
        """The first violation in a value that was read from ``text``, or nesting that other readers refuse."""
        brackets = text.count("[", start, end) + text.count("{", start, end)
        if not self._faults and brackets > MOST_DEEP and _is_deep(value, MOST_DEEP):
            return RowError(DEEP)
        return self._faults[0] if self._faults else None

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) != len(pairs):
            ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
            self._faults.append(RowError(f"the key '{shown(twice)}' occurs twice in one object: remove one"))
        return value

    def _constant(self, name: str) -> None:
        self._faults.append(RowError(f"{name} is not valid JSON: write null, or omit the key"))


def said_of(error: ValueError | RecursionError) -> str:
    """Describe why json cannot read a text; int() refuses more than 4,300 digits."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg.removesuffix(' at')}"
    return DEEP if isinstance(error, RecursionError) else DIGITS


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
load = StrictDecoder().load


def dump(value: object, place: str) -> str:
    """Encode a value as JSON text that ``load`` can read; ``place`` names it in errors."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:  # 1e999, which Python reads as infinity
        raise RowError(f"{place} holds a number that is too large for JSON's readers") from None
    require_unicode(text, place)
    return text


def require_unicode(text: str, place: str) -> None:
    r"""Raise RowError for half a surrogate pair (a single ``\ud83d``): JSON can contain it, no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"{place} holds half a surrogate pair, which is not a character") from None


def shown(value: object) -> str:
    """A value from the data, shortened and escaped for one line of a terminal."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def kind(value: object) -> str:
    """The JSON type of ``value``, with its article."""
    return KINDS.get(type(value), type(value).__name__)


def _is_deep(value: object, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(part, most - 1) for part in parts)


def _hint(text: str, error: json.JSONDecodeError) -> str:
    """The usual cause of an error, in brackets; empty if none is known."""
    rest = text[error.pos :].lstrip()
    if not rest or error.msg.startswith("Unterminated"):
        return f" ({CUT})"
    return f" ({PYTHON})" if rest.startswith(("'", "None", "True", "False")) else ""


def line_rows(lines: Iterable[tuple[int, str]]) -> Iterator[Placed]:
    """Yield the values of JSON lines. Byte order marks, left where files were joined, are skipped."""
    for number, line in lines:
        if not line.isspace():
            yield Place(number), load(line.lstrip("\ufeff").rstrip("\r\n"))


def array_rows(chunks: Iterable[str], path: Path) -> Iterator[Placed]:
    """Yield the values of one JSON array, whose text is held in memory; raises DataError."""
    pieces, size = list[str](), 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size > MOST_ARRAY:
            do = "write JSON lines (one object per line), which may be of any length"
            raise DataError("The JSON array is longer than 1 GiB.", where=str(path), do=do)
    text, decoder, line, row, at = "".join(pieces), StrictDecoder(), 1, 0, 0
    while True:
        mark = (AFTER if row else BEFORE).match(text, at)
        if mark is None:
            raise _array_fault(path, Place(line, row), "expected a comma or the end of the array", text[at:])
        start, first = mark.end(), line + text.count("\n", at, mark.end())
        if mark["end"]:
            if text[start:].strip():
                raise _array_fault(path, Place(first), "there is text after the array", text[start:])
            return
        try:
            value, end = decoder.value_at(text, start)
        except (ValueError, RecursionError) as error:
            fault = getattr(error, "pos", start)
            place = Place(first + text.count("\n", start, fault), row + 1)
            raise _array_fault(path, place, said_of(error), text[fault:]) from None
        row += 1
        yield Place(first, row), RowError(TOO_LONG) if end - start > MOST_ROW_BYTES else value
        line, at = first + text.count("\n", start, end), end


def _array_fault(path: Path, place: Place, message: str, rest: str) -> DataError:
    do = "correct it there; if the file is cut off, copy or download it again"
    got, where = shown(rest.lstrip().split("\n")[0]), place.of(str(path))
    return DataError(f"The JSON array cannot be read: {message}.", where=where, got=got, do=do)
