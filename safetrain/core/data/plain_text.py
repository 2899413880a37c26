"""Files of plain text as documents: a file is one, and lines that say that a text ends divide it into several.

So it is with books in files of their own, and with corpora in one file (TinyStories, the samples of GPT-2).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from safetrain.core.data.decompression import HEAD_BYTES, MOST_ROW_BYTES, chunks_of, compression_of, decompressed
from safetrain.core.data.forms import not_utf8
from safetrain.core.data.places import Place
from safetrain.core.data.row_blocks import BLOCK_CHARACTERS, BLOCK_ROWS, Raw, RowBlock, Value
from safetrain.core.data.rows import RowError

PLAIN = (".txt", ".text", ".md")
SEPARATOR = "<|endoftext|>"  # alone on a line
SEPARATING = re.compile(rf"^[^\S\n]*{re.escape(SEPARATOR)}[^\S\n]*$", re.MULTILINE)
TOO_LONG = f"a document is longer than {MOST_ROW_BYTES // 2**20} MiB: divide it, by lines of {SEPARATOR} or into files"


def text_blocks(path: Path) -> Iterator[RowBlock]:
    """The documents of ``path`` as rows of bare text, each with the line that it begins in; raises DataError."""
    rows, left = list[tuple[Place, Raw]](), BLOCK_CHARACTERS
    for line, text in _documents(path):
        rows.append((Place(line), RowError(TOO_LONG) if text is None else Value({"text": text})))
        left -= len(text or "")
        if len(rows) == BLOCK_ROWS or left <= 0:
            yield RowBlock(tuple(rows))
            rows, left = [], BLOCK_CHARACTERS
    yield RowBlock(tuple(rows))


def texts_between(piece: str) -> Iterator[str]:
    """The texts of some whole lines of such a file, without the lines that divide them."""
    return (text for text in SEPARATING.split(piece) if text.strip())


def _documents(path: Path) -> Iterator[tuple[int, str | None]]:
    """Each text that is not blank, and its first line; None for one that is too long."""
    parts, size, first = list[str](), 0, 1
    for number, line in enumerate(_lines(path), start=1):
        if line.strip() == SEPARATOR:
            yield from _document(first, parts, size)
            parts, size, first = [], 0, number + 1
        elif parts or not line.isspace():
            size += len(line)
            parts += [line] if size <= MOST_ROW_BYTES else []  # what is too long need not be kept
        else:
            first = number + 1
    yield from _document(first, parts, size)


def _document(first: int, parts: list[str], size: int) -> Iterator[tuple[int, str | None]]:
    if size:
        yield first, "".join(parts).strip("\r\n") if size <= MOST_ROW_BYTES else None


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends; of the last one there may be none."""
    head = next(iter(decompressed(path, "", HEAD_BYTES)), b"")
    left, number = b"", 1
    for chunk in chunks_of(path, compression_of(head)):
        *whole, left = (left + chunk).split(b"\n")
        for line in whole:
            yield _decoded(line + b"\n", path, number)
            number += 1
    if left:
        yield _decoded(left, path, number)


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(line, error, path, number) from None
