"""One file of each container, compression and encoding is written, and read as the rows that it says."""

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet as parquet_files

from safetrain.core.errors import DataError
from safetrain.data.files import rows_of
from tests.conftest import chat
from tests.data.planted import COMPRESSIONS, CONTAINERS, ENCODINGS, ROWS, arrow_stream, lines, parquet, table
from tests.data.reading import gate, read_rows, refusal_of, values

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


def test_tables_of_arrow(tmp_path: Path) -> None:
    assert values(parquet(tmp_path / "a.parquet", ROWS)) == ROWS
    assert values(arrow_stream(tmp_path / "data-00000-of-00001.arrow", ROWS)) == ROWS
    assert values(arrow_stream(tmp_path / "a.feather", ROWS, file=True)) == ROWS


def test_a_chat_in_a_table_is_read_with_nulls_and_other_types(tmp_path: Path) -> None:
    row = {**chat("q", "a"), "at": None, "score": 0.5}
    row["messages"] = [{**message, "tool_calls": None} for message in chat("q", "a")["messages"]]  # type: ignore[attr-defined]
    path = parquet(tmp_path / "a.parquet", [row])
    (sourced,) = read_rows(path)
    assert sourced.row.as_json() == chat("q", "a")
    assert (sourced.where, sourced.row.ignored_keys) == (f"{path}, row 1", ("score",))


def test_bytes_in_a_table_are_text_or_refused(tmp_path: Path) -> None:
    rows = [{"prompt": b"q", "completion": "ação".encode()}, {"prompt": b"q", "completion": b"a\xe7"}]
    path = parquet(tmp_path / "a.parquet", rows)
    assert next(value for _, value in rows_of(path)) == {"prompt": "q", "completion": "ação"}
    assert f"{path}, row 2: completion must be a string, not null" in refusal_of(path)


def test_times_to_the_nanosecond_do_not_refuse_the_table(tmp_path: Path) -> None:
    at = pyarrow.timestamp("ns")
    columns = {"at": pyarrow.array([1, None], at), "all": pyarrow.array([[1], []], pyarrow.list_(at))}
    parquet_files.write_table(pyarrow.table({"text": ["a", "b"], **columns}), tmp_path / "a.parquet")
    assert [value for _, value in rows_of(tmp_path / "a.parquet")] == [{"text": "a"}, {"text": "b"}]


def test_an_empty_cell_of_csv_is_null_and_one_of_json_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label,messages,chosen,input\nq,a,,,,\n")
    assert values(path) == [{"prompt": "q", "completion": "a"}]
    path.write_text(table([{"id": "1", "messages": json.dumps(chat("q", "a")["messages"])}], ","))
    assert values(path) == [chat("q", "a")]


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_place_is_the_line_and_in_arrays_and_tables_the_row(tmp_path: Path, container: str) -> None:
    path = tmp_path / f"a{CONTAINERS[container][0]}"
    path.write_text(CONTAINERS[container][1](ROWS), newline="")
    assert [sourced.where.removeprefix(str(path)) for sourced in read_rows(path)] == PLACES[container]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "a.jsonl:3:15: not valid JSON: Expecting value (the line is cut off"),
        ("{'text': 't'}", "a.jsonl:3:2: not valid JSON: Expecting property name enclosed in double quotes (this is"),
        ('{"text": None}', "a.jsonl:3:10: not valid JSON: Expecting value (this is how Python prints it"),
        (r'{"text": "C:\data"}', r"a.jsonl:3:13: not valid JSON: Invalid \escape"),
        ('{"question": "q"}', "a.jsonl:3: question has no answer next to it"),
        ('["q"]', "a.jsonl:3: a row must be a JSON object, not a list"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "a.jsonl:3: no assistant turn"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(chat("q", "a")), "", line, json.dumps(chat("q", "b"))]))
    assert says in refusal_of(path)


