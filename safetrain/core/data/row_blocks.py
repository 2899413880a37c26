"""The rows of any data file, some hundred at a time: what each says, and its line or place."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.decompression import MOST_ROW_BYTES, chunks_of
from safetrain.core.data.forms import Container, FileForm, not_utf8, recognised
from safetrain.core.data.json_values import Beside, Placed, array_of, objects_of, rows_inside
from safetrain.core.data.places import Place
from safetrain.core.data.strict_json import TOO_LONG, RowError
from safetrain.core.data.tables import column_rows, csv_rows
from safetrain.core.errors import DataError

BLOCK_ROWS = 512
BLOCK_CHARACTERS = 2**20  # a block ends with the row that passes it


@dataclass(frozen=True, slots=True)
class Value:
    """A row that is decoded already."""

    value: object


Raw = str | Value | RowError  # the text of a line, a value, or why there is none


@dataclass(frozen=True)
class RowBlock:
    """Rows that stand together: where each does, and what is there. ``beside``: keys around them that nothing reads."""

    rows: tuple[tuple[Place, Raw], ...]
    beside: tuple[str, ...] = ()


def blocks_of(path: Path, encoding: str | None = None) -> Iterator[RowBlock]:
    """The rows of ``path`` in their order; raises DataError for what holds none, and where it cannot be read on.

    ``encoding`` is what somebody says it was saved in; None: what is recognised.
    """
    form = recognised(path, encoding)
    if form.container == Container.LINES:
        return _line_blocks(_chunks(form, path), path)
    return _value_blocks(_values(form, path))


def _chunks(form: FileForm, path: Path) -> Iterator[bytes]:
    chunks = chunks_of(path, form.compression, form.encoding)
    return (chunk.replace(b"\r", b"\n") for chunk in chunks) if form.old_line_ends else chunks


def _values(form: FileForm, path: Path) -> Iterator[Placed]:
    if form.container == Container.COLUMNS:
        return column_rows(path, form.detail)
    chunks = _chunks(form, path)
    if form.container == Container.ARRAY:
        return array_of(chunks, path)
    if form.container == Container.INSIDE:
        return rows_inside(chunks, path, form.detail)
    if form.container == Container.OBJECTS:
        return objects_of(chunks, path)
    return csv_rows(_table_lines(chunks, path), form.detail, path)


def _value_blocks(values: Iterator[Placed]) -> Iterator[RowBlock]:
    rows, left, beside = list[tuple[Place, Raw]](), BLOCK_CHARACTERS, tuple[str, ...]()
    for place, value in values:
        if isinstance(value, Beside):
            beside = value.keys
            continue
        rows.append((place, value if isinstance(value, RowError) else Value(value)))
        left -= _characters(value)
        if len(rows) == BLOCK_ROWS or left <= 0:
            yield RowBlock(tuple(rows))
            rows, left = [], BLOCK_CHARACTERS
    yield RowBlock(tuple(rows), beside)


def _characters(value: object) -> int:
    """Of all texts in it, about."""
    found, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        found += 8
    return found


def _line_blocks(chunks: Iterator[bytes], path: Path) -> Iterator[RowBlock]:
    for first, content in _whole_lines(chunks):
        if content is None:
            yield RowBlock(((Place(first), RowError(TOO_LONG)),))
            continue
        lines = enumerate(_decoded(content, path, first).split("\n"), start=first)
        yield RowBlock(tuple((Place(number), text) for number, text in lines if text and not text.isspace()))


def _table_lines(chunks: Iterator[bytes], path: Path) -> Iterator[str]:
    for first, content in _whole_lines(chunks):
        if content is None:
            raise DataError(f"The table cannot be read on: {TOO_LONG}.", where=f"{path}:{first}")
        for line in _decoded(content, path, first).removesuffix("\n").split("\n"):
            yield f"{line}\n"


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Lines that stand together and the number of the first; None for a line that is too long to be kept."""
    first, left, skipped = 1, b"", False
    for chunk in chunks:
        content = left + chunk
        border = content.rfind(b"\n") + 1
        if not border:
            skipped = skipped or len(content) > MOST_ROW_BYTES
            left = b"" if skipped else content
            continue
        left = content[border:]
        if skipped:
            yield first, None
            start, first, skipped = content.find(b"\n") + 1, first + 1, False
            content, border = content[start:], border - start
        if border:
            yield first, content[:border]
            first += content.count(b"\n", 0, border)
    if skipped:
        yield first, None
    elif left:
        yield first, left


def _decoded(content: bytes, path: Path, first: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(content, error, path, first) from None
