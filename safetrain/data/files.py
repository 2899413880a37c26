"""The rows of a data file with their places: JSONL, JSON, CSV, TSV, Parquet, Arrow and plain text, packed or not.

The format is detected from the content, not the name. Memory does not grow with the file.
"""

import codecs
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.storage.files import FETCH_LFS, LFS_POINTER
from safetrain.data import containers
from safetrain.data.containers import BOMB_BYTES, BOMB_RATIO, MOST_ROW_BYTES, Place, Placed
from safetrain.data.forms import AS_OBJECTS, KNOWN_KEYS
from safetrain.data.strict_json import RowError, shown

HEAD_BYTES, CHUNK_BYTES = 64 * 1024, 2**19
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
COLUMNAR = {b"PAR1": "Parquet", b"ARROW1": "Arrow file", b"\xff\xff\xff\xff": "Arrow stream"}
EXPORT = "save the table as 'CSV UTF-8' in the program that made it, and give that file"
PICKLE = "have it written as JSON lines: a pickle runs code when it is opened, do not open a stranger's"
ONE_LINE_EACH = "jq -c . FILE > rows.jsonl; for rows under a key, such as data: jq -c '.data[]' FILE > rows.jsonl"
FOREIGN = (  # the first bytes of what is not read, what it is, what to do
    (rb"BZh\d", "packed with bzip2", "bunzip2 -k FILE, and give what it wrote; or pack it with gzip or zstd"),
    (rb"\xfd7zXZ\x00", "packed with xz", "unxz -k FILE, and give what it wrote; or pack it with gzip or zstd"),
    (rb"\x04\x22\x4d\x18", "packed with LZ4", "lz4 -d FILE, and give what it wrote; or pack it with gzip or zstd"),
    (rb"PK\x03\x04", "a zip archive or an Office document", f"unzip FILE, and give the data file in it; or {EXPORT}"),
    (rb".{257}ustar", "a tar archive", "tar -xf FILE, and give the data file that was in it"),
    (rb"\xd0\xcf\x11\xe0|%PDF", "a PDF or an old Office document", f"give its rows as text; or {EXPORT}"),
    (rb"GGUF|.{5}\x00\x00\x00\{\"", "a model's weights", "data.path names the training rows, model.path the model"),
    (rb"SQLite format 3\x00", "an SQLite database", "sqlite3 -csv -header FILE 'select * from TABLE' > rows.csv"),
    (rb"\x80[\x02-\x05]", "a Python pickle", PICKLE),
    (rb"\x00\x00\xfe\xff|\xff\xfe\x00\x00", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > rows.jsonl"),
    (re.escape(LFS_POINTER), "a pointer of Git LFS", FETCH_LFS),
    (rb"\s*<(?i:!doctype|html)", "a web page", "download the file itself ('raw'), not the page that shows it"),
)
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}
NAME = re.compile(r"\w[\w.\-/ ]*")
NO_HEADER = re.compile(r"\||^sep=")  # bars between the cells; the line that Excel writes
OF_TURNS = re.compile(r'\[\s*\{\s*"(?:role|from)"\s*:')
PLAIN = (".txt", ".text", ".md")
TEXT_END = "<|endoftext|>"  # alone on a line, it divides a file of plain text
END: tuple[int, str | None] = (0, TEXT_END)  # after the last line


@dataclass(frozen=True)
class FileForm:
    """How to read a file. ``container``: JSON lines, JSON array, table, or the kind of a columnar table."""

    container: str
    separator: str = ""  # of a table
    packing: str = ""
    encoding: str = "utf-8"
    has_mark: bool = False

    def __str__(self) -> str:
        """For the log of a repair."""
        mark = "byte order mark" if self.has_mark else ""
        parts = [self.container, SEPARATORS.get(self.separator, ""), self.packing, self.encoding.upper(), mark]
        return ", ".join(filter(None, parts))


