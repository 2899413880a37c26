"""The rows of a data file with their places: JSONL, JSON, CSV, TSV, Parquet, Arrow and plain text, packed or not.

What a file is, its first bytes and lines say, not its name. Memory does not grow with the file.
"""

import bz2
import codecs
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetrain.core.errors import DataError, NoRowsError
from safetrain.data.containers import MOST_ROW_BYTES, TOO_LONG, Place, Placed, Scanner, columnar_rows, table_rows
from safetrain.data.forms import AS_OBJECTS, KNOWN_KEYS, is_row
from safetrain.data.messages import is_turn
from safetrain.data.strict_json import RowError, load, shown

HEAD_BYTES, CHUNK_BYTES = 64 * 1024, 2**19
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # texts are compressed to a third or a tenth, repeated rows to a fiftieth
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
COLUMNAR = {b"PAR1": "a Parquet table", b"ARROW1": "an Arrow table", b"\xff\xff\xff\xff": "an Arrow stream"}
WEIGHTS = "data.path names the training rows; the model belongs to model.path"
EXPORT = "save the table as 'CSV UTF-8' in the program that made it, and give that file"
FOREIGN = (  # the first bytes of what holds no rows, what it is, what to do
    (b"GGUF", "a model's weights (GGUF)", WEIGHTS),
    (b"\x93NUMPY", "a NumPy array", "write the texts that it was made from, one JSON object on each line"),
    (b"\x89HDF", "an HDF5 file", "write its texts, one JSON object on each line"),
    (b"%PDF", "a PDF document", "training needs rows of text: write them, one JSON object on each line"),
    (b"\xd0\xcf\x11\xe0", "an old Office file (Excel, Word)", EXPORT),
    (b"\x04\x22\x4d\x18", "packed with LZ4", "unpack it with lz4 -d, or pack it with gzip or zstd"),
    (b"FEA1", "an old Feather table", "write it as Parquet with the program that made it, and give that file"),
    (b"SQLite format 3\x00", "an SQLite database", "export its table: sqlite3 -csv -header FILE 'select * from TABLE'"),
    (b"PK\x03\x04", "a zip archive or an Office document", f"unzip it and give the data file in it; or {EXPORT}"),
    (b"\x00\x00\xfe\xff", "text in UTF-32", "save it as UTF-8"),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "save it as UTF-8"),
    (b"version https://git-lfs", "a pointer of Git LFS (its rows are not here yet)",
     "git lfs install && git lfs pull, in the repository that holds it"),
    (b"<!DOCTYPE", "a web page", "download the file itself ('raw', 'download'), not the page that shows it"),
    (b"<html", "a web page", "download the file itself ('raw', 'download'), not the page that shows it"),
)  # fmt: skip
PICKLE = "have it written as JSON lines: a pickle runs code when it is opened, do not open a stranger's"
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
NAME = re.compile(r"\w[\w.\-/ ]*")
ROWS_INSIDE = re.compile(  # a list of objects that are not turns, after keys with texts and numbers
    r'\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*"(\w+)"\s*:\s*\[\s*\{'
    r'(?!\s*"(?:role|from|parts|content|value)")'
)
OF_TURNS = re.compile(r'\[\s*\{\s*"(?:role|from)"\s*:\s*"[\w ]*"\s*,\s*"(?:content|value)"\s*:')
OWN_LISTS = ("messages", "prompt", "completion", "tools", "conversations", "conversation", "contents", "history")
PLAIN = (".txt", ".text", ".md")
TEXT_END = "<|endoftext|>"  # alone on a line, it divides a file of plain text


@dataclass(frozen=True)
class FileForm:
    """How to read a file. ``container``: lines, array, inside (an object), objects, table, or a columnar table.

    ``detail``: the separator, or the key that the rows are under.
    """

    container: str
    detail: str = ""
    packing: str = ""
    encoding: str = "utf-8"
    has_mark: bool = False

    def __str__(self) -> str:
        what = {
            "lines": "one JSON object on each line",
            "array": "one JSON array",
            "inside": f"one JSON object with the rows in '{self.detail}'",
            "objects": "JSON objects over several lines",
            "table": f"a table with {SEPARATORS.get(self.detail, '')}",
        }.get(self.container, self.container)
        encoding = "" if self.encoding == "utf-8" else self.encoding.upper()
        return ", ".join(filter(None, [what, self.packing, encoding, "byte order mark" if self.has_mark else ""]))


