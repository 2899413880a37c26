"""Files: each container, compression and encoding is read as its rows; damaged and hostile ones are one clear error."""

import gzip
import io
import itertools
import json
import pickle
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import DataError, SafetrainError
from safetrain.core.formatting import printable
from safetrain.data.command import Repair
from safetrain.data.files import rows_of
from safetrain.data.forms import parse_row
from safetrain.data.rows import RowError
from tests.conftest import EMBEDDED, chat
from tests.data.reading import (
    COMPRESSIONS,
    CONTAINERS,
    ENCODINGS,
    ROWS,
    arrow_stream,
    gate,
    lines,
    parquet,
    read_rows,
    refusal_of,
    table,
    values,
)

LINES = {  # of what has rows: a CSV's second row goes over two lines
    "an array": (1, 1, 1), "an array over lines": (2, 6, 10), "an array of lines": (2, 3, 4),
    **dict.fromkeys(("CSV", "CSV with semicolons", "TSV"), (2, 3, 5)),
}  # fmt: skip
THREE_BAD = '[{"text": "a"}, {"text": "b", "text": "c"}, {"text": NaN}, 3]'
PLACES = {
    "lines": [":1", ":2", ":3"],
    "lines with CRLF and blank ones": [":1", ":3", ":5"],
    **{name: [f", row {row} (line {line})" for row, line in enumerate(found, 1)] for name, found in LINES.items()},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_in_every_encoding_and_compression_whatever_its_name(tmp_path: Path, container: str) -> None:
    suffix, make = CONTAINERS[container]
    for number, (encoding, (packed, pack)) in enumerate(itertools.product(ENCODINGS, COMPRESSIONS.values())):
        path = tmp_path / (f"my rows{suffix}{packed}" if number % 2 else f"train{number}{suffix}")
        path.write_bytes(pack(make(ROWS).encode(encoding)))
        assert values(path) == ROWS, path


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_place_is_the_line_and_in_arrays_and_tables_the_row(tmp_path: Path, container: str) -> None:
    path = tmp_path / f"a{CONTAINERS[container][0]}"
    path.write_text(CONTAINERS[container][1](ROWS), newline="")
    assert [sourced.where.removeprefix(str(path)) for sourced in read_rows(path)] == PLACES[container]


@pytest.mark.parametrize(("line", "says"), [
    ('{"messages": [', "a.jsonl:3:15: not valid JSON: Expecting value (it is cut off here"),
    ('{"text": None}', "a.jsonl:3:10: not valid JSON: Expecting value (this is how Python prints it"),
    (r'{"text": "C:\data"}', r"a.jsonl:3:13: not valid JSON: Invalid \escape"),
    ('{"question": "q"}', "a.jsonl:3: unknown keys (question); expected one of"),
    ('["q"]', "a.jsonl:3: a row must be a JSON object, not a list"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(chat("q", "a")), "", line, json.dumps(chat("q", "b"))]))
    assert says in refusal_of(path)


def test_bad_rows_are_counted_the_first_listed_and_a_fault_of_many_told_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": [{"role": f"robot {number}"}]} for number in range(25)]))
    with pytest.raises(DataError, match="1 row cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("expected one of system") == 9
    assert "and 16 more" in str(caught.value)
    path.write_text(lines([{"question": "q", "reply to": "a"}] * 30) + "{\n")
    with pytest.raises(DataError, match="30 rows cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("unknown keys (question, reply to)") == 1
    assert f"where:    {path}:1; {path}:2; {path}:3; …\n" in str(caught.value)
    assert f"where:    {path}:31:2\n" in str(caught.value)


def test_wide_cells_count_where_a_table_unpacks_to_much(tmp_path: Path) -> None:
    """Each row is too long to be read, and costs as much as if it were not."""
    cells = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["x" * 7 * MIB])
    pyarrow.parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        sum(1 for _ in rows_of(tmp_path / "a.parquet"))


WITH_PAGES = {"id": 1, "documents": [{"title": "t", "text": "x" * 70_000}], "question": "q", "answer": "a"}


@pytest.mark.parametrize("rows", [[WITH_PAGES], [WITH_PAGES, *ROWS]])
def test_a_list_in_the_first_row_is_not_taken_for_the_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "a.json"
    path.write_text(lines(rows))
    assert len(values(path)) == len(rows)


@pytest.mark.parametrize(("text", "says"), [
    ("\n".join(json.dumps(row, indent=2) for row in ROWS), "one object per line"),
    (table(ROWS, "|"), "unknown keys (prompt|completion)"),
    (THREE_BAD, ", row 2 (line 1): the key 'text' occurs twice"),
    (THREE_BAD, ", row 4 (line 1): a row must be a JSON object"),  # the rest is read on
    ('[{"text": "a"}, {"text": "b"}', ", row 3 (line 1)"),
    ('[\n{"text": "a"},\n{"text":\n b}\n]', ", row 2 (line 4)"),
    ('[{"text": "a"}]\n{"text": "b"}', "the end of the array and the file"),
    ('prompt,completion\nq,a\n"q,a\n', "unexpected end of data"),
    ("prompt,prompt\nq,a\n", "two columns named prompt"),
    ('\nprompt,completion\n"one\ntwo",a\n\nq,b\n"three\nfour",\n', ", row 3 (line 7): completion must be a string"),
    ("prompt,completion\nq,a,b\n", ", row 1 (line 2): 3 cells, but the header has 2 columns"),
    ("id,messages\n1,[oops\n", ", row 1 (line 2): messages is a string that must be JSON: not valid JSON"),
])  # fmt: skip
def test_forms_that_are_not_read_and_bad_rows_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert says in refusal_of(path)


@pytest.mark.parametrize("separator", [";", ",", "\t"])
def test_cells_that_excel_leaves_empty_are_passed_over(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(table([{"id": "1", "messages": json.dumps(chat("q", "a")["messages"])}], ","))
    assert values(path) == [chat("q", "a")]  # a cell of JSON is decoded
    rows = ["question;answer;;", "q;a;;", ";;;", " ;;;", "r;b;;", ";;;"]
    path.write_bytes(("\ufeff" + "\r\n".join(rows).replace(";", separator)).encode())
    assert values(path) == [{"prompt": "q", "completion": "a"}, {"prompt": "r", "completion": "b"}]
    assert [sourced.where for sourced in read_rows(path)] == [f"{path}, row 1 (line 2)", f"{path}, row 2 (line 5)"]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """14 MB of lines in less than 10 MB; only a JSON array is held whole."""
    row = json.dumps({"prompt": "q" * 5000, "completion": "a" * 5000})
    many = 1_400
    files = {"a.jsonl": f"{row}\n" * many,
             "b.csv": "prompt,completion\n" + f"{'q' * 5000},{'a' * 5000}\n" * many}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    files.clear()
    for name in ("a.jsonl", "b.csv"):
        tracemalloc.start()
        assert sum(1 for _ in rows_of(tmp_path / name)) == many
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10e6, name


MIB = 2**20
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
GOOD = '{"text": "good"}'
ROW_LINES = lines(ROWS)
SAFETENSORS = (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + b"\0" * 4


@pytest.mark.parametrize(("text", "says"), [
    (f'{GOOD}\n{{"text": "BIG"}}\n{GOOD}\n', "a row is longer than 6 MiB"),
    ('text\n"LINES"\n', "field larger than field limit"),
    (f"[{GOOD}, {'[' * 100_000}{']' * 100_000}]", "brackets are nested"),
    (f'messages,id\n"{"[" * 100_000}",1\n', "brackets are nested"),
    (f'{{"text": "a", "n": {"9" * MIB}}}', "a number has too many digits"),
    (f'{{"text": "a", "n": 1e{"9" * 400}}}', ""),
    ('{"prompt": "a", "response": 1e999}', "a number that is too large"),
    ('{"messages": [{"role": "\\ud83d", "content": "a"}]}', r"role is '\ud83d'"),
    ('{"text": "a\x00b"}', "Invalid control character"),
    (json.dumps({"messages": [{"role": ESCAPE, "content": "a"}]}), r"\x1b]0;owned"),
    (f"{ESCAPE},b\n1,2\n", r"\x1b]0;owned\x07"),
    (",".join(f"c{n}" for n in range(20_000)) + "\nx" + "," * 19_999, "unknown keys"),
])  # fmt: skip
def test_it_is_read_or_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    text = text.replace("BIG", "x" * 17 * MIB).replace("LINES", "x\n" * 9 * MIB)
    path.write_bytes(text.encode())
    said = refusal_of(path)
    assert bool(said) == bool(says)
    assert says in printable(said)
    assert "\x1b" not in said
    assert len(printable(said)) < 6000


# Files that hold no rows, and text that is not UTF-8


def archive(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr(name, ROW_LINES)
    return content.getvalue()


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        file.addfile(tarfile.TarInfo("train.jsonl"), io.BytesIO())
    return content.getvalue()


@pytest.mark.parametrize(("content", "what", "do"), [
    (gzip.compress(tar(), mtime=0), "an archive", "unpack it"),
    (archive("xl/workbook.xml"), "an Excel file", "CSV (UTF-8)"),
    (SAFETENSORS, "a binary file", "unpack it"),
    (pickle.dumps(ROWS), "a binary file", "unpack it"),
    (b"%PDF-1.7\n", "a binary file", "as JSON lines or CSV"),
    (bytes(range(256)) * 4, "a binary file", "in UTF-8"),
    ("Once upon a time there was iron.\nAnd gold.\n", "neither JSON lines nor a table", "completion"),
    ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS", "git lfs pull"),
    ("", "has no rows", ""),
    (lines(ROWS[:1]).encode("cp1252"), "not UTF-8", "iconv -f WINDOWS-1252 -t UTF-8"),
    (ROW_LINES.encode() + '{"text": "é'.encode()[:-1], "not UTF-8", "copy the file again"),
])  # fmt: skip
def test_a_file_that_is_no_rows_is_called_what_it_is(tmp_path: Path, content: bytes | str, what: str, do: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert (str(path) in caught.value.where, what in caught.value.what, do in caught.value.do) == (True, True, True)
    if "-f WINDOWS" in do:
        assert caught.value.where.endswith("train.jsonl:1 (0xe9)")


def test_a_token_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "00000_train.ds"
    path.write_text(ROW_LINES)
    with pytest.raises(DataError, match=r"is a token file(?s:.*)00000_train\.ds(?s:.*)give the text itself \(\.jsonl"):
        read_rows(path)


def test_what_is_no_file_is_said_and_byte_order_marks_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"  # marks also where files were joined
    path.write_bytes(("\ufeff" + ROW_LINES.replace("\n", "\r\n\r\n\ufeff") + '{"text": "a\u2028b"}').encode())
    assert values(path) == [*ROWS, {"text": "a\u2028b"}]
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        read_rows(tmp_path)


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


MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
KEYS = st.sampled_from(
    ["messages", "role", "content", "from", "value", "conversations", "prompt", "completion", "text", "tools", "system",
     "instruction", "input", "output", "history", "tool_calls", "function", "name", "arguments", "label", "chosen",
     "weight", "images", "question", "answer", "functions", "function_call", "train", "reasoning_content", "x"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["user", "assistant", "system", "human", "gpt", "tool", "function_call", "", "[]", "{", "\ud83d"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)


def refusals(path: Path) -> list[str]:
    """What is said of the file and of its rows; any other error than ours ends the test."""
    found = []
    try:
        found += [refusal_of_row(value) for _, value in rows_of(path)]
    except DataError as error:
        found += [error.what, error.where]
    return found


def refusal_of_row(value: object) -> str:
    try:
        if isinstance(value, RowError):
            raise value
        parse_row(value)
    except RowError as error:
        return str(error)
    return "none"


@given(
    st.sampled_from(sorted(CONTAINERS)), st.sampled_from(ENCODINGS), st.sampled_from(sorted(COMPRESSIONS)), st.data()
)
@MANY
def test_any_damage_of_a_good_file(container: str, encoding: str, compression: str, data: st.DataObject) -> None:
    """Bytes changed, taken out or cut off."""
    content = bytearray(COMPRESSIONS[compression][1](CONTAINERS[container][1](ROWS).encode(encoding)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from("sdc"))
        if kind == "s":
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "d" and len(content) > 2:
            del content[place]
        elif len(content) > 8:
            del content[max(4, place) :]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_bytes(content)
        assert all(refusals(Path(folder) / "a"))


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_any_damage_of_a_binary_table(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    whole = parquet(path, ROWS) if kind == "parquet" else arrow_stream(path, ROWS, file=kind == "file")
    content = whole.read_bytes()
    for place in range(4, len(content), max(1, len(content) // 60)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        assert all(refusals(path))
        path.write_bytes(content[:place])
        assert all(refusals(path))


@given(VALUES)
@MANY
def test_any_json_is_a_row_that_survives_writing_or_one_sentence(value: object) -> None:
    said = refusal_of_row(value)
    assert "\n" not in said
    if said == "none":
        row = parse_row(value)
        assert parse_row(json.loads(json.dumps(row.as_json(), ensure_ascii=False))) == row


@given(st.binary(max_size=200) | st.lists(VALUES, max_size=4).map(lambda rows: json.dumps(rows).encode()))
@MANY
def test_a_repair_is_whole_and_needs_no_other_or_is_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a").write_bytes(content)
        try:
            done = Repair(folder / "a", folder / "b.jsonl", drop_bad=True)
        except SafetrainError:
            assert sorted(path.name for path in folder.iterdir()) == ["a"]
            return
        assert (folder / "a").read_bytes() == content
        again = Repair(folder / "b.jsonl", folder / "c.jsonl")
        assert (again.read, again.written, again.changes) == (done.written, done.written, {})
        assert (folder / "b.jsonl").read_bytes() == (folder / "c.jsonl").read_bytes()


@pytest.mark.parametrize("compression", ["gzip", "Zstandard"])
def test_a_bomb_is_refused_before_it_is_decompressed(tmp_path: Path, compression: str) -> None:
    """Hundreds of pieces that each unpack to a MiB: one line, and many."""
    pack, path = COMPRESSIONS[compression][1], tmp_path / "a.jsonl"
    line = b'{"text": "' + b"x" * (MIB - 13) + b'"}\n'
    one_line, many = pack(b'{"text": "') + pack(b"x" * MIB) * 300, pack(line) * 300
    for content, said in ((one_line, "longer than 6 MiB"), (many, "decompresses to more than 200 times its size")):
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(DataError, match=said):
            sum(1 for _ in rows_of(path))
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
        tracemalloc.stop()
