"""Reads the rows of a data file: JSONL, JSON, CSV, TSV, Parquet, Arrow and plain text, compressed or not.

The format is detected from the content, not the name. Memory does not grow with the file, except for a JSON array.
"""

import codecs
import collections
import contextlib
import csv
import io
import itertools
import json
import re
import shlex
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from safetrain.core.errors import DataError
from safetrain.core.foreign import first_line, limited
from safetrain.core.formatting import counted
from safetrain.core.storage.files import FETCH_LFS, LFS_POINTER
from safetrain.core.text.tokenizer import MOST_TEXT
from safetrain.data.findings import Place
from safetrain.data.folders import PLAIN, suffix_of
from safetrain.data.forms import AS_OBJECTS, KNOWN_KEYS
from safetrain.data.rows import Row, RowError, load, object_of, parsed, said_of, shown, value_at

Placed = tuple[Place, object]  # the place of a row, and its value, its RowError, or a document as a Row
MOST_ROW_BYTES = MOST_TEXT  # of a row in a file
MOST_ARRAY = 2**30  # characters
TOO_LONG = "a row is longer than 6 MiB, which is beyond any model's context"
TOKENS = ".ds"  # of token files, which earlier versions read
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # text compresses 3 to 10 times, repeated rows 50 times
BATCH_ROWS = 64  # rows to read from Parquet at a time
MOST_EQUAL_ROWS = 2**17  # beyond, a table with more rows than bytes is refused: it has hardly any text
ONE_LINE_EACH = "write JSON lines (one object per line), or one list of all rows"
BINARY = re.compile(  # PDF, zip, pickle, safetensors, UTF-32
    rb"%PDF|PK\x03\x04|\x80[\x02-\x05]|.{5}\x00\x00\x00\{|\xff\xfe\x00\x00", re.DOTALL
)
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # many of these: a binary file that BINARY does not name
NAME = re.compile(r"\w[\w.\-/ ]*")
BEFORE = re.compile(r"\s*\[\s*(?P<end>\]\s*\Z)?")  # text before an array's first value
AFTER = re.compile(r"\s*(?:,\s*|(?P<end>\]\s*\Z))")  # text after each value
TEXT_END = "<|endoftext|>"  # a line with only this separates the documents in plain text


def rows_of(path: Path, *, documents: bool = False) -> Iterator[Placed]:
    """Yield the rows of ``path`` in order; raises DataError if the file has no rows or is damaged.

    With ``documents``, a plain text file is read as documents.
    """
    place = None
    for place, value in _texts(path) if documents and suffix_of(path) in PLAIN else _rows(path):
        yield place, value
    if place is None:
        do = "write rows into it: JSON objects, one on each line, or a table with a header; or remove the file"
        raise DataError("The data file has no rows.", where=path, do=do)


def texts_at(path: Path, places: Container[Place], most: int) -> dict[Place, str]:
    """The first ``most`` characters of the rows at ``places``; of a row that cannot be read, its line as it is."""
    found = {place: value for place, value in rows_of(path, documents=True) if place in places}
    lines, encoding = {place.line for place, value in found.items() if isinstance(value, RowError)}, _start(path)[1]
    raw = dict(each for each in enumerate(_lines(path, encoding), 1) if each[0] in lines) if lines and encoding else {}
    texts = dict[Place, str]()
    for place, value in found.items():
        value = value.as_json() if isinstance(value, Row) else value
        is_error = isinstance(value, RowError)
        texts[place] = raw.get(place.line, "") if is_error else json.dumps(value, ensure_ascii=False, default=str)
    return {place: text if len(text) <= most else f"{text[:most]} …" for place, text in texts.items()}


def _rows(path: Path) -> Iterator[Placed]:
    head, encoding = _start(path)
    if not encoding:
        return _columnar_rows(path, head)
    start = head.decode(encoding, errors="replace").lstrip()
    first, _, rest = start.partition("\n")
    is_open = first.rstrip().endswith(("{", "[", ",", ":")) and not first.rstrip().endswith("},")
    if start.startswith("{") and rest.strip() and is_open:
        what = "The first JSON object does not end on its line: it is cut off, or spans several lines."
        raise DataError(what, where=f"{path}:1", do=ONE_LINE_EACH)
    if start.startswith("["):
        return _array_rows(_lines(path, encoding, in_pieces=True), path)
    separator = "" if start.startswith("{") or not start else _separator(start, first.rstrip("\r"), path)
    lines = _lines(path, encoding)
    return _table_rows(lines, separator, path) if separator else _line_rows(lines)


