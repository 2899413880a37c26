"""Plain text for a training from scratch: files of documents, folders of books, texts that are too long."""

import gzip
from pathlib import Path

import pytest

from safetrain.core.data.store import open_store, store_path
from safetrain.core.errors import DataError
from safetrain.core.records.reports import DataReport
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.files import MOST_ROW_BYTES
from tests.conftest import EMBEDDED
from tests.corpora import TEXTS
from tests.data.reading import gate

SPLITS = ("train", "valid", "test")


def validate_texts(source: Path, into: Path) -> DataReport:
    return gate(source, into, similarity=1.0, documents=True)


def texts_in(into: Path) -> list[str]:
    """The documents of all splits as text, each with its end token."""
    stores = [open_store(store_path(into / "validated", split)) for split in SPLITS]
    tokenizer = ChatTokenizer(EMBEDDED)
    return [tokenizer.decode(row.ids.tolist(), special=True) for store in stores for row in store.rows]


def test_a_file_of_plain_text_is_divided_where_a_line_says_that_a_text_ends(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    documents = ["Hello, World\nTitle,Author", '{"a": 1}\n\nThat was code.', "  indented <|endoftext|> inside a line"]
    path.write_text("\n\n" + "\n<|endoftext|>\n".join([*documents, "", " \n", *TEXTS[:9]]) + "\n")
    report = validate_texts(path, tmp_path)
    end = ChatTokenizer(EMBEDDED).token_of(ChatTokenizer(EMBEDDED).end_id or 0)
    assert sorted(texts_in(tmp_path)) == sorted(f"{text}{end}" for text in [*documents, *TEXTS[:9]])
    assert sum(split.label_bytes for _, split in report.splits) == sum(map(len, [*documents, *TEXTS[:9]]))
    stores = [open_store(store_path(tmp_path / "validated", split)) for split in SPLITS]
    lines = sorted(int(store.where(row).removeprefix(f"{path}:")) for store in stores for row in range(len(store.rows)))
    assert lines[:3] == [3, 6, 10], "where each begins"


def test_a_folder_of_books_has_one_in_each_file(tmp_path: Path) -> None:
    books = tmp_path / "books"
    (books / "poems").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:8]):
        (books / ("poems" if number % 2 else "") / f"A test of time {number}.txt").write_text(text)
    (books / "packed.txt.gz").write_bytes(gzip.compress(TEXTS[8].encode()))
    validate_texts(books, tmp_path)
    assert {text.split(" is ")[0] for text in texts_in(tmp_path)} == {text.split(" is ")[0] for text in TEXTS[:9]}


def test_a_text_that_is_too_long_or_not_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n<|endoftext|>\n" + "a line of a book\n" * (MOST_ROW_BYTES // 16))
    with pytest.raises(DataError, match=r"a\.txt:3(?s:.*)<\|endoftext\|>"):
        validate_texts(path, tmp_path)
    path.write_bytes("one\ntwo\ncafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:3"):
        validate_texts(path, tmp_path)
