"""Files made to harm: each is read within bounds, or is one clear error, and nothing of it steers a terminal."""

import gzip
import io
import json
import pickle
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import DataError
from safetrain.core.formatting import printable
from safetrain.data.files import rows_of
from tests.conftest import EMBEDDED
from tests.data.planted import COMPRESSIONS, ROWS, lines
from tests.data.reading import read_rows, refusal_of, values

MIB = 2**20
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
GOOD = '{"text": "good"}'
LINES = lines(ROWS)
SAFETENSORS = (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + b"\0" * 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{GOOD}\n{{"text": "BIG"}}\n{GOOD}\n', "a row is longer than 16 MiB"),
        ('text\n"LINES"\n', "a row is longer than 16 MiB"),
        (f"[{GOOD}, {'[' * 100_000}{']' * 100_000}]", "brackets are nested"),
        (f'messages,id\n"{"[" * 100_000}",1\n', "brackets are nested"),
        (f'{{"text": "a", "n": {"9" * MIB}}}', "a number has too many digits"),
        (f'{{"text": "a", "n": 1e{"9" * 400}}}', ""),
        ('{"prompt": "a", "response": 1e999}', "a number that is too large"),
        (f'{{"messages": [{{"role": "user", "content": "a", "x": {"[" * 990}{"]" * 990}}}]}}', "brackets are nested"),
        ('{"text": "\\ud83d"}', "half a surrogate pair"),
        ('{"messages": [{"role": "\\ud83d", "content": "a"}]}', r"role is ''\ud83d''"),
        ('{"text": "a\x00b"}', "Invalid control character"),
        ("\x00" * 4096, "a binary file, or text without"),
        (json.dumps({ESCAPE: 1}), r"'\x1b]0;owned\x07\x1b[2J'"),
        (json.dumps({"messages": [{"role": ESCAPE, "content": "a"}]}), r"\x1b]0;owned"),
        (f"{ESCAPE},b\n1,2\n", r"\x1b]0;owned\x07"),
        (f"prompt,{ESCAPE},{ESCAPE}\n1,2,3\n", "two columns named"),
        (",".join(f"c{n}" for n in range(20_000)) + "\nx" + "," * 19_999, "unknown keys"),
    ],
)
def test_it_is_read_or_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    text = text.replace("BIG", "x" * 17 * MIB).replace("LINES", "x\n" * 9 * MIB)
    path.write_bytes(text.encode())
    said = refusal_of(path)
    assert bool(said) == bool(says)
    assert says in printable(said)
    assert "\x1b" not in said
    assert len(printable(said)) < 6000


@pytest.mark.parametrize("compression", ["gzip", "Zstandard"])
def test_a_bomb_is_refused_before_it_is_decompressed(tmp_path: Path, compression: str) -> None:
    """Hundreds of pieces that each unpack to a MiB: one line, and many."""
    pack, path = COMPRESSIONS[compression][1], tmp_path / "a.jsonl"
    line = b'{"text": "' + b"x" * (MIB - 13) + b'"}\n'
    one_line, many = pack(b'{"text": "') + pack(b"x" * MIB) * 300, pack(line) * 300
    for content, said in ((one_line, "longer than 16 MiB"), (many, "decompresses to more than 200 times its size")):
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(DataError, match=said):
            sum(1 for _ in rows_of(path))
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
        tracemalloc.stop()


# Files that hold no rows, and text that is not UTF-8


def refused(path: Path, content: bytes | str) -> DataError:
    """What is said of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(path) in caught.value.where
    return caught.value


def archive(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr(name, LINES)
    return content.getvalue()


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        file.addfile(tarfile.TarInfo("train.jsonl"), io.BytesIO())
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "what", "do"),
    [
        (b"\x04\x22\x4d\x18 and so on", "compressed with bzip2, xz or LZ4", "use gzip or zstd"),
        (gzip.compress(tar(), mtime=0), "an archive", "unpack it"),
        (archive("xl/workbook.xml"), "an Office document", "CSV in UTF-8"),
        (gzip.compress(gzip.compress(LINES.encode()), mtime=0), "a binary table inside gzip", "decompress it once"),
        (SAFETENSORS, "a model's weights", "model.path"),
        (pickle.dumps(ROWS), "a Python pickle", "a pickle can run code"),
        (b"%PDF-1.7\n", "a PDF or an old Office document", "as JSON lines or CSV"),
        (bytes(range(256)) * 4, "a binary file, or text without", "in UTF-8"),
        ("Once upon a time there was iron.\nAnd gold.\n", "no line begins with a JSON object", "completion"),
        ("<!DOCTYPE html>\n<html></html>\n", "a web page", "not the page that shows it"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS", "git lfs pull"),
        ("", "has no rows", ""),
        (lines(ROWS[:1]).encode("cp1252"), "not UTF-8", "iconv -f WINDOWS-1252 -t UTF-8"),
        (LINES.encode() + b'{"text": "caf\xe9"}\n', "not UTF-8", "correct that byte"),
        (LINES.encode() + '{"text": "é'.encode()[:-1], "it is cut off", "copy or download"),
        ('[{"text": "aé'.encode("utf-16")[:-1], "it is cut off", "copy or download"),
    ],
)
def test_a_file_that_is_no_rows_is_said_to_be_what_it_is(
    tmp_path: Path, content: bytes | str, what: str, do: str
) -> None:
    error = refused(tmp_path / "train.jsonl", content)
    assert what in error.what
    assert do in error.do
    if "iconv" in do:
        assert error.where.endswith("train.jsonl:1 (0xe9)")


def test_what_is_no_file_is_said_and_byte_order_marks_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"  # marks also where files were joined
    path.write_bytes(("\ufeff" + LINES.replace("\n", "\r\n\r\n\ufeff") + '{"text": "a\u2028b"}').encode())
    assert values(path) == [*ROWS, {"text": "a\u2028b"}]
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        read_rows(tmp_path)


@pytest.mark.parametrize("compression", ["gzip", "Zstandard"])
def test_a_compressed_file_that_is_cut_or_damaged_is_said(tmp_path: Path, compression: str) -> None:
    whole = COMPRESSIONS[compression][1]("".join(f'{{"text": "{n * 7919}"}}\n' for n in range(20_000)).encode())
    for content in (whole[:-20], whole[: len(whole) // 2] + b"\x00" * 40 + whole[len(whole) // 2 :]):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged|not valid JSON|not UTF-8|bytes"):
            read_rows(tmp_path / "a.jsonl")


def test_nothing_of_the_data_or_of_a_file_s_name_steers_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / f"rows{ESCAPE.replace('/', '')}\u202e.jsonl"
    rows = [{"prompt": ESCAPE, "completion": "[red]a\u202eb[/red]"}, {ESCAPE: 1}, {"text": ESCAPE, "\u202e": "k"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in ((str(path), "--show-mask", "-1"), (str(path), "--fix", str(tmp_path / f"out{ESCAPE}.jsonl"))):
        done = CliRunner().invoke(app, ["validate", *arguments, "--model", str(EMBEDDED)])
        assert done.exit_code == 1
        for said in (done.stdout, done.stderr):
            assert not {"\x1b", "\x07", "\u202e"} & set(said)
            assert "Traceback" not in said
        assert r"\x1b]0;owned" in done.stdout + done.stderr
