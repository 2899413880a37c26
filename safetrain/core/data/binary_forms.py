"""Names the files that are no text (compressed, tables, weights, archives) and what to do with each."""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from safetrain.core.data.conversion import command, python_command
from safetrain.core.errors import DataError

EXPECTED = "a UTF-8 text file with one JSON object on each line"
ARROW = (  # begins with, is, suffix, module, how its rows are read
    (b"PAR1", "a Parquet table", ".parquet", "pyarrow.parquet",
     "for t in p.ParquetFile(a).iter_batches() for r in t.to_pylist()"),
    (b"ARROW1", "an Arrow (Feather) table", ".arrow", "pyarrow.ipc", "for r in p.open_file(a).read_all().to_pylist()"),
    (b"\xff\xff\xff\xff", "an Arrow stream (datasets' save_to_disk)", ".arrow", "pyarrow.ipc",
     "for t in p.open_stream(a) for r in t.to_pylist()"),
)  # fmt: skip
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
MOST_CONTROLS = 0.05


@dataclass(frozen=True)
class Packed:
    """A way of compressing one file: the bytes it begins with, its name, its usual suffix, and what undoes it."""

    magic: bytes
    name: str
    suffix: str
    tool: str


@dataclass(frozen=True)
class Foreign:
    """A kind of file that holds no rows of text: the bytes it begins with, what it is, and what to do."""

    magic: bytes
    what: str
    do: str


PACKED = (
    Packed(b"\x1f\x8b", "gzip", ".gz", "gunzip"),
    Packed(b"\x28\xb5\x2f\xfd", "Zstandard", ".zst", "zstd -d"),
    Packed(b"BZh", "bzip2", ".bz2", "bunzip2"),
    Packed(b"\xfd7zXZ\x00", "xz", ".xz", "xz -d"),
    Packed(b"\x04\x22\x4d\x18", "LZ4", ".lz4", "lz4 -d"),
)
WEIGHTS = "data.path must name the training rows; the model belongs to model.path"
EXPORT = (
    "save the table as 'CSV UTF-8' in the program that made it, and give that file: the command for it will be told"
)
FOREIGN = (
    Foreign(b"GGUF", "a model's weights (GGUF)", WEIGHTS),
    Foreign(b"\x93NUMPY", "a NumPy array", "write the texts that it was made from, one JSON object on each line"),
    Foreign(b"\x89HDF", "an HDF5 file", "write its texts, one JSON object on each line"),
    Foreign(b"%PDF", "a PDF document", "training needs rows of text: write them, one JSON object on each line"),
    Foreign(b"\xd0\xcf\x11\xe0", "an old Office file (Excel, Word)", EXPORT),
    Foreign(b"FEA1", "an old Feather table", "write it as Parquet with the program that made it, and give that file"),
)


def binary_form(head: bytes, path: Path) -> DataError | None:
    """The error for a file that begins with ``head`` and is no text; None where it may be one."""
    for packed in PACKED:
        if head.startswith(packed.magic):
            return _packed(head, path, packed)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(head, path)
    for foreign in FOREIGN:
        if head.startswith(foreign.magic):
            return _error(path, foreign.what, foreign.do)
    return _table(head, path) or _weights(head, path)


def unknown_binary(head: bytes, path: Path) -> DataError | None:
    """The error for bytes that are neither text nor of a kind known here."""
    if len(CONTROLS.findall(head)) <= MOST_CONTROLS * len(head):
        return None
    start = head[:8].hex(" ")
    return _error(path, f"a binary file of a kind not known here (it begins with {start})", "give the rows as text")


def _error(path: Path, what: str, do: str) -> DataError:
    return DataError(f"The data file is {what}, not rows of text.", where=str(path), expected=EXPECTED, do=do)


def _packed(head: bytes, path: Path, packed: Packed) -> DataError:
    if path.name.lower().endswith((".tar" + packed.suffix, ".tgz")) or (packed.suffix == ".gz" and _holds_tar(head)):
        unpack = f"tar -xf {quote(str(path))} -C {quote(str(path.parent))}, then give the .jsonl file that was in it"
        return _error(path, f"a tar archive, compressed with {packed.name}", unpack)
    do = command(path, packed.suffix, f"{packed.tool} < {{old}} > {{new}}")
    return _error(path, f"compressed with {packed.name}", do)


def _holds_tar(head: bytes) -> bool:
    try:
        return zlib.decompressobj(31).decompress(head, 512)[257:262] == b"ustar"
    except zlib.error:
        return False


def _zip(head: bytes, path: Path) -> DataError:
    if b"[Content_Types].xml" in head or b"xl/" in head:
        return _error(path, "an Office document (Excel or Word)", EXPORT)
    if b"/data.pkl" in head:
        return _error(path, "a PyTorch file", WEIGHTS)
    file, folder = quote(str(path)), quote(str(path.parent))
    return _error(path, "a zip archive", f"unzip {file} -d {folder}, then give the .jsonl file that was in it")


def _table(head: bytes, path: Path) -> DataError | None:
    """Parquet, Arrow and SQLite."""
    for magic, what, suffix, module, program in ARROW:
        if head.startswith(magic):
            return _error(path, what, _with_pyarrow(python_command(path, suffix, program), module))
    if head.startswith(b"SQLite format 3\x00"):
        file = quote(str(path))
        export = f"sqlite3 -json {file} 'select * from TABLE' | jq -c '.[]' > rows.jsonl"
        return _error(path, "an SQLite database", f"find the table with: sqlite3 {file} .tables, then: {export}")
    return None


def _with_pyarrow(text: str, module: str) -> str:
    """Times and decimals, which JSON has not, become texts."""
    text = text.replace("import json,sys;", f"import json,sys,{module} as p;")
    return "pip install pyarrow, then: " + text.replace("ensure_ascii=False)", "ensure_ascii=False,default=str)")


def _weights(head: bytes, path: Path) -> DataError | None:
    """safetensors: eight bytes of length, then a JSON object. Pickle: its protocol's number."""
    if len(head) > 9 and head[8:9] == b"{" and head[5:8] == b"\x00\x00\x00":
        return _error(path, "a model's weights (safetensors)", WEIGHTS)
    if len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6):
        do = "have whoever made it write JSON lines: a pickle runs code when it is opened, do not open a stranger's"
        return _error(path, "a Python pickle", do)
    return None
