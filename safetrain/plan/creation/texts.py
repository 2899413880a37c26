"""The text that a tokenizer is made of: read once, of which a bounded sample stays in memory."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.decompression import HEAD_BYTES, MOST_ROW_BYTES, chunks_of, compression_of, decompressed
from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.jsonl import Fault, bad_rows, located, parse_raw
from safetrain.core.data.plain_text import PLAIN, texts_between
from safetrain.core.data.row_blocks import blocks_of
from safetrain.core.data.rows import Row, RowError
from safetrain.core.errors import DataError
from safetrain.plan.corpus_files import corpus_of
from safetrain.plan.files_by_split import data_files_of
from safetrain.plan.sources import DataFiles, suffix_of

PLAIN_BYTES = 2**16  # of a piece of plain text, to the end of its line
SAMPLE_MIB = 64


@dataclass(frozen=True)
class TextSample:
    """Some of the texts that were read, in their order; all of them where they are few."""

    texts: tuple[str, ...]
    sample_bytes: int
    total_bytes: int
    unread: tuple[str, ...] = ()  # files in the folders that look like data, and are of no split

    @property
    def is_all(self) -> bool:
        """Whether nothing was left out."""
        return self.sample_bytes == self.total_bytes


def read_sample(paths: Iterable[Path], most_bytes: int, columns: Columns | None = None) -> TextSample:
    """At most ``most_bytes`` of the texts to train on, spread evenly; raises DataError, NoRowsError.

    Each text has a number, by its place, and those with the smallest numbers stay: the same ones each time.
    """
    files = [files_with_text(path) for path in paths]
    kept, size, total, limit = list[tuple[int, int, str]](), 0, 0, 2**64
    for place, text in enumerate(text for each in files for text in texts_of(each, columns)):
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
    return TextSample(
        tuple(text for _, _, text in kept), size, total, tuple(name for each in files for name in each.unread)
    )


def files_with_text(path: Path) -> DataFiles:
    """The files of a data set as a training from scratch reads it; raises DataError."""
    if not path.exists():
        raise DataError("The text does not exist.", where=str(path), expected="a file or folder with text, or rows")
    if corpus_of(path):
        raise DataError(
            "This is a corpus of tokens: it has no text to make a tokenizer of.",
            where=str(path),
            expected="the tokenizer that the corpus was made with",
            do="safetrain create PRESET DIR --tokenizer MODEL, a model with that tokenizer",
        )
    return data_files_of(path, documents=True)


def texts_of(files: DataFiles, columns: Columns | None = None) -> Iterator[str]:
    """The texts to train on: of rows with bare text, of the messages of chats, and plain files in pieces."""
    for split, file in zip(files.names, files.paths, strict=True):
        if split == "train":
            yield from _plain(file) if suffix_of(file) in PLAIN else _of_rows(file, columns)


def _plain(path: Path) -> Iterator[str]:
    """The documents of a file of text in UTF-8, long ones some lines at a time."""
    try:
        head = next(iter(decompressed(path, "", HEAD_BYTES)), b"")
        left = b""
        for chunk in chunks_of(path, compression_of(head)):
            left += chunk
            while border := _end_of_piece(left):
                yield from texts_between(left[:border].decode("utf-8"))
                left = left[border:]
        if left:
            yield from texts_between(left.decode("utf-8"))
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