def _texts(path: Path) -> Iterator[Placed]:
    """Yield the documents of a plain text file as rows; lines of <|endoftext|> separate them."""
    parts, size, first = list[str](), 0, 1
    lines = _lines(path, _start(path)[1] or "utf-8-sig")
    for number, line in enumerate(itertools.chain(lines, [TEXT_END]), start=1):
        if line.strip() == TEXT_END:
            document = "".join(parts).strip("\r\n")
            if document:
                yield Place(first), Row("text", text=document)
            parts, size, first = [], 0, number + 1
        elif parts or not line.isspace():
            parts.append(line)
            size += len(line)
            if size > MOST_ROW_BYTES:
                do = f"separate the documents with {TEXT_END} lines, or split this one"
                raise DataError("A document is longer than 6 MiB.", where=f"{path}:{first}", do=do)
        else:
            first = number + 1


def _start(path: Path) -> tuple[bytes, str]:
    """A file's first bytes, decompressed, and its encoding ("" for Parquet and Arrow); raises DataError if not text."""
    with _opened(path) as stream:
        head = stream.read(64 * 1024)
    if head.startswith((PARQUET, ARROW, ARROW_STREAM)):
        return head, ""
    is_wide = head.startswith(WIDE)
    if head.startswith(LFS_POINTER):
        what, do = "a Git LFS pointer", FETCH_LFS
    elif suffix_of(path) == TOKENS:
        what, do = "a token file", "token files are no longer read; give the text itself (.jsonl, .parquet, .txt)"
    elif BINARY.match(head) or (not is_wide and len(CONTROLS.findall(head)) > max(8, len(head) // 20)):
        what = "a binary file, an archive, or UTF-16 text without a byte order mark"
        do = "unpack it, or export its rows as JSON lines or CSV in UTF-8"
        if head.startswith(b"PK") and b"xl/" in head:
            what, do = "an Excel file", "save it as CSV (UTF-8)"
    else:
        return head, "utf-16" if is_wide else "utf-8-sig"
    expected = "rows as JSON, CSV, TSV, Parquet or Arrow"
    raise DataError(f"The data file is {what}, not rows of text.", where=path, expected=expected, do=do)


def _separator(start: str, first: str, path: Path) -> str:
    """Find the separator of a table in its header; empty for JSON lines. Raises DataError if the file is neither."""
    is_named = any(suffix in (".csv", ".tsv") for suffix in path.suffixes)
    scores = {}
    for separator in (",", "\t", ";"):
        names = [name.strip(' "') for name in first.split(separator)]
        usual_names = sum(name.casefold() in KNOWN_KEYS for name in names)
        if usual_names or is_named or (len(names) > 1 and all(map(NAME.fullmatch, names))):
            scores[separator] = (usual_names, len(names))
    if not scores and not re.search(r"^\s*\{", start, re.MULTILINE):
        raise DataError(
            "The data file is neither JSON lines nor a table with a header and commas, tabs or semicolons.",
            where=f"{path}:1", got=shown(first), do=AS_OBJECTS,
        )  # fmt: skip
    return max(scores, key=scores.__getitem__, default="")


# Bytes and lines


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file as a stream of its decompressed bytes; raises DataError if it is missing or cannot be read."""
    if not path.is_file():
        what = "The data file does not exist, or is not a regular file."
        raise DataError(what, where=path, do="correct data.path in params.yaml")
    try:
        with path.open("rb") as file:
            packing = next((name for magic, name in PACKINGS.items() if file.peek(4).startswith(magic)), "")
            if packing:
                import pyarrow

                stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packing)
                yield io.BufferedReader(stream)
            else:
                yield file
    except OSError as error:
        do = "copy or download it again, or export it again"
        raise DataError(f"The data file is damaged or cannot be read: {error}.", where=path, do=do) from None


def _lines(path: Path, encoding: str, *, in_pieces: bool = False) -> Iterator[str]:
    """Yield each line with its line end; with ``in_pieces``, split lines longer than 6 MiB. Raises DataError."""
    number, size = 1, 0
    try:
        with _opened(path) as stream, io.TextIOWrapper(stream, encoding, newline="\n") as text:
            most_size = max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size)
            while line := text.readline(MOST_ROW_BYTES + 1):
                size += len(line)
                if size > most_size:
                    what = f"The data file decompresses to more than {BOMB_RATIO} times its size, like a zip bomb."
                    do = "do not use it; if it is yours, decompress it and use the result"
                    raise DataError(what, where=path, do=do)
                if len(line) > MOST_ROW_BYTES and not in_pieces:
                    what, where = f"The data cannot be read: {TOO_LONG}.", f"{path}:{number}"
                    raise DataError(what, where=where, do=f"split it, or {ONE_LINE_EACH}")
                yield line
                number += line.endswith("\n")
    except UnicodeDecodeError as error:
        where = f"{path}:{number + error.object[: error.start].count(10)} (0x{error.object[error.start]:02x})"
        what = f"The data file is not {encoding.removesuffix('-sig').upper()} throughout."
        do = "correct that byte, or copy the file again if it was cut off there; for another encoding, such as "
        do += f"WINDOWS-1252: iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > OUT"
        raise DataError(what, where=where, do=do) from None


# JSON


def _line_rows(lines: Iterable[str]) -> Iterator[Placed]:
    """Yield the values of JSON lines. Byte order marks, left where files were joined, are skipped."""
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            yield Place(number), load(line.lstrip("\ufeff").rstrip("\r\n"))


def _array_rows(pieces: Iterable[str], path: Path) -> Iterator[Placed]:
    """Yield the values of one JSON array, whose text is held in memory; raises DataError."""
    whole = io.StringIO()
    for piece in pieces:
        whole.write(piece)
        if whole.tell() > MOST_ARRAY:
            do = "write JSON lines (one object per line), which may be of any length"
            raise DataError("The JSON array is longer than 1 GiB.", where=path, do=do)
    text, between, line, row, at = whole.getvalue(), BEFORE, 1, 0, 0
    try:
        while True:
            mark = between.match(text, at)
            if mark is None:
                raise json.JSONDecodeError("expected a comma, or the end of the array and the file", text, at)
            if mark["end"]:
                return
            start = mark.end()
            value, end = value_at(text, start)
            row, first = row + 1, line + text.count("\n", at, start)
            yield Place(first, row), RowError(TOO_LONG) if end - start > MOST_ROW_BYTES else value
            between, line, at = AFTER, first + text.count("\n", start, end), end
    except (ValueError, RecursionError) as error:
        fault = getattr(error, "pos", at)
        where = Place(1 + text.count("\n", 0, fault), row + 1).of(str(path))
        what, got = f"The JSON array cannot be read: {said_of(error)}.", shown(text[fault : fault + 99].lstrip())
        do = "correct it there; if the file is cut off, copy or download it again"
        raise DataError(what, where=where, got=got, do=do) from None


# Tables


def _table_rows(lines: Iterable[str], separator: str, path: Path) -> Iterator[Placed]:
    """Yield the rows of a table with a header, except rows whose cells are all empty."""
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    names, line, row = list[str](), 1, 0
    try:
        for cells in reader:
            begin, line = line, reader.line_num + 1
            if not any(map(str.strip, cells)):
                continue
            if names:
                row += 1
                yield Place(begin, row), _table_row(names, cells)
            else:
                names = [name.strip() or f"column {number}" for number, name in enumerate(cells, start=1)]
                _require_different(names, f"{path}:{begin}")
    except csv.Error as error:
        do = "correct that line: quote a cell with separators, quotes or line ends, and double the quotes in it"
        where = Place(line, row + 1).of(str(path))
        raise DataError(f"The table cannot be read: {error}.", where=where, do=do) from None


def _table_row(names: list[str], cells: list[str]) -> object:
    if len(cells) != len(names):
        message = f"{counted(len(cells), 'cell')}, but the header has {counted(len(names), 'column')}"
        return RowError(message, do="put cells that hold a separator into quotes")
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}  # CSV has no null


def _require_different(names: list[str], where: str) -> None:
    """Raise DataError if two columns have the same name."""
    ((name, count),) = collections.Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise DataError(f"The table has two columns named {shown(name)}.", where=where, do="rename one")


def _columnar_rows(path: Path, head: bytes) -> Iterator[Placed]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream; raises DataError."""
    import pyarrow

    number, room = 0, max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size)
    try:
        for batch in _batches(path, head):
            batch.validate(full=True)  # a damaged file may have wrong lengths
            names, classes = batch.schema.names, _class_names(batch.schema)
            _require_different(names, str(path))
            for cells in zip(*batch.columns, strict=True):
                number += 1
                try:
                    values = dict(zip(names, map(_value_of, cells, names), strict=True))
                    row: object = values | {name: _class_of(values[name], classes[name]) for name in classes}
                except RowError as error:
                    row = error
                characters = len(str(row))
                row, room = RowError(TOO_LONG) if characters > MOST_ROW_BYTES else row, room - characters
                if room < 0:
                    raise ValueError(f"it unpacks to more than {BOMB_RATIO} times its size, like a zip bomb")
                yield Place(0, number), row
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, MemoryError) as error:
        where, do = Place(0, number + 1).of(str(path)), "copy it or export it again"
        raise DataError(f"The table cannot be read: {shown(first_line(error))}", where=where, do=do) from None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The names of the classes of each column with numbers of classes, which the library datasets saves with them."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        labels = {name: each for name, each in features.items() if each.get("_type") == "ClassLabel"}
        return {name: list(map(str, each["names"])) for name, each in labels.items() if name in schema.names}
    except (ValueError, LookupError, AttributeError, TypeError):  # not written by datasets
        return {}


