"""The text that a tokenizer is made of: read once, of which a bounded sample stays in memory."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.decompression import HEAD_BYTES, MOST_ROW_BYTES, chunks_of, compression_of, decompressed
from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.jsonl import Fault, bad_rows, located, parse_raw
from safetrain.core.data.plain_text import PLAIN
from safetrain.core.data.row_blocks import blocks_of
from safetrain.core.data.rows import Row, RowError
from safetrain.core.errors import DataError
from safetrain.plan.sources import SUFFIXES, files_of, suffix_of

PLAIN_BYTES = 2**16  # of a piece of plain text, to the end of its line
SAMPLE_MIB = 64


@dataclass(frozen=True)
class TextSample:
    """Some of the texts that were read, in their order; all of them where they are few."""

    texts: tuple[str, ...]
    sample_bytes: int
    total_bytes: int

    @property
    def is_all(self) -> bool:
        """Whether nothing was left out."""
        return self.sample_bytes == self.total_bytes


def read_sample(paths: Iterable[Path], most_bytes: int, columns: Columns | None = None) -> TextSample:
    """At most ``most_bytes`` of the texts in files and folders, spread evenly; raises DataError, NoRowsError.

    Each text has a number, by its place, and those with the smallest numbers stay: the same ones each time.
    """
    kept, size, total, limit = list[tuple[int, int, str]](), 0, 0, 2**64
    for place, text in enumerate(texts_of(paths, columns)):
        length = len(text.encode("utf-8"))
        total += length
        number = int.from_bytes(hashlib.blake2b(place.to_bytes(8, "big"), digest_size=8).digest(), "big")
        if number < limit:
            kept.append((number, length, text))
            size += length
        while size > most_bytes and len(kept) > 1:
            limit //= 2
            kept = [each for each in kept if each[0] < limit] or [min(kept)]
            size = sum(length for _, length, _ in kept)
    return TextSample(tuple(text for _, _, text in kept), size, total)


def texts_of(paths: Iterable[Path], columns: Columns | None = None) -> Iterator[str]:
    """Every text of ``paths``: of rows with bare text, of the messages of chats, and plain files in pieces."""
    for path in paths:
        for file in _files(path):
            yield from _plain(file) if _is_plain(file) else _of_rows(file, columns)


def _files(path: Path) -> tuple[Path, ...]:
    """A file; of a data set its training rows; of any other folder the files with text that lie in it."""
    if not path.exists():
        raise DataError("The text does not exist.", where=str(path), expected="a file or folder with text, or rows")
    try:
        found = files_of(path)
    except DataError:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        loose = tuple(file for file in inside if file.is_file() and suffix_of(file) in (*PLAIN, *SUFFIXES))
        if not any(map(_is_plain, loose)):
            raise
        return loose
    return tuple(file for name, file in zip(found.names, found.paths, strict=True) if name == "train")


def _is_plain(path: Path) -> bool:
    return suffix_of(path) in PLAIN


def _plain(path: Path) -> Iterator[str]:
    """A file of text in UTF-8, some lines at a time."""
    try:
        head = next(iter(decompressed(path, "", HEAD_BYTES)), b"")
        left = b""
        for chunk in chunks_of(path, compression_of(head)):
            left += chunk
            while border := _end_of_piece(left):
                yield left[:border].decode("utf-8")
                left = left[border:]
        if left:
            yield left.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError("The text file is not UTF-8.", where=str(path), do="save it as UTF-8") from None


def _end_of_piece(text: bytes) -> int:
    """Behind a line, or inside one that is longer than any row may be, but not inside a character; 0: read on."""
    border = text.find(b"\n", PLAIN_BYTES) + 1
    if border or len(text) <= MOST_ROW_BYTES:
        return border
    border = MOST_ROW_BYTES
    while border > MOST_ROW_BYTES - 4 and text[border] & 0xC0 == 0x80:
        border -= 1
    return border


def _of_rows(path: Path, columns: Columns | None) -> Iterator[str]:
    for block in blocks_of(path):
        faults = list[Fault]()
        for place, raw in block.rows:
            try:
                row = parse_raw(raw, columns)
            except RowError as error:
                faults.append(located(path, place, error))
            else:
                yield from _of_row(row)
        if faults:
            raise bad_rows(faults)


def _of_row(row: Row) -> Iterator[str]:
    if row.text:
        yield row.text
    yield from (message.content for message in row.messages if message.content)
