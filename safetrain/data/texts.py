"""The texts of a data set, for a tokenizer to be made of: bare texts, messages of chats, plain files in pieces."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetrain.core.errors import DataError
from safetrain.data.containers import TOO_LONG
from safetrain.data.corpus import corpus_of
from safetrain.data.files import PLAIN, TEXT_END, rows_of, text_lines
from safetrain.data.findings import Spot
from safetrain.data.folders import data_files_of, suffix_of
from safetrain.data.forms import Columns, parse_row
from safetrain.data.strict_json import RowError
from safetrain.data.tokenize import Fault, bad_rows

PIECE_CHARACTERS = 2**16  # of plain text, to the end of its line


def training_texts(paths: Iterable[Path], columns: Columns | None, say: Callable[[str], None]) -> Iterator[str]:
    """Every text to train on in some files and folders; raises DataError, NoRowsError.

    ``say`` is told of files in the folders that look like data and are of no split.
    """
    for source in paths:
        if not source.exists():
            expected = "a file or folder with text, or rows"
            raise DataError("The text does not exist.", where=str(source), expected=expected)
        if corpus_of(source):
            raise DataError(
                "This is a corpus of tokens: it has no text to make a tokenizer of.",
                where=str(source),
                expected="the tokenizer that the corpus was made with",
                do="safetrain create PRESET DIR --tokenizer MODEL, a model with that tokenizer",
            )
        files = data_files_of(source, documents=True)
        if files.unread:
            more = f" and {len(files.unread) - 1} more" if len(files.unread) > 1 else ""
            say(f"{files.unread[0]}{more} in {source} is not read: its name says no split")
        for split, path in zip(files.names, files.paths, strict=True):
            if split == "train":
                yield from _of_plain_text(path) if suffix_of(path) in PLAIN else _of_rows(path, columns)


def _of_plain_text(path: Path) -> Iterator[str]:
    """The documents of a file of text, long ones some lines at a time."""
    parts, size = list[str](), 0
    for number, line in text_lines(path):
        if line is None:
            raise DataError(f"The text cannot be read on: {TOO_LONG}.", where=f"{path}:{number}")
        is_end = line.strip() == TEXT_END
        parts += [] if is_end else [line]
        size += len(line)
        if is_end or size > PIECE_CHARACTERS:
            yield from _not_blank(parts)
            parts, size = [], 0
    yield from _not_blank(parts)


def _not_blank(parts: list[str]) -> Iterator[str]:
    text = "".join(parts)
    if text.strip():
        yield text


def _of_rows(path: Path, columns: Columns | None) -> Iterator[str]:
    faults = list[Fault]()
    for place, value in rows_of(path):
        try:
            if isinstance(value, RowError):
                raise value
            row = parse_row(value, columns)
        except RowError as error:
            faults.append(Fault(Spot(str(path), place), error))
            continue
        yield from [row.text] if row.text else [each.content for each in row.messages if each.content]
    if faults:
        raise bad_rows(faults)