def _class_of(number: object, names: list[str]) -> object:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else number


def _batches(path: Path, head: bytes) -> Iterator[Any]:
    """Read a table in batches; raises MemoryError for one that unpacks to more than a model's data can be."""
    import pyarrow
    from pyarrow import parquet

    with pyarrow.OSFile(str(path)) as source:  # not mapped: a file that is cut off meanwhile would be a signal
        if head.startswith(PARQUET):
            batches = parquet.ParquetFile(source).iter_batches(BATCH_ROWS, use_threads=False)
        elif head.startswith(ARROW):
            file = pyarrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(source))
        rows, most = 0, max(MOST_EQUAL_ROWS, path.stat().st_size)
        while True:
            with limited(seconds=60):
                batch = next(batches, None)
            if batch is None:
                return
            rows += batch.num_rows
            if rows > most:
                raise ValueError("it has more rows than bytes, so there is hardly any text in them")
            yield batch


def _value_of(cell: Any, column: str) -> object:
    """Convert a pyarrow scalar to the value that JSON lines would have; raises RowError for a cell that is not JSON.

    A struct has the fields of all rows, so its nulls are fields that this row lacks. The nulls of a map or of JSON
    text are values.
    """
    import pyarrow

    if not cell.is_valid:
        return None
    if isinstance(cell, pyarrow.StructScalar):
        fields = ((name, _value_of(field, column)) for name, field in cell.items())
        return object_of([(name, value) for name, value in fields if value is not None])
    if isinstance(cell, pyarrow.MapScalar):
        return object_of([(str(_value_of(entry[0], column)), _value_of(entry[1], column)) for entry in cell.values])
    if isinstance(cell, pyarrow.ListScalar):
        return [_value_of(item, column) for item in cell.values]
    if isinstance(cell, pyarrow.JsonScalar):
        return parsed(cell.as_py(), column)
    wrapped = (pyarrow.DictionaryScalar, pyarrow.RunEndEncodedScalar, pyarrow.ExtensionScalar, pyarrow.UnionScalar)
    return _value_of(cell.value, column) if isinstance(cell, wrapped) else _plain_value(cell)


def _plain_value(cell: Any) -> object:
    """Convert a scalar that has no parts. Times and decimals become text; bytes are UTF-8 text or null."""
    try:
        value = cell.as_py()
    except (ValueError, OverflowError):  # Python's times lack nanoseconds and most years
        value = cell.cast("string").as_py()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:  # an image, or text in another encoding: no value
            return None
    if isinstance(value, float) and cell.type.bit_width < 64:
        return float(str(np.float32(value)))  # 0.1, not 0.10000000149011612
    return value if isinstance(value, str | int | float) else str(value)
