"""A file that is no JSONL is said to be what it is, and the command that is told makes JSONL of it."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import sqlite3
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from safetrain.core.data.forms import check_form
from safetrain.core.errors import DataError
from tests.core.data.reading import read_rows

ROWS = [{"prompt": "Symbol of iron?", "completion": "Fé."}, {"prompt": "Of gold?", "completion": 'Au, "aurum"\nit is.'}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
HAS_JQ = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


def refused(path: Path, content: bytes | str) -> DataError:
    """What is said of a file with this content; the same whether its form is checked or its rows are read."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        check_form(path)
    with pytest.raises(DataError) as again:
        read_rows(path)
    assert str(again.value) == str(caught.value)
    assert str(path) in caught.value.where
    return caught.value


def converted(error: DataError, path: Path) -> list[object]:
    """The rows that the file has after the command that the error tells."""
    command = error.do.split("; or without jq")[0].split(" (PowerShell")[0].split(" (if letters")[0]
    command, _, then = command.partition(", then give ")
    subprocess.run(command, shell=True, check=True)
    new = Path(then.removesuffix(" as data")) if then else path
    return [sourced.row.as_json() for sourced in read_rows(new)]


@pytest.mark.parametrize(
    ("suffix", "content", "name"),
    [
        (".gz", gzip.compress(LINES.encode()), "gzip"),
        (".bz2", bz2.compress(LINES.encode()), "bzip2"),
        (".xz", lzma.compress(LINES.encode()), "xz"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_compressed_files(tmp_path: Path, suffix: str, content: bytes, name: str, named: bool) -> None:
    path = tmp_path / f"my rows.jsonl{suffix if named else ''}"
    error = refused(path, content)
    assert f"compressed with {name}" in str(error)
    assert "iconv" not in str(error)
    if shutil.which(error.do.split(" < ")[0].split()[-1 if name != "xz" else -2]):
        assert converted(error, path) == ROWS


def tar_gz() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        info = tarfile.TarInfo("train.jsonl")
        info.size = len(LINES.encode())
        archive.addfile(info, io.BytesIO(LINES.encode()))
    return content.getvalue()


def zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, LINES)
    return content.getvalue()


SAFETENSORS = (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + b"\0" * 4


@pytest.mark.parametrize(
    ("content", "what", "do"),
    [
        (b"\x28\xb5\x2f\xfd\x04\x00", "compressed with Zstandard", "zstd -d <"),
        (tar_gz(), "tar archive", "tar -xf"),
        (zipped("train.jsonl"), "a zip archive", "unzip"),
        (zipped("xl/workbook.xml"), "an Office document", "CSV UTF-8"),
        (zipped("model/data.pkl"), "a PyTorch file", "model.path"),
        (b"PAR1\x15\x04\x15\xb8PAR1", "a Parquet table", "pyarrow.parquet as p; a,b=sys.argv[1:]"),
        (b"ARROW1\x00\x00\xff\xff\xff\xff", "an Arrow (Feather) table", "pyarrow.ipc as p"),
        (b"\xff\xff\xff\xff\x10\x01\x00\x00", "an Arrow stream", "p.open_stream(a)"),
        (b"GGUF\x03\x00\x00\x00", "a model's weights (GGUF)", "model.path"),
        (SAFETENSORS, "a model's weights (safetensors)", "model.path"),
        (pickle.dumps(ROWS), "a Python pickle", "do not open a stranger's"),
        (b"%PDF-1.7\n", "a PDF document", "rows of text"),
        (bytes(range(256)) * 4, "a binary file of a kind not known here", "give the rows as text"),
    ],
)
def test_binary_files_are_named_and_never_sent_to_iconv(tmp_path: Path, content: bytes, what: str, do: str) -> None:
    error = refused(tmp_path / "train.jsonl", content)
    assert what in error.what
    assert do in error.do
    assert "iconv" not in str(error)


def test_a_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as database:
        database.execute("create table a (prompt text)")
    database.close()
    assert ".tables" in refused(path, path.read_bytes()).do


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_wide_encodings_are_converted_as_what_they_are(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "train.jsonl"
    error = refused(path, LINES.encode(encoding))
    assert f"The data file is {encoding[:6].upper()}" in error.what
    assert "WINDOWS" not in error.do
    assert "PowerShell" in error.do
    assert converted(error, path) == ROWS


@HAS_JQ
@pytest.mark.parametrize("name", ["a.json", "train.jsonl", "with space.json"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array(tmp_path: Path, name: str, indent: int | None) -> None:
    path = tmp_path / name
    error = refused(path, json.dumps(ROWS, indent=indent, ensure_ascii=False))
    assert "one JSON array" in error.what
    assert "jq -c '.[]'" in error.do
    assert converted(error, path) == ROWS


def test_a_json_array_without_jq(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    error = refused(path, "[\n" + ",\n".join(LINES.splitlines()) + "\n]\n")
    command = error.do.split("or without jq: ")[1].split(", then give")[0]
    subprocess.run(command, shell=True, check=True)
    assert [sourced.row.as_json() for sourced in read_rows(tmp_path / "a.jsonl")] == ROWS


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    assert f"> {tmp_path}/a.new.jsonl" in refused(tmp_path / "a.json", json.dumps(ROWS)).do


@HAS_JQ
def test_objects_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    error = refused(path, "\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert "JSON objects printed over several lines" in error.what
    assert converted(error, path) == ROWS


@HAS_JQ
def test_one_object_around_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    error = refused(path, json.dumps({"data": ROWS}, indent=2))
    assert "with the rows in 'data'" in error.what
    assert converted(error, path) == ROWS


def test_a_broken_first_row_is_no_form(tmp_path: Path) -> None:
    for first in ('{"messages": [', "{", '{"text": "cut', "no json", '["a"]', "[" * 100_000):
        path = tmp_path / "a.jsonl"
        path.write_text(f"{first}\n{LINES}")
        check_form(path)
        with pytest.raises(DataError, match=r"a\.jsonl:1"):
            read_rows(path)


@pytest.mark.parametrize(("separator", "name"), [(",", "CSV"), ("\t", "TSV"), (";", "CSV")])
def test_a_table(tmp_path: Path, separator: str, name: str) -> None:
    path = tmp_path / "a.csv"
    lines = [f"prompt{separator}completion"]
    lines += [f'"{row["prompt"]}"{separator}"{row["completion"].replace(chr(34), chr(34) * 2)}"' for row in ROWS]
    error = refused(path, "\ufeff" + "\r\n".join(lines) + "\r\n")
    assert f"({name}), not JSON" in error.what
    assert "columns prompt, completion" in error.got
    assert converted(error, path) == ROWS


def test_old_mac_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    error = refused(path, LINES.replace("\n", "\r"))
    assert "line ends of old Macs" in error.what
    assert converted(error, path) == ROWS


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


def test_latin_letters_are_named_by_line_and_byte_and_converted(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    error = refused_rows(path, LINES.encode("cp1252"))
    assert f"{path}:1 (byte 47 of the line: 0xe9)" in error.where
    assert converted(error, path) == ROWS


def refused_rows(path: Path, content: bytes) -> DataError:
    path.write_bytes(content)
    check_form(path)  # one byte among many: only reading finds it
    with pytest.raises(DataError) as caught:
        read_rows(path)
    return caught.value


def test_a_file_that_is_mostly_utf_8_is_not_to_be_converted(tmp_path: Path) -> None:
    error = refused_rows(tmp_path / "a.jsonl", LINES.encode() + b'{"text": "caf\xe9"}\n')
    assert "a.jsonl:3 (byte 14 of the line: 0xe9)" in error.where
    assert "correct that line alone" in error.do
    assert "iconv" not in error.do


def test_a_file_cut_inside_a_character(tmp_path: Path) -> None:
    error = refused_rows(tmp_path / "a.jsonl", LINES.encode() + '{"text": "é'.encode()[:-1])
    assert "it is cut off" in error.what


def test_what_is_read_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\ufeff" + LINES.replace("\n", "\r\n\r\n") + '{"text": "a\u2028b"}').encode())
    check_form(path)
    assert [sourced.row.as_json() for sourced in read_rows(path)] == [*ROWS, {"text": "a\u2028b"}]
