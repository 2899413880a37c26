"""Recognises what a data file is by its first bytes and lines, whatever its name says."""

import csv
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from safetrain.core.data.binary_forms import binary_form, unknown_binary
from safetrain.core.data.decompression import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    MOST_ROW_BYTES,
    chunks_of,
    compression_of,
    decompressed,
)
from safetrain.core.data.foreign_rows import KNOWN_KEYS
from safetrain.core.data.rows import is_row
from safetrain.core.data.strict_json import RowError, load, shown, strict_decoder
from safetrain.core.data.tables import ARROW_FILE, ARROW_STREAM, PARQUET, named_separator
from safetrain.core.data.turn_forms import is_turn
from safetrain.core.errors import DataError, NoRowsError

COLUMNAR = ((b"PAR1", PARQUET), (b"ARROW1", ARROW_FILE), (b"\xff\xff\xff\xff", ARROW_STREAM))
BYTE_ORDER_MARKS = (  # the longer first: UTF-32's begins as UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
TABLE_SUFFIXES = (".csv", ".tsv")
COLUMN = re.compile(r"\w[\w.\-/]*")
ROWS_INSIDE = re.compile(  # a list of objects that are no turns, behind keys with texts and numbers
    r'\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*"(\w+)"\s*:\s*\[\s*\{'
    r'(?!\s*"(?:role|from|parts|content|value)")'
)
DECODER = strict_decoder()
OF_OBJECTS = re.compile(r"\[\s*(\{|\]|$)")
OF_TURNS = re.compile(r'\[\s*\{\s*"(?:role|from)"\s*:\s*"[\w ]*"\s*,\s*"(?:content|value)"\s*:')
OWN_LISTS = ("messages", "prompt", "completion", "tools", "conversations", "conversation", "contents", "history")
AS_OBJECTS = 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}'


class Container(StrEnum):
    """What the rows stand in."""

    LINES = "one JSON object on each line"
    ARRAY = "one JSON array"
    INSIDE = "a JSON array inside an object"
    OBJECTS = "JSON objects over several lines"
    TABLE = "a table"
    COLUMNS = "a binary table"


@dataclass(frozen=True)
class FileForm:
    """How to read a file. ``detail``: the separator, the key that the rows are under, or the kind of binary table."""

    container: Container
    compression: str = ""
    encoding: str = "utf-8"
    detail: str = ""
    old_line_ends: bool = False  # CR alone, as old Macs wrote
    has_mark: bool = False  # a byte order mark

    def __str__(self) -> str:
        what = {
            Container.INSIDE: f"one JSON object with the rows in '{self.detail}'",
            Container.TABLE: f"a table with {SEPARATORS.get(self.detail, '')}",
            Container.COLUMNS: self.detail,
        }.get(self.container, str(self.container))
        parts = [what, self.compression, "" if self.encoding == "utf-8" else self.encoding.upper()]
        parts += ["byte order mark" if self.has_mark else "", "line ends of old Macs" if self.old_line_ends else ""]
        return ", ".join(filter(None, parts))


def recognised(path: Path, encoding: str | None = None) -> FileForm:
    """What ``path`` is; raises DataError where it is missing, or nothing that rows can be read from.

    An empty file, or one of nothing but white space, is a NoRowsError.

    ``encoding`` is what somebody says it was saved in.
    """
    start = _head(path, "")
    compression = compression_of(start)
    head = _head(path, compression) if compression else start
    if not compression:
        kind = next((kind for magic, kind in COLUMNAR if head.startswith(magic)), None)
        if kind is not None:
            return FileForm(Container.COLUMNS, detail=kind)
    error = binary_form(head, path, compression)
    if error is not None:
        raise error
    found = encoding or _wide(head) or "utf-8"
    if found == "utf-8":
        error = unknown_binary(head, path) or _lfs_pointer(head, path)
    if error is not None:
        raise error
    text = head.decode(found, errors="replace").removeprefix("\ufeff")
    if not text.strip() and len(head) < HEAD_BYTES:
        raise NoRowsError(path)
    text, whole = _with_first_line(text, path, compression, found) if len(head) == HEAD_BYTES else (text, True)
    old = "\n" not in text and re.search(r"[}\]\w\"][ \t]*\r+[ \t]*\S", text) is not None
    container, detail = _container(text.replace("\r", "\n") if old else text, path, whole)
    has_mark = head.startswith((BYTE_ORDER_MARK, *(mark for mark, _ in BYTE_ORDER_MARKS)))
    return FileForm(container, compression, found, detail, old, has_mark)


