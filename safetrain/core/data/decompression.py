"""The bytes of a data file as UTF-8 text, whatever its compression and encoding. Memory does not grow with the file."""

import bz2
import codecs
import gzip
import importlib
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from safetrain.core.errors import DataError

CHUNK_BYTES = 2**19
HEAD_BYTES = 64 * 1024
MOST_ROW_BYTES = 16 * 2**20  # of one row: some four million tokens, more than any model's context
BOMB_BYTES, BOMB_RATIO = 64 * 2**20, 200  # texts are compressed to a third or a tenth, repeated rows to a fiftieth
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSIONS = {  # the bytes that a compressed file begins with
    "gzip": b"\x1f\x8b",
    "Zstandard": b"\x28\xb5\x2f\xfd",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
}


def compression_of(head: bytes) -> str:
    """The name of how a file that begins with ``head`` is compressed; empty where it is not."""
    return next((name for name, magic in COMPRESSIONS.items() if head.startswith(magic)), "")


def chunks_of(path: Path, compression: str, encoding: str = "utf-8") -> Iterator[bytes]:
    """The text of ``path`` in UTF-8, without a byte order mark; raises DataError for what cannot be decompressed."""
    chunks = decompressed(path, compression)
    return _without_mark(chunks if encoding == "utf-8" else _recoded(chunks, encoding, path))


def decompressed(path: Path, compression: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """What ``path`` holds, at most ``size`` bytes at a time; raises DataError for a bomb and for a damaged file."""
    with opened(path) as file:
        stream, errors = _decompressor(file, compression, path)
        done = 0
        while True:
            try:
                chunk = stream.read(size)
            except EOFError:
                raise _damaged(path, f"it ends inside its {compression} data: it is cut off") from None
            except errors as error:
                raise _damaged(path, f"{compression or 'the disk'} says: {error}") from None
            if not chunk:
                return
            done += len(chunk)
            if compression and done > BOMB_BYTES and done > BOMB_RATIO * file.tell():
                raise DataError(
                    f"The data file unpacks to more than {BOMB_RATIO} times its size: that is no text, but a bomb.",
                    where=str(path),
                    do="do not use it; if it is yours, unpack it yourself and give that file",
                )
            yield chunk


def opened(path: Path) -> IO[bytes]:
    """The file, to be read; raises DataError."""
    try:
        if path.exists() and not path.is_file():
            raise DataError("The data is no regular file.", where=str(path), do="name a file of rows")
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(
            "The data file does not exist.", where=str(path), do="correct data.path in params.yaml"
        ) from None
    except OSError as error:
        raise DataError(f"The data file cannot be read: {error.strerror}.", where=str(path)) from None


def _decompressor(file: IO[bytes], compression: str, path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """What reads the compressed file, and the errors that it raises."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file), (OSError, zlib.error)
    if compression == "bzip2":
        return bz2.BZ2File(file), (OSError, ValueError)
    if compression == "xz":
        return lzma.LZMAFile(file), (OSError, lzma.LZMAError)
    if compression == "Zstandard":
        zstd = _zstd(path)
        return zstd.ZstdFile(file), (OSError, zstd.ZstdError)
    return file, (OSError,)


def _zstd(path: Path) -> ModuleType:
    """Python's own from 3.14 on, else its backport."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise missing_library(path, "packed with Zstandard", "zstd")


def missing_library(path: Path, what: str, extra: str) -> DataError:
    """The error for a file that needs an optional library."""
    install = f"pip install --constraint constraints.txt --editable '.[{extra}]'"
    return DataError(
        f"The data file is {what}, and the library that reads it is not installed.",
        where=str(path),
        do=f"{install}, in safetrain's folder and environment (with uv: uv {install})",
    )


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"The data file is damaged: {why}.", where=str(path), do="copy or download it again, or make it again"
    )


def _recoded(chunks: Iterator[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for chunk in chunks:
            yield decoder.decode(chunk).encode("utf-8")
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else "a half character"
        raise DataError(
            f"The data file is not {encoding.upper()} throughout: {reason}.",
            where=str(path),
            do="copy or make it again, or save it as UTF-8",
        ) from None


def _without_mark(chunks: Iterator[bytes]) -> Iterator[bytes]:
    start = b""
    for chunk in chunks:
        start += chunk
        if len(start) >= len(BYTE_ORDER_MARK):
            break
    yield start.removeprefix(BYTE_ORDER_MARK)
    yield from chunks
