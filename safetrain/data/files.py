"""Reads the rows of a data file: JSONL, JSON, CSV, TSV, Parquet, Arrow and plain text, compressed or not.

The format is detected from the content, not the name. Memory does not grow with the file, except for a JSON array.
"""

import codecs
import collections
import csv
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import FETCH_LFS, LFS_POINTER
from safetrain.data.forms import AS_OBJECTS, KNOWN_KEYS
from safetrain.data.json_rows import (
    MOST_ROW_BYTES,
    TOO_LONG,
    Place,
    Placed,
    RowError,
    array_rows,
    line_rows,
    load,
    shown,
)

HEAD_BYTES, CHUNK_BYTES = 64 * 1024, 2**19
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
COLUMNAR = {b"PAR1": "Parquet", b"ARROW1": "Arrow file", b"\xff\xff\xff\xff": "Arrow stream"}
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # text compresses 3 to 10 times, repeated rows 50 times
BATCH_ROWS, BATCH_BYTES = 256, 4 * 2**20  # converted to Python values at a time
JSON_CELLS = ("messages", "conversations", "conversation", "tools", "history", "functions")
ONE_LINE_EACH = "write JSON lines (one object per line), or one list of all rows"
AS_TEXT = "export its rows as JSON lines or CSV in UTF-8"
FOREIGN = (  # the first bytes of formats that are not read, their name, and the remedy
    (rb"BZh\d|\xfd7zXZ\x00|\x04\x22\x4d\x18", "compressed with bzip2, xz or LZ4", "decompress it, or use gzip or zstd"),
    (rb"PK\x03\x04|.{257}ustar", "an archive or an Office document", f"unpack it; or {AS_TEXT}"),
    (rb"\xd0\xcf\x11\xe0|%PDF", "a PDF or an old Office document", AS_TEXT),
    (rb"GGUF|.{5}\x00\x00\x00\{\"", "a model's weights", "set data.path to the training rows, model.path to the model"),
    (rb"SQLite format 3\x00|\x80[\x02-\x05]", "a database or a Python pickle", f"{AS_TEXT}; a pickle can run code"),
    (rb"\x00\x00\xfe\xff|\xff\xfe\x00\x00", "text in UTF-32", "save it in UTF-8"),
    (re.escape(LFS_POINTER), "a Git LFS pointer", FETCH_LFS),
    (rb"\s*<(?i:!doctype|html)", "a web page", "download the file itself ('raw'), not the page that shows it"),
)
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
SEPARATORS = (",", "\t", ";")
NAME = re.compile(r"\w[\w.\-/ ]*")
NO_HEADER = re.compile(r"\||^sep=")  # bars between cells, or a line that Excel writes
OF_TURNS = re.compile(r'\[\s*\{\s*"(?:role|from)"\s*:')
PLAIN = (".txt", ".text", ".md")
TEXT_END = "<|endoftext|>"  # a line with only this separates the documents in plain text


class FileForm(NamedTuple):
    """How to read a file. ``container``: JSON lines, JSON array, table, or the kind of a columnar table."""

    container: str
    separator: str = ""  # of a table
    packing: str = ""
    encoding: str = "utf-8-sig"


def rows_of(path: Path) -> Iterator[Placed]:
    """Yield the rows of ``path`` in order; raises DataError if it has none or is damaged."""
    form = recognised(path)
    if form.container in COLUMNAR.values():
        return _columnar_rows(path, form.container)
    chunks = _text_chunks(path, form)
    if form.container == "JSON array":
        return array_rows(chunks, path)
    lines = _lines(chunks, path)
    return _table_rows(lines, form.separator, path) if form.separator else line_rows(lines)


def texts_of(path: Path) -> Iterator[Placed]:
    """Yield the documents of a plain text file as rows; lines of <|endoftext|> separate them."""
    _, packing = _start(path)
    parts, size, first = list[str](), 0, 1
    lines = _lines(_text_chunks(path, FileForm("text", packing=packing)), path)
    for number, line in itertools.chain(lines, [(0, TEXT_END)]):
        if line.strip() == TEXT_END:
            document = "".join(parts).strip("\r\n")
            if document:
                yield Place(first), {"text": document}
            parts, size, first = [], 0, number + 1
        elif parts or not line.isspace():
            parts.append(line)
            size += len(line)
            if size > MOST_ROW_BYTES:
                do = f"separate the documents with {TEXT_END} lines, or split it into several files"
                raise DataError("A document is longer than 16 MiB.", where=f"{path}:{first}", do=do)
        else:
            first = number + 1


