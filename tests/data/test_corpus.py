"""A training from scratch: corpora of tokens, files of plain text, rows longer than any context."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from safetrain.core.data.store import open_store, store_path
from safetrain.core.errors import DataError
from safetrain.core.records.reports import DataReport
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.files import MOST_ROW_BYTES
from safetrain.data.folders import corpus_of
from safetrain.data.tokenize import DataSettings
from safetrain.data.validate import validate as validate_data
from tests.conftest import EMBEDDED
from tests.corpora import TEXTS, tokenized, write_ds
from tests.data.reading import gate

SPLITS = ("train", "valid", "test")
DOCUMENTS = tokenized()


def validate(source: Path, into: Path, downgrade: tuple[str, ...] = ()) -> DataReport:
    return validate_data([source], EMBEDDED, DataSettings(downgrade=downgrade), into).report


def rows_of(into: Path, split: str) -> list[list[int]]:
    return [row.ids.tolist() for row in open_store(store_path(into, split)).rows]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files, the second of 4 bytes a token and with an empty document."""
    write_ds(tmp_path / "corpus/00000_a.ds", DOCUMENTS[:30], tokenizer="somebody/encyclopedia-3m")
    write_ds(tmp_path / "corpus/00001_a.ds", [*DOCUMENTS[30:], []], token_bytes=4)
    return tmp_path / "corpus"


def test_a_corpus_is_split_and_stays_where_it_is(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in corpus.iterdir()}
    report = validate(corpus, tmp_path / "out")
    first = [store_path(tmp_path / "out", split).read_bytes() for split in SPLITS]
    validate(corpus, tmp_path / "out")
    assert [store_path(tmp_path / "out", split).read_bytes() for split in SPLITS] == first
    rows = {split: rows_of(tmp_path / "out", split) for split in SPLITS}
    monkeypatch.setattr("safetrain.data.corpus.PIECE", 7)
    assert validate(corpus, tmp_path / "pieces").train == report.train
    assert rows_of(tmp_path / "pieces", "train") == rows["train"]
    assert sorted(row for found in rows.values() for row in found) == sorted(DOCUMENTS)
    assert all(4 <= len(rows[split]) <= 8 for split in ("valid", "test")), "a tenth of 60 each"
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 20_000
    assert {path: path.read_bytes() for path in corpus.iterdir()} == before
    assert report.findings == ()
    assert sum(split.rows for _, split in report.splits) == 60
    assert sum(split.tokens for _, split in report.splits) == sum(map(len, DOCUMENTS))
    assert sum(split.label_bytes for _, split in report.splits) == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("names", [
    ("train/00000.ds", "valid/00000.ds", "test/00000.ds"), ("train_00000_00000_shuffled.ds", "000_val.ds", "test.ds"),
])  # fmt: skip
def test_named_splits_stay_as_given(names: tuple[str, ...], tmp_path: Path) -> None:
    parts = (DOCUMENTS[:40], DOCUMENTS[40:50], DOCUMENTS[50:])
    for name, part in zip(names, parts, strict=True):
        write_ds(tmp_path / "corpus" / name, part)
    report = validate(tmp_path / "corpus", tmp_path / "out")
    assert [rows_of(tmp_path / "out", split) for split in SPLITS] == [*parts]
    assert report.split == "using the given train, valid and test files"
    write_ds(tmp_path / "corpus/more.ds", DOCUMENTS[:3])
    with pytest.raises(DataError, match="others are not"):
        corpus_of(tmp_path / "corpus")
    (tmp_path / "corpus/around").symlink_to(tmp_path / "corpus")
    with pytest.raises(DataError, match="points to a folder"):
        corpus_of(tmp_path / "corpus")


def test_files_that_are_not_whole_are_refused(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "00000_a.ds"
    raw, index = path.read_bytes(), path.with_name("00000_a.ds.index")
    ends = np.fromfile(index, dtype="<u8")

    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match) as caught:
            validate(corpus, tmp_path / "out")
        assert "00000_a.ds" in str(caught.value)
        assert not (tmp_path / "out").exists()

    path.write_bytes(raw[:-2])
    refused("do not match")
    path.write_bytes(raw)
    index.write_bytes(np.append(ends, ends[-1] + np.uint64(5)).tobytes())
    refused("do not match")
    index.write_bytes(ends.tobytes()[:-3])
    refused("do not match")
    index.write_bytes(ends[::-1].tobytes())
    refused("do not match")
    index.unlink()
    refused("no index")
    index.write_bytes(ends.tobytes())
    path.with_name("00000_a.ds.loss").write_bytes(bytes(3))
    refused("mask")


def test_an_id_beyond_the_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    documents = [list(document) for document in DOCUMENTS[30:]]
    documents[4][2] = 70_000
    write_ds(corpus / "00001_a.ds", documents, token_bytes=4)
    place = sum(map(len, documents[:4])) + 3
    with pytest.raises(DataError, match=rf"00001_a\.ds, token {place}\n(?s:.*)ids below 2048\n(?s:.*)70000"):
        validate(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_documents_without_an_end_are_told_and_too_few_cannot_be_split(tmp_path: Path) -> None:
    write_ds(tmp_path / "corpus/a.ds", tokenized(closed=False))
    report = validate(tmp_path / "corpus", tmp_path / "out")
    (finding,) = report.findings
    assert (finding.id, finding.severity, finding.count) == ("DOCUMENTS-OPEN", "warning", 60)
    assert "60 of 60" in finding.message
    write_ds(tmp_path / "corpus/a.ds", DOCUMENTS[:2])
    with pytest.raises(DataError, match="Too few documents"):
        validate(tmp_path / "corpus", tmp_path / "out")


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
