"""Names the files that are no text (compressed, tables, weights, archives) and what to do with each."""

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from safetrain.core.data.decompression import compression_of
from safetrain.core.errors import DataError

EXPECTED = "rows as JSON, CSV, TSV, Parquet or Arrow"
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
MOST_CONTROLS, FEW_CONTROLS = 0.05, 8


@dataclass(frozen=True)
class Foreign:
    """A kind of file that holds no rows of text: the bytes it begins with, what it is, and what to do."""

    magic: bytes
    what: str
    do: str


WEIGHTS = "data.path must name the training rows; the model belongs to model.path"
EXPORT = "save the table as 'CSV UTF-8' in the program that made it, and give that file"
TABLE_INSIDE = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
FOREIGN = (
    Foreign(b"GGUF", "a model's weights (GGUF)", WEIGHTS),
    Foreign(b"\x93NUMPY", "a NumPy array", "write the texts that it was made from, one JSON object on each line"),
    Foreign(b"\x89HDF", "an HDF5 file", "write its texts, one JSON object on each line"),
    Foreign(b"%PDF", "a PDF document", "training needs rows of text: write them, one JSON object on each line"),
    Foreign(b"\xd0\xcf\x11\xe0", "an old Office file (Excel, Word)", EXPORT),
    Foreign(b"\x04\x22\x4d\x18", "packed with LZ4", "unpack it with lz4 -d, or pack it with gzip or zstd"),
    Foreign(b"FEA1", "an old Feather table", "write it as Parquet with the program that made it, and give that file"),
)


def binary_form(head: bytes, path: Path, compression: str) -> DataError | None:
    """The error for a file that begins with ``head`` inside its ``compression`` and is no text, else None."""
    if head[257:262] == b"ustar":
        do = f"tar -xf {quote(str(path))} -C {quote(str(path.parent))}, then give the data file that was in it"
        return _error(path, "a tar archive", do)
    if compression and compression_of(head):
        return _error(path, f"packed twice, with {compression_of(head)} inside {compression}", "unpack it once")
    if compression and head.startswith(TABLE_INSIDE):
        return _error(path, f"a binary table inside {compression}", "unpack it: such tables are packed in themselves")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(head, path)
    if head.startswith(b"SQLite format 3\x00"):
        export = f"sqlite3 -csv -header {quote(str(path))} 'select * from TABLE' > rows.csv (.tables lists them)"
        return _error(path, "an SQLite database", export)
    for foreign in FOREIGN:
        if head.startswith(foreign.magic):
            return _error(path, foreign.what, foreign.do)
    return _weights(head, path)


def unknown_binary(head: bytes, path: Path) -> DataError | None:
    """The error for bytes that are neither text nor of a kind known here."""
    if len(CONTROLS.findall(head)) <= max(FEW_CONTROLS, MOST_CONTROLS * len(head)):
        return None
    start = head[:8].hex(" ")
    return _error(path, f"a binary file of a kind not known here (it begins with {start})", "give the rows as text")


def _error(path: Path, what: str, do: str) -> DataError:
    return DataError(f"The data file is {what}, not rows of text.", where=str(path), expected=EXPECTED, do=do)


def _zip(head: bytes, path: Path) -> DataError:
    if b"[Content_Types].xml" in head or b"xl/" in head:
        return _error(path, "an Office document (Excel or Word)", EXPORT)
    if b"/data.pkl" in head:
        return _error(path, "a PyTorch file", WEIGHTS)
    file, folder = quote(str(path)), quote(str(path.parent))
    return _error(path, "a zip archive", f"unzip {file} -d {folder}, then give the data file that was in it")


def _weights(head: bytes, path: Path) -> DataError | None:
    """safetensors: eight bytes of length, then a JSON object. Pickle: its protocol's number."""
    if len(head) > 9 and head[8:9] == b"{" and head[5:8] == b"\x00\x00\x00" and head[9]:
        return _error(path, "a model's weights (safetensors)", WEIGHTS)
    if len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6):
        do = "have whoever made it write JSON lines: a pickle runs code when it is opened, do not open a stranger's"
        return _error(path, "a Python pickle", do)
    return None