def recognised(path: Path) -> FileForm:
    """Detect the form of a file; raises DataError if it is missing or has no rows."""
    head, packing = _start(path)
    kind = next((name for magic, name in COLUMNAR.items() if head.startswith(magic)), "")
    if kind:
        return FileForm(kind)
    encoding = "utf-16" if head.startswith(WIDE) else "utf-8-sig"
    text = head.decode(encoding, errors="replace").lstrip()
    if not text and len(head) < HEAD_BYTES:
        raise no_rows(path)
    return FileForm(*_container(text, path), packing, encoding)


def no_rows(path: Path) -> DataError:
    """The error for a file without rows."""
    do = "write rows into it: JSON objects, one on each line, or a table below its header; or remove the file"
    return DataError("The data file has no rows.", where=str(path), do=do)


def _start(path: Path) -> tuple[bytes, str]:
    """Read a file's first bytes, decompressed, and its compression; raises DataError if it is not text or a table."""
    head = _head(path)
    packing = next((name for magic, name in PACKINGS.items() if head.startswith(magic)), "")
    if not packing and head.startswith(tuple(COLUMNAR)):
        return head, ""
    head = _head(path, packing) if packing else head
    causes = [(what, do) for magic, what, do in FOREIGN if re.match(magic, head, re.DOTALL)]
    if packing and head.startswith((*PACKINGS, *COLUMNAR)):
        causes = [(f"a compressed file or a binary table inside {packing}", "decompress it once")]
    elif not head.startswith(WIDE) and len(CONTROLS.findall(head)) > max(8, len(head) // 20):
        causes.append(("a binary file, or text without a byte order mark", AS_TEXT))
    if causes:
        what, do = causes[0]
        expected = "rows as JSON, CSV, TSV, Parquet or Arrow"
        raise DataError(f"The data file is {what}, not rows of text.", where=str(path), expected=expected, do=do)
    return head, packing


def _container(start: str, path: Path) -> tuple[str, str]:
    """Detect the container of the rows, and a table's separator, from the ``start`` of a file; raises DataError."""
    first, _, rest = start.partition("\n")
    where, got = f"{path}:1", shown(first.rstrip("\r"))
    if start.startswith("["):
        if OF_TURNS.match(start):
            raise DataError("The rows are lists of messages without a key.", where=where, got=got, do=AS_OBJECTS)
        return "JSON array", ""
    if start.startswith("{"):
        if rest.strip() and first.rstrip().endswith(("{", "[", ",", ":")):
            what = "The first JSON object does not end on its line: it is cut off, or spans several lines."
            raise DataError(what, where=where, do=ONE_LINE_EACH)
        return "JSON lines", ""
    separator = _separator(first.rstrip("\r"), path)
    if separator:
        return "table", separator
    if re.search(r"^\s*\{", start, re.MULTILINE):
        return "JSON lines", ""  # the reader names the lines that are not JSON
    why = "no line begins with a JSON object, and it is not a table with a header and commas, tabs or semicolons"
    raise DataError(f"The data file has no rows that can be read: {why}.", where=where, got=got, do=AS_OBJECTS)


def _separator(first: str, path: Path) -> str:
    """Find the separator of a table in its header; empty if the file is not a table."""
    is_named = any(suffix in (".csv", ".tsv") for suffix in path.suffixes) and not NO_HEADER.search(first)
    scores = {}
    for separator in SEPARATORS:
        names = [name.strip(' "') for name in first.split(separator)]
        usual_names = sum(name.casefold() in KNOWN_KEYS for name in names)
        if usual_names or is_named or (len(names) > 1 and all(map(NAME.fullmatch, names))):
            scores[separator] = (usual_names, len(names))
    return max(scores, key=lambda separator: scores[separator], default="")


# Bytes and lines


def _unpacked(path: Path, packing: str = "") -> Iterator[bytes]:
    """Yield the decompressed bytes of ``path`` in chunks; raises DataError for a zip bomb or an unreadable file."""
    if not path.is_file():
        what = "The data is not a regular file." if path.exists() else "The data file does not exist."
        raise DataError(what, where=str(path), do="correct data.path in params.yaml")
    try:
        with path.open("rb") as file:
            stream, size = _stream(file, packing), 0
            while chunk := stream.read(CHUNK_BYTES):
                size += len(chunk)
                if packing and size > BOMB_BYTES and size > BOMB_RATIO * file.tell():
                    raise _bomb(path)
                yield chunk
    except OSError as error:
        do = "copy or download it again, or export it again"
        raise DataError(f"The data file is damaged or cannot be read: {error}.", where=str(path), do=do) from None


def _stream(file: IO[bytes], packing: str) -> Any:
    if not packing:
        return file
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packing)