def not_utf8(content: bytes, error: UnicodeDecodeError, path: Path, first_line: int) -> DataError:
    """The error for ``content``, whole lines of ``path`` from ``first_line`` on, that cannot be decoded."""
    start = error.start
    line = first_line + content.count(b"\n", 0, start)
    begin = content.rfind(b"\n", 0, start) + 1
    where = f"{path}:{line} (byte {start - begin + 1} of the line: 0x{content[start]:02x})"
    if error.end >= len(content) and error.reason == "unexpected end of data":
        return DataError(
            "The data file ends inside a character: it is cut off.", where=where, do="copy or download the file again"
        )
    if b"\x00" in content[max(0, start - HEAD_BYTES) : start + HEAD_BYTES]:
        return DataError("The data file holds bytes that are no text.", where=where, do="make the file again")
    if not content[:start].isascii():
        do = "correct that line alone: what stands before it is UTF-8, and converting the whole file would spoil it"
        return DataError("The data file is UTF-8, but for some bytes.", where=where, do=do)
    return DataError(
        "The data file is not UTF-8.",
        where=where,
        do="name the encoding it was saved in, and look at what is written: "
        "safetrain validate FILE --fix OUT --encoding windows-1252",
    )


def _head(path: Path, compression: str) -> bytes:
    """The first bytes; a compressed file may give them in small pieces."""
    head = b""
    for chunk in decompressed(path, compression, HEAD_BYTES):
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    return head[:HEAD_BYTES]


def _with_first_line(text: str, path: Path, compression: str, encoding: str) -> tuple[str, bool]:
    """The beginning with the whole first line of JSON and as much again, and whether that is the file.

    What a line is that goes on beyond what one row may have, its beginning says.
    """
    start = text.lstrip()
    unsure = ROWS_INSIDE.match(start) or (start.startswith("[") and _first_value(start[1:])[0] is None)
    if not unsure or re.search(r"[\r\n]", start.rstrip()):
        return text, False
    parts, size, wanted = list[bytes](), 0, MOST_ROW_BYTES
    for chunk in chunks_of(path, compression, encoding):
        new = chunk if size else chunk.lstrip()
        parts.append(new)
        if wanted == MOST_ROW_BYTES and (b"\n" in new or b"\r" in new):
            wanted = size + len(new) + HEAD_BYTES
        size += len(new)
        if size >= wanted:
            break
    longer = b"".join(parts).decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    return longer, size < wanted


def _wide(head: bytes) -> str | None:
    """UTF-16 and UTF-32: by their mark, or by the NUL in every second byte that Latin letters have there."""
    name = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), None)
    sample = head[:4096]
    units = len(sample) // 2
    if name is not None or units < 2:
        return name
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * units and even < 0.1 * units:
        return "utf-16-le"
    if even > 0.4 * units and odd < 0.1 * units:
        return "utf-16-be"
    zeros = "".join("0" if sample[place::4].count(0) > 0.2 * units else "x" for place in range(4))
    return {"x000": "utf-32-le", "000x": "utf-32-be"}.get(zeros)


def _lfs_pointer(head: bytes, path: Path) -> DataError | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    do = f"git lfs install && git lfs pull, in the repository that holds {path.name}"
    return DataError("The data file is a pointer of Git LFS: the rows are not here yet.", where=str(path), do=do)


