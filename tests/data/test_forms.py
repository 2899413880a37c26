"""A file that holds no rows is said to be what it is, with what to do, and never with advice that spoils it."""

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.data.files import recognised
from tests.data.planted import COMPRESSIONS, ROWS, lines
from tests.data.reading import read_rows, values

LINES = lines(ROWS)
SAFETENSORS = (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + b"\0" * 4


def refused(path: Path, content: bytes | str) -> DataError:
    """What is said of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        recognised(path)
    assert str(path) in caught.value.where
    return caught.value


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        info = tarfile.TarInfo("train.jsonl")
        info.size = len(LINES.encode())
        archive.addfile(info, io.BytesIO(LINES.encode()))
    return content.getvalue()


def zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, LINES)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "what", "do"),
    [
        (b"\x04\x22\x4d\x18 and so on", "packed with bzip2, xz or LZ4", "gzip and zstd"),
        (bz2.compress(LINES.encode()), "packed with bzip2, xz or LZ4", "unpack it"),
        (lzma.compress(LINES.encode()), "packed with bzip2, xz or LZ4", "unpack it"),
        (gzip.compress(tar(), mtime=0), "an archive", "unpack it"),
        (tar(), "an archive", "unpack it"),
        (zipped("train.jsonl"), "an archive", "unpack it"),
        (zipped("xl/workbook.xml"), "an Office document", "CSV, in UTF-8"),
        (
            gzip.compress(gzip.compress(LINES.encode(), mtime=0), mtime=0),
            "a packed file or a binary table inside gzip",
            "unpack it once",
        ),
        (
            gzip.compress(b"PAR1\x15\x04\x15\xb8PAR1", mtime=0),
            "a packed file or a binary table inside gzip",
            "unpack it",
        ),
        (b"GGUF\x03\x00\x00\x00", "a model's weights", "model.path"),
        (SAFETENSORS, "a model's weights", "model.path"),
        (pickle.dumps(ROWS), "a Python pickle", "a pickle can run code"),
        (b"%PDF-1.7\n", "a PDF or an old Office document", "as JSON lines or CSV"),
        (bytes(range(256)) * 4, "a binary file, or text without", "in UTF-8"),
    ],
)
def test_binary_files_are_named(tmp_path: Path, content: bytes, what: str, do: str) -> None:
    error = refused(tmp_path / "train.jsonl", content)
    assert what in error.what
    assert do in error.do


def test_a_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as database:
        database.execute("create table a (prompt text)")
    database.close()
    assert "a database" in refused(path, path.read_bytes()).what


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- prompt: q\n  completion: a\n", "no line begins with a JSON object"),
        ("Once upon a time there was iron.\nAnd gold.\n", "no line begins with a JSON object"),
        ("<!DOCTYPE html>\n<html></html>\n", "not the page that shows it"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("", "has no rows"),
        ("\ufeff\r\n \n", "has no rows"),
    ],
)
def test_other_text(tmp_path: Path, content: str, says: str) -> None:
    assert says in str(refused(tmp_path / "train.jsonl", content))


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        recognised(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        recognised(tmp_path)


@pytest.mark.parametrize("compression", ["gzip", "Zstandard"])
def test_a_compressed_file_that_is_cut_or_damaged_is_said(tmp_path: Path, compression: str) -> None:
    whole = COMPRESSIONS[compression][1]("".join(f'{{"text": "{n * 7919}"}}\n' for n in range(60_000)).encode())
    path = tmp_path / "a.jsonl"
    for content in (whole[:-20], whole[: len(whole) // 2] + b"\x00" * 40 + whole[len(whole) // 2 :]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged|not valid JSON|not UTF-8|bytes"):
            read_rows(path)


# Text that is not UTF-8


def refused_rows(path: Path, content: bytes) -> DataError:
    path.write_bytes(content)
    recognised(path)  # one byte among many: only reading finds it
    with pytest.raises(DataError) as caught:
        read_rows(path)
    return caught.value


def test_latin_letters_are_named_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    error = refused_rows(path, lines(ROWS[:1]).encode("cp1252"))
    assert f"{path}:1 (0xe9)" in error.where
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {path} > OUT" in error.do


def test_one_foreign_byte_in_utf_8_is_to_be_corrected(tmp_path: Path) -> None:
    error = refused_rows(tmp_path / "a.jsonl", LINES.encode() + b'{"text": "caf\xe9"}\n')
    assert f"a.jsonl:{len(ROWS) + 1} (0xe9)" in error.where
    assert "correct that byte" in error.do


def test_a_file_cut_inside_a_character(tmp_path: Path) -> None:
    assert "it is cut off" in refused_rows(tmp_path / "a.jsonl", LINES.encode() + '{"text": "é'.encode()[:-1]).what
    (tmp_path / "a.json").write_bytes('[{"text": "aé'.encode("utf-16")[:-1])
    with pytest.raises(DataError, match="it is cut off"):
        read_rows(tmp_path / "a.json")


def test_what_is_read_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\ufeff" + LINES.replace("\n", "\r\n\r\n") + '{"text": "a\u2028b"}').encode())
    assert values(path) == [*ROWS, {"text": "a\u2028b"}]