def _bomb(path: Path) -> DataError:
    what = f"The data file decompresses to more than {BOMB_RATIO} times its size, like a zip bomb."
    return DataError(what, where=str(path), do="do not use it; if it is yours, decompress it and use the result")


def _head(path: Path, packing: str = "") -> bytes:
    head = b""
    for chunk in _unpacked(path, packing):  # chunks of a compressed file may be small
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    return head[:HEAD_BYTES]


def _text_chunks(path: Path, form: FileForm) -> Iterator[str]:
    """Yield the text of a file in pieces, without its byte order mark; raises DataError."""
    decoder, line = codecs.getincrementaldecoder(form.encoding)(), 1
    for chunk in itertools.chain(_unpacked(path, form.packing), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            where = f"{path}:{line + error.object[: error.start].count(10)} (0x{error.object[error.start]:02x})"
            what = f"The data file is not {form.encoding.removesuffix('-sig').upper()} throughout."
            do = "correct that byte; or, if the file has another encoding, such as WINDOWS-1252, convert it: "
            do += f"iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > OUT"
            if not chunk:
                what, do = "The data file ends inside a character: it is cut off.", "copy or download the file again"
            raise DataError(what, where=where, do=do) from None
        line += text.count("\n")
        yield text


def _lines(chunks: Iterable[str], path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line with its number and its line end; raises DataError for a line that is too long."""
    rest, number = "", 1
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield number, f"{line}\n"
            number += 1
        if len(rest) > MOST_ROW_BYTES:
            raise DataError(
                f"The data cannot be read: {TOO_LONG}.", where=f"{path}:{number}", do=f"split it, or {ONE_LINE_EACH}"
            )
    if rest:
        yield number, rest


# Tables


def _table_rows(lines: Iterable[tuple[int, str]], separator: str, path: Path) -> Iterator[Placed]:
    """Yield the rows of a table with a header, except rows of empty cells."""
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader((text for _, text in lines), delimiter=separator, strict=True)
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
        do = "correct that line: quote a cell with separators, quotes or line ends, and double the quotes in it"
        where = Place(line, row + 1).of(str(path))
        raise DataError(f"The table cannot be read: {why}.", where=where, do=do) from None


def _header(cells: list[str], where: str) -> list[str]:
    """The names of the columns; raises DataError if two are the same."""
    names = [name.strip() or f"column {number}" for number, name in enumerate(cells, start=1)]
    ((name, count),) = collections.Counter(names).most_common(1)
    if count > 1:
        raise DataError(f"The table has two columns named {shown(name)}.", where=where, do="rename one")
    return names


def _table_row(names: list[str], cells: list[str]) -> object:
    if len(cells) != len(names):
        message = f"{counted(len(cells), 'cell')}, but the header has {counted(len(names), 'column')}"
        return RowError(message, do="put cells that hold a separator into quotes")
    row: dict[str, object] = {name: cell or None for name, cell in zip(names, cells, strict=True)}  # CSV has no null
    for name in JSON_CELLS:
        cell = row.get(name)
        if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
            row[name] = value = load(cell)
            if isinstance(value, RowError):
                return RowError(f"the cell {name} is not JSON: {value}")
    return row


# Parquet and Arrow


def _columnar_rows(path: Path, kind: str) -> Iterator[Placed]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream (``kind``); raises DataError."""
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(path) if kind == "Parquet" else _arrow_batches(path, kind):
            batch.validate(full=True)  # a damaged file may have wrong lengths
            times = [field.name for field in batch.schema if "[ns" in str(field.type)]  # Python lacks nanoseconds
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                for row in batch.slice(start, rows).drop_columns(times).to_pylist():
                    number += 1
                    yield Place(0, number), _plain(row)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        where, do = Place(0, number + 1).of(str(path)), "copy it or export it again"
        raise DataError(f"The table cannot be read: {shown(reason[0])}", where=where, do=do) from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        size = sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
        if size > BOMB_BYTES and size > BOMB_RATIO * path.stat().st_size:
            raise _bomb(path)
        yield from file.iter_batches(BATCH_ROWS)


def _arrow_batches(path: Path, kind: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if kind == "Arrow stream":
            yield from pyarrow.ipc.open_stream(source)
        else:
            file = pyarrow.ipc.open_file(source)
            yield from (file.get_batch(place) for place in range(file.num_record_batches))


def _plain(value: object) -> object:
    """Convert a value to JSON types: times and decimals become text, and so does UTF-8 in a column of bytes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:  # an image, or text in another encoding: no value
            return None
    return str(value)