def rows_of(path: Path, encoding: str | None = None, ignored: list[str] | None = None) -> Iterator[Placed]:
    """The rows of ``path`` in their order; raises DataError for what holds none, and where it cannot be read on.

    ``encoding`` is what the user says it was saved in. Keys around the rows that nothing reads go into ``ignored``.
    """
    form = recognised(path, encoding)
    if form.container in COLUMNAR.values():
        yield from ((Place(0, number), row) for number, row in columnar_rows(path, form.container))
        return
    chunks = _text_chunks(path, form)
    if form.container == "lines":
        yield from _line_rows(_lines(chunks))
    elif form.container == "table":
        yield from table_rows(_lines(chunks), form.detail, path)
    else:
        scanner = Scanner(chunks, path)
        if form.container == "array":
            yield from scanner.array()
            scanner.end("something stands after the array")
        elif form.container == "inside":
            yield from scanner.rows_under(form.detail, [] if ignored is None else ignored)
        else:
            yield from scanner.objects()


def texts_of(path: Path) -> Iterator[Placed]:
    """The documents of a file of plain text as rows: the file is one, or several divided by lines <|endoftext|>."""
    parts, size, first = list[str](), 0, 1
    for number, line in text_lines(path):
        text = line or ""
        if text.strip() == TEXT_END:
            yield from _document(first, parts, size)
            parts, size, first = [], 0, number + 1
        elif parts or not text.isspace():
            size += len(text) if line is not None else MOST_ROW_BYTES + 1
            parts += [text] if size <= MOST_ROW_BYTES else []  # what is too long need not be kept
        else:
            first = number + 1
    yield from _document(first, parts, size)


def text_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """The lines of a file of plain text with their numbers; None for one that is too long. Raises DataError."""
    return _lines(_text_chunks(path, FileForm("text", packing=packing_of(_head(path, "")))))


def recognised(path: Path, encoding: str | None = None) -> FileForm:
    """What ``path`` is; raises DataError where it is missing, or holds no rows, and NoRowsError where it is empty."""
    start = _head(path, "")
    packing = packing_of(start)
    head = _head(path, packing) if packing else start
    kind = next((name for magic, name in COLUMNAR.items() if head.startswith(magic)), None)
    if kind is not None and not packing:
        return FileForm(kind)
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    _refuse_foreign(head, path, packing, is_text=wide or encoding is not None)
    name = encoding or ("utf-16" if wide else "utf-8")
    text = head.decode(name, errors="replace").removeprefix("\ufeff")
    if not text.strip() and len(head) < HEAD_BYTES:
        raise NoRowsError(path)
    is_whole, text = len(head) < HEAD_BYTES, text.lstrip()
    cut = text.startswith("[") and _first_value(text[1:], whole=False)[0] is None
    if not is_whole and "\n" not in text and (cut or ROWS_INSIDE.match(text)):
        text, is_whole = _first_line(path, FileForm("lines", packing=packing, encoding=name))
    container, detail = _container(text.lstrip(), path, is_whole)
    return FileForm(container, detail, packing, name, wide or head.startswith(codecs.BOM_UTF8))


def _first_line(path: Path, form: FileForm) -> tuple[str, bool]:
    """A file's beginning with its whole first line, if that is a row, and whether that is the file."""
    parts, size = list[str](), 0
    for text in _text_chunks(path, form):
        parts.append(text)
        size += len(text)
        if size > MOST_ROW_BYTES or ("\n" in text and size > HEAD_BYTES):
            return "".join(parts), False
    return "".join(parts), True


def packing_of(head: bytes) -> str:
    """How a file that begins with ``head`` is compressed; empty where it is not."""
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")