def _container(text: str, path: Path, whole: bool) -> tuple[Container, str]:
    """What the rows stand in, and its detail; ``text`` is the beginning, or the ``whole`` file."""
    start = text.lstrip()
    first, _, rest = start.partition("\n")
    if start.startswith("["):
        return _of_brackets(start, first, rest), ""
    if start.startswith("{"):
        return _of_braces(start, first, rest, whole)
    names = path.name.lower().split(".")
    named = any(suffix[1:] in names[1:] for suffix in TABLE_SUFFIXES)
    separator = _separator(start, named)
    if separator is not None:
        return Container.TABLE, separator
    if any(line.lstrip().startswith("{") for line in text.split("\n")):
        return Container.LINES, ""  # the reader names the lines that are none
    raise DataError(
        "The data file has no rows that can be read: no line begins with a JSON object, and it is no table with a "
        "header.",
        where=f"{path}:{text[: len(text) - len(start)].count(chr(10)) + 1}",
        got=shown(first.rstrip("\r")),
        do=_markup(first) or AS_OBJECTS,
    )


def _of_brackets(start: str, first: str, rest: str) -> Container:
    """An array, or lines of which each is a list; a broken first line is for the reader to name."""
    if OF_TURNS.match(start) or is_turn(_first_value(start[1:])[0]):  # a turn alone is no row
        a_line = not rest.strip() or rest.lstrip().startswith("[") or _value(first) is not None
        return Container.LINES if a_line else Container.OBJECTS
    if rest.lstrip().startswith("[") and _value(first) is not None:
        return Container.LINES
    rows_follow = not OF_OBJECTS.match(start) and re.search(r"^\{", rest, re.MULTILINE)
    return Container.LINES if rows_follow or start.startswith("[[[") else Container.ARRAY


def _of_braces(start: str, first: str, rest: str, whole: bool) -> tuple[Container, str]:
    inside = ROWS_INSIDE.match(start)
    value = _value(first) if rest or whole else None  # else it is longer than a row may be
    complete, alone = value is not None, not rest.strip() and whole
    if inside and inside[1] not in OWN_LISTS and (not complete or alone):
        only, end = _first_value(start)
        if not is_row(only) and not start[end:].lstrip().startswith("{"):
            return Container.INSIDE, inside[1]
    goes_on = rest.lstrip()[:1] in ('"', "}")
    return (Container.LINES if complete or not goes_on else Container.OBJECTS), ""


def _first_value(text: str) -> tuple[object, int]:
    """The value that the text begins with, and its end; None where it is no JSON, or goes on."""
    start = len(text) - len(text.lstrip())
    try:
        found: tuple[object, int] = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, len(text)
    return found


def _value(text: str) -> object:
    """What the text says, None where it is no JSON."""
    try:
        return load(text.strip())
    except RowError:
        return None


def _separator(text: str, named: bool) -> str | None:
    """What stands between the cells of a table whose first line names them; None where it is no table.

    A file that is ``named`` a table may have names that nobody knows, and a single column.
    """
    first, _, rest = text.partition("\n")
    said = named_separator(first.rstrip("\r"))
    if said in SEPARATORS:
        return said
    best = _best_separator(first, named)
    if named and best is not None and best[0] < 1000:  # a title may stand above the header
        second = _best_separator(rest.lstrip("\r\n").partition("\n")[0], named=False)
        best = second if second and second[0] > 2000 else best
    return best[1] if best else None


def _best_separator(line: str, named: bool) -> tuple[int, str] | None:
    """How many names, the known ones above all, and what stands between them."""
    best: tuple[int, str] | None = None
    for separator in SEPARATORS:
        try:
            cells = next(csv.reader([line.rstrip("\r")], delimiter=separator, strict=True), [])
        except csv.Error:
            continue
        names = [name.strip() for name in cells]
        known = sum(name.casefold() in KNOWN_KEYS for name in names)
        plain = len(names) > 1 and all(COLUMN.fullmatch(name) for name in names)
        if known or plain or named:
            score = 1000 * known + len(names)
            best = max(best, (score, separator)) if best else (score, separator)
    return best


def _markup(first: str) -> str:
    if not first.lower().startswith(("<!doctype", "<html", "<?xml")):
        return ""
    return "this is a web page or XML: download the file itself ('raw', 'download'), not the page that shows it"