def rows_of(path: Path) -> Iterator[Placed]:
    """The rows of ``path`` in their order; raises DataError for what holds none, and where it cannot be read on."""
    form = recognised(path)
    if form.container in COLUMNAR.values():
        return containers.columnar_rows(path, form.container)
    chunks = _text_chunks(path, form)
    if form.container == "JSON array":
        return containers.array_rows(chunks, path)
    if form.container == "table":
        return containers.table_rows(_lines(chunks), form.separator, path)
    return containers.line_rows(_lines(chunks))


def texts_of(path: Path) -> Iterator[Placed]:
    """The documents of a file of plain text as rows: the file is one, or several divided by lines <|endoftext|>."""
    head = _head(path)
    if head.startswith(LFS_POINTER):
        _refuse_foreign(head, path)
    parts, size, first = list[str](), 0, 1
    for number, line in itertools.chain(_lines(_text_chunks(path, FileForm("text", packing=_packing_of(head)))), [END]):
        text = line or ""
        if text.strip() == TEXT_END:
            document = "".join(parts).strip("\r\n")
            if size > MOST_ROW_BYTES:
                said = f"a document is longer than 16 MiB: divide it, by lines of {TEXT_END} or into files"
                yield Place(first), RowError(said)
            elif document:
                yield Place(first), {"text": document}
            parts, size, first = [], 0, number + 1
        elif parts or not text.isspace():
            size += len(text) if line is not None else MOST_ROW_BYTES + 1
            parts += [text] if size <= MOST_ROW_BYTES else []  # what is too long need not be kept
        else:
            first = number + 1


def recognised(path: Path) -> FileForm:
    """What ``path`` is; raises DataError where it is missing, or holds no rows, and NoRowsError where it is empty."""
    head = _head(path)
    packing = _packing_of(head)
    head = _head(path, packing) if packing else head
    kind = next((name for magic, name in COLUMNAR.items() if head.startswith(magic)), "")
    if kind and not packing:
        return FileForm(kind)
    is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    _refuse_foreign(head, path, packing, is_text=is_wide)
    encoding = "utf-16" if is_wide else "utf-8"
    text = head.decode(encoding, errors="replace").removeprefix("\ufeff").lstrip()
    if not text and len(head) < HEAD_BYTES:
        raise NoRowsError(path)
    container, separator = _container(text, path)
    return FileForm(container, separator, packing, encoding, is_wide or head.startswith(codecs.BOM_UTF8))


def _packing_of(head: bytes) -> str:
    return next((name for magic, name in PACKINGS.items() if head.startswith(magic)), "")


