"""The texts of a data set, for a tokenizer to be made of: bare texts, messages of chats, documents of plain text."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetrain.core.errors import DataError
from safetrain.data.files import PLAIN, rows_of, texts_of
from safetrain.data.findings import Findings, Severities, Spot
from safetrain.data.folders import corpus_of, data_files_of, suffix_of
from safetrain.data.forms import Columns, parse_row
from safetrain.data.json_rows import RowError

PIECE_CHARACTERS = 2**16  # of a text, to the end of its line


def training_texts(paths: Iterable[Path], columns: Columns | None, say: Callable[[str], None]) -> Iterator[str]:
    """Every text to train on in some files and folders; raises DataError, NoRowsError.

    ``say`` is told of files in the folders that look like data and are of no split.
    """
    for source in paths:
        if corpus_of(source):
            raise DataError(
                "This is a corpus of tokens: it has no text to make a tokenizer of.",
                where=str(source),
                do="safetrain create PRESET DIR --tokenizer MODEL, the model whose tokenizer made the corpus",
            )
        files = data_files_of(source, documents=True)
        if files.unread:
            more = f" and {len(files.unread) - 1} more" if len(files.unread) > 1 else ""
            say(f"{files.unread[0]}{more} in {source} is not read: its name says no split")
        for split, path in zip(files.names, files.paths, strict=True):
            if split == "train":
                yield from _texts_in(path, columns)


def _texts_in(path: Path, columns: Columns | None) -> Iterator[str]:
    is_plain, findings = suffix_of(path) in PLAIN, Findings(Severities())
    for place, value in texts_of(path) if is_plain else rows_of(path):
        try:
            row = parse_row(value, None if is_plain else columns)
        except RowError as error:
            findings.add_unreadable(Spot(str(path), place), error)
            continue
        for text in (row.text, *(message.content for message in row.messages)):
            yield from _pieces(text)
    findings.refuse_errors()


def _pieces(text: str) -> Iterator[str]:
    """A text some lines at a time, so that a sample can be spread over it."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end