def test_bad_rows_are_counted_the_first_listed_and_a_fault_of_many_told_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": [{"role": f"robot {number}"}]} for number in range(25)]))
    with pytest.raises(DataError, match="1 row cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("expected one of system") == 20
    assert "and 5 more" in str(caught.value)
    path.write_text(lines([{"question": "q", "reply to": "a"}] * 30) + "{\n")
    with pytest.raises(DataError, match="30 rows cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("unknown keys (question, reply to)") == 1
    assert f"{path}:1; {path}:2; {path}:3; …: 30 rows" in str(caught.value)
    assert f"{path}:31:2: 1 row cannot be read: not valid JSON" in str(caught.value)


WITH_PAGES = {"id": 1, "documents": [{"title": "t", "text": "x" * 70_000}], "question": "q", "answer": "a"}


@pytest.mark.parametrize("rows", [[WITH_PAGES], [WITH_PAGES, *ROWS]])
def test_a_list_in_the_first_row_is_not_taken_for_the_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "a.json"
    path.write_text(lines(rows))
    assert len(values(path)) == len(rows)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"version": "1", "data": ROWS * 600}), "its rows under the key 'data'"),
        ("\n".join(json.dumps(row, indent=2) for row in ROWS), "one object per line"),
        (
            lines([{"messages": chat("q", "a")["messages"]}]).removeprefix('{"messages": '),
            "lists of messages without",
        ),
        (table(ROWS, "|"), "not a table with a header and commas"),
        ("sep=;\nprompt;completion\nq;a\n", "not a table with a header and commas"),
    ],
)
def test_forms_that_are_not_read_are_refused_with_what_to_write(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert says in refusal_of(path)


@pytest.mark.parametrize(
    ("text", "says", "where"),
    [
        ('[{"text": "a"}, {"text": "b"}', "expected a comma or the end of the array", ", row 2 (line 1)"),
        ('[\n{"text": "a"},\n{"text":\n b}\n]', "not valid JSON: Expecting value", ", row 2 (line 4)"),
        ('[{"text": "a"}]\n{"text": "b"}', "there is text after the array", ":1"),
        ('[{"text": "a"} {"text": "b"}]', "expected a comma", ", row 1 (line 1)"),
        ('prompt,completion\nq,a\n"q,a\n', "unexpected end of data", ", row 2 (line 3)"),
        ("prompt,prompt\nq,a\n", "two columns named prompt", ":1"),
    ],
)
def test_where_json_and_tables_break_is_said(tmp_path: Path, text: str, says: str, where: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert says in caught.value.what
    assert caught.value.where == f"{path}{where}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (THREE_BAD, ", row 2 (line 1): the key 'text' occurs twice"),
        (THREE_BAD, ", row 3 (line 1): NaN is not valid JSON"),
        ('\nprompt,completion\n"one\ntwo",a\n\nq,b\n"three\nfour",\n', ", row 3 (line 7): completion must be a string"),
        ("prompt,completion\nq,a,b\n", ", row 1 (line 2): 3 cells, but the header has 2 columns"),
        ("prompt,completion\nq,\n", ", row 1 (line 2): completion must be a string, not null or an empty cell"),
        ("id,messages\n1,[oops\n", ", row 1 (line 2): the cell messages is not JSON"),
    ],
)
def test_bad_rows_of_arrays_and_tables_are_named_and_the_rest_is_read_on(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("separator", [";", ",", "\t"])
def test_cells_that_excel_leaves_empty_are_passed_over(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.txt"
    rows = ["question;answer;;", "q;a;;", ";;;", " ;;;", "r;b;;", ";;;"]
    path.write_bytes(("\ufeff" + "\r\n".join(rows).replace(";", separator)).encode())
    assert values(path) == [{"prompt": "q", "completion": "a"}, {"prompt": "r", "completion": "b"}]
    assert [sourced.where for sourced in read_rows(path)] == [f"{path}, row 1 (line 2)", f"{path}, row 2 (line 5)"]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """14 MB of each container in less than 10 MB."""
    row = json.dumps({"prompt": "q" * 5000, "completion": "a" * 5000})
    many = 1_400
    files = {"a.jsonl": f"{row}\n" * many, "a.json": f"[{','.join([row] * many)}]",
             "b.csv": "prompt,completion\n" + f"{'q' * 5000},{'a' * 5000}\n" * many}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    files.clear()
    for name in ("a.jsonl", "a.json", "b.csv"):
        tracemalloc.start()
        assert sum(1 for _ in rows_of(tmp_path / name)) == many
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10e6, name