def _refuse_foreign(head: bytes, path: Path, packing: str = "", *, is_text: bool = False) -> None:
    """Raise DataError for a file that is not text."""
    found = [(what, do) for magic, what, do in FOREIGN if re.match(magic, head, re.DOTALL)]
    what, do = found[0] if found else ("", "")
    if packing and head.startswith((*PACKINGS, *COLUMNAR)):
        what, do = f"a packed file or a binary table inside {packing}", "unpack it once, and give what is inside"
    elif not what and not is_text and len(CONTROLS.findall(head)) > max(8, len(head) // 20):
        what, do = "a binary file, or text without a byte order mark", "give the rows as text in UTF-8"
    if what:
        raise DataError(
            f"The data file is {what}, not rows of text.",
            where=str(path),
            expected="rows as JSON, CSV, TSV, Parquet or Arrow",
            do=do.replace("FILE", shlex.quote(str(path))),
        )


def _container(start: str, path: Path) -> tuple[str, str]:
    """What the rows of a file with this ``start`` stand in, and the separator of a table; raises DataError."""
    first, _, rest = start.partition("\n")
    if start.startswith("["):
        if OF_TURNS.match(start):
            do = f"jq -c '{{messages: .}}' {shlex.quote(str(path))} > rows.jsonl"
            raise DataError("The rows are lists of messages without a key.", where=str(path), got=shown(first), do=do)
        return "JSON array", ""
    if start.startswith("{"):
        if rest.strip() and first.rstrip().endswith(("{", "[", ",", ":")):
            what = "The first JSON object does not end in its line: it is cut off, or goes over several lines."
            raise DataError(what, where=f"{path}:1", do=ONE_LINE_EACH.replace("FILE", shlex.quote(str(path))))
        return "JSON lines", ""
    separator = _separator(first.rstrip("\r"), path)
    if separator:
        return "table", separator
    if re.search(r"^\s*\{", start, re.MULTILINE):
        return "JSON lines", ""  # the reader names the lines that are not JSON
    said = "no line begins with a JSON object, and it is not a table with a header and commas, tabs or semicolons"
    where, got = f"{path}:1", shown(first.rstrip("\r"))
    raise DataError(f"The data file has no rows that can be read: {said}.", where=where, got=got, do=AS_OBJECTS)


def _separator(first: str, path: Path) -> str:
    """What stands between the cells of a table whose first line names them; empty where it is not a table."""
    is_named = any(suffix in (".csv", ".tsv") for suffix in path.suffixes) and not NO_HEADER.search(first)
    scores = {}
    for separator in SEPARATORS:
        names = [name.strip(' "') for name in first.split(separator)]
        known = sum(name.casefold() in KNOWN_KEYS for name in names)
        if known or is_named or (len(names) > 1 and all(map(NAME.fullmatch, names))):
            scores[separator] = (known, len(names))
    return max(scores, key=lambda separator: scores[separator], default="")


# Bytes and lines


def _unpacked(path: Path, packing: str) -> Iterator[bytes]:
    """What ``path`` holds, a chunk at a time; raises DataError for a bomb, and where it cannot be read."""
    if not path.is_file():
        what = "The data is not a regular file." if path.exists() else "The data file does not exist."
        raise DataError(what, where=str(path), do="correct data.path in params.yaml")
    try:
        with path.open("rb") as file:
            stream, size = _stream(file, packing), 0
            while chunk := stream.read(CHUNK_BYTES):
                size += len(chunk)
                if packing and size > BOMB_BYTES and size > BOMB_RATIO * file.tell():
                    raise containers.bomb(path)
                yield chunk
    except OSError as error:
        do = "copy or download it again, or make it again"
        raise DataError(f"The data file is damaged or cannot be read: {error}.", where=str(path), do=do) from None


def _stream(file: IO[bytes], packing: str) -> Any:
    if not packing:
        return file
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packing)


def _head(path: Path, packing: str = "") -> bytes:
    head = b""
    for chunk in _unpacked(path, packing):  # a compressed file may give it in small pieces
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    return head[:HEAD_BYTES]


def _text_chunks(path: Path, form: FileForm) -> Iterator[str]:
    """The text of a file without its byte order mark, a piece at a time; raises DataError."""
    decoder, line = codecs.getincrementaldecoder("utf-8-sig" if form.encoding == "utf-8" else form.encoding)(), 1
    for chunk in itertools.chain(_unpacked(path, form.packing), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            where = f"{path}:{line + error.object[: error.start].count(10)} (0x{error.object[error.start]:02x})"
            what = f"The data file is not {form.encoding.upper()} throughout."
            do = "correct that byte; or, if it is saved in another encoding, say in WINDOWS-1252, convert it: "
            do += f"iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > OUT"
            if not chunk:
                what, do = "The data file ends inside a character: it is cut off.", "copy or download the file again"
            raise DataError(what, where=where, do=do) from None
        line += text.count("\n")
        yield text


def _lines(chunks: Iterable[str]) -> Iterator[tuple[int, str | None]]:
    """Each line with its number and its end; None for a line that is too long to be kept."""
    left, number, is_skipped = "", 1, False
    for chunk in chunks:
        *whole, rest = (left + chunk).split("\n") if not is_skipped else chunk.split("\n")
        for line in whole:
            yield number, None if is_skipped else f"{line}\n"
            number, is_skipped = number + 1, False
        is_skipped = is_skipped or len(rest) > MOST_ROW_BYTES
        left = "" if is_skipped else rest
    if is_skipped or left:
        yield number, None if is_skipped else left