def _refuse_foreign(head: bytes, path: Path, packing: str, *, is_text: bool) -> None:
    """Raise DataError for a file that is not text."""
    what, do = next(((what, do) for magic, what, do in FOREIGN if head.startswith(magic)), ("", ""))
    if head[257:262] == b"ustar":
        what, do = "a tar archive", "unpack it with tar -xf, then give the data file that was in it"
    elif packing and packing_of(head):
        what, do = f"packed twice, with {packing_of(head)} inside {packing}", "unpack it once"
    elif packing and any(map(head.startswith, COLUMNAR)):
        what, do = f"a binary table inside {packing}", "unpack it: such tables are packed in themselves"
    elif len(head) > 9 and head[8:9] == b"{" and head[5:8] == b"\x00\x00\x00" and head[9]:
        what, do = "a model's weights (safetensors)", WEIGHTS
    elif len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6):
        what, do = "a Python pickle", PICKLE
    elif not what and not is_text and len(found := CONTROLS.findall(head)) > max(8, len(head) // 20):
        where = head.index(found[0])
        first = head[where : where + 8].hex(" ")
        what = f"a binary file, or text without a byte order mark (from byte {where:,} on {first})"
        do = "give the rows as text in UTF-8"
    if what:
        expected = "rows as JSON, CSV, TSV, Parquet or Arrow"
        raise DataError(f"The data file is {what}, not rows of text.", where=str(path), expected=expected, do=do)


def _container(start: str, path: Path, whole: bool) -> tuple[str, str]:
    """What the rows stand in, and its detail; ``start`` is the beginning, or the ``whole`` file."""
    first, _, rest = start.partition("\n")
    value, end = _first_value(start, whole)
    if start.startswith("["):
        inner = _first_value(start[1:], whole)[0]
        of_turns = is_turn(inner) or OF_TURNS.match(start)
        one_line = value is not None and "\n" not in start[:end]
        if one_line and (of_turns or rest.lstrip().startswith("[")):
            return "lines", ""  # each line is a list of turns
        objects = re.match(r"\[\s*(\{|\]|$)", start)
        broken = start.startswith("[[[") or (not objects and re.search(r"^\{", rest, re.MULTILINE))
        return ("objects" if of_turns else "lines" if broken else "array"), ""
    if start.startswith("{"):
        inside = ROWS_INSIDE.match(start)
        alone = not start[end:].strip() or value is None
        if inside and inside[1] not in OWN_LISTS and alone and not is_row(value):
            return "inside", inside[1]
        goes_on = value is None or "\n" in start[:end]
        return ("objects" if goes_on and rest.lstrip()[:1] in ('"', "}") else "lines"), ""
    separator = _separator(first.rstrip("\r"), path)
    if separator:
        return "table", separator
    if re.search(r"^\s*\{", start, re.MULTILINE):
        return "lines", ""  # the reader names the lines that are not JSON
    said = "no line begins with a JSON object, and it is not a table with a header"
    where, got = f"{path}:1", shown(first.rstrip("\r"))
    raise DataError(f"The data file has no rows that can be read: {said}.", where=where, got=got, do=AS_OBJECTS)


def _first_value(text: str, whole: bool) -> tuple[object, int]:
    """The value that the text begins with, and its end; None where it is not JSON, or goes on after the text."""
    try:
        found = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None, len(text)
    return found if whole or found[1] < len(text) else (None, len(text))


def _separator(first: str, path: Path) -> str:
    """What stands between the cells of a table whose first line names them; empty where it is not a table."""
    said = re.fullmatch(r"sep=(\W)", first, re.IGNORECASE)  # as Excel writes
    if said and said[1] in SEPARATORS:
        return said[1]
    is_named = any(suffix in (".csv", ".tsv") for suffix in path.suffixes)
    scores = {}
    for separator in SEPARATORS:
        names = [name.strip(' "') for name in first.split(separator)]
        known = sum(name.casefold() in KNOWN_KEYS for name in names)
        if known or is_named or (len(names) > 1 and all(map(NAME.fullmatch, names))):
            scores[separator] = (known, len(names))
    return max(scores, key=lambda separator: scores[separator], default="")


# Bytes and lines


def opened(path: Path) -> IO[bytes]:
    """The file, to be read; raises DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError("The data is not a regular file.", where=str(path), do="name a file of rows")
        return path.open("rb")
    except FileNotFoundError:
        do = "correct data.path in params.yaml"
        raise DataError("The data file does not exist.", where=str(path), do=do) from None
    except OSError as error:
        raise DataError(f"The data file cannot be read: {error.strerror}.", where=str(path)) from None


def unpacked(path: Path, packing: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """What ``path`` holds, at most ``size`` bytes at a time; raises DataError for a bomb and for a damaged file."""
    with opened(path) as file:
        stream, done = _stream(file, packing), 0
        while True:
            try:
                chunk = stream.read(size)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                do = "copy or download it again, or make it again"
                raise DataError(f"The data file is damaged: {error}.", where=str(path), do=do) from None
            if not chunk:
                return
            done += len(chunk)
            if packing and done > BOMB_BYTES and done > BOMB_RATIO * file.tell():
                do = "do not use it; if it is yours, unpack it yourself and give that file"
                what = f"The data file unpacks to more than {BOMB_RATIO} times its size: it is a bomb, not text."
                raise DataError(what, where=str(path), do=do)
            yield chunk


def _stream(file: IO[bytes], packing: str) -> Any:
    if packing == "zstd":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    kinds: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return kinds[packing](file) if packing else file


def _head(path: Path, packing: str) -> bytes:
    head = b""
    for chunk in unpacked(path, packing, HEAD_BYTES):  # a compressed file may give it in small pieces
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    return head[:HEAD_BYTES]


def _text_chunks(path: Path, form: FileForm) -> Iterator[str]:
    """The text of a file without its byte order mark, a piece at a time; raises DataError."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if form.encoding == "utf-8" else form.encoding)()
    line, tail = 1, ""
    for chunk in itertools.chain(unpacked(path, form.packing), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            raise _not_text(error, chunk, path, form, line, tail) from None
        line, tail = line + text.count("\n"), text[-200:]
        yield text


def _not_text(error: UnicodeError, chunk: bytes, path: Path, form: FileForm, line: int, tail: str) -> DataError:
    """The error for bytes that are not in the file's encoding."""
    if not isinstance(error, UnicodeDecodeError) or form.encoding != "utf-8":
        do = "copy or make it again, or save it as UTF-8"
        return DataError(f"The data file is not {form.encoding.upper()} throughout.", where=str(path), do=do)
    where = f"{path}:{line + error.object[: error.start].count(10)}"
    if not chunk:
        what = "The data file ends inside a character: it is cut off."
        return DataError(what, where=where, do="copy or download the file again")
    where += f" (0x{error.object[error.start]:02x})"
    if not (tail + error.object[: error.start].decode("latin-1")).isascii():
        do = "correct that line: what stands before it is UTF-8, and to convert the whole file would spoil it"
        return DataError("The data file is UTF-8, except for some bytes.", where=where, do=do)
    do = "name the encoding it was saved in: safetrain validate FILE --fix OUT --encoding windows-1252"
    return DataError("The data file is not UTF-8.", where=where, do=do)


def _lines(chunks: Iterable[str]) -> Iterator[tuple[int, str | None]]:
    """Each line with its number and its end; None for a line that is too long to be kept."""
    left, number, skipped = "", 1, False
    for chunk in chunks:
        *whole, rest = (left + chunk).split("\n") if not skipped else chunk.split("\n")
        for line in whole:
            yield number, None if skipped else f"{line}\n"
            number, skipped = number + 1, False
        skipped = skipped or len(rest) > MOST_ROW_BYTES
        left = "" if skipped else rest
    if skipped or left:
        yield number, None if skipped else left


def _line_rows(lines: Iterable[tuple[int, str | None]]) -> Iterator[Placed]:
    for number, line in lines:
        if line is None:
            yield Place(number), RowError(TOO_LONG)
        elif not line.isspace():
            yield Place(number), _loaded(line)


def _loaded(line: str) -> object:
    """The value of a line. A byte order mark, left where files were joined, is passed over."""
    try:
        return load(line.lstrip("\ufeff").rstrip("\r\n"))
    except RowError as error:
        return error


def _document(first: int, parts: list[str], size: int) -> Iterator[Placed]:
    text = "".join(parts).strip("\r\n")
    if size > MOST_ROW_BYTES:
        said = (
            f"a document is longer than {MOST_ROW_BYTES // 2**20} MiB: divide it, by lines of {TEXT_END} or into files"
        )
        yield Place(first), RowError(said)
    elif text:
        yield Place(first), {"text": text}
