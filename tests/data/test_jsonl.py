"""Bad rows are named by file, line and column; good ones of every format are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.data.forms import parse_row
from tests.conftest import chat
from tests.data.reading import gate, read_rows

Write = Callable[..., Path]

TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": "{}"}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ],
    "tools": [{"type": "function", "function": {"name": "get"}}],
}


def test_every_format_of_mlx_lm_is_read(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", [chat("q", "a"), {"prompt": "p", "completion": "c"}, {"text": "t"}, TOOL_ROW])
    assert [sourced.row.format for sourced in read_rows(path)] == ["chat", "completions", "text", "tools"]


def test_rows_survive_writing(write_jsonl: Write) -> None:
    rows = [s.row for s in read_rows(write_jsonl("a.jsonl", [chat("é?", "á."), {"text": "t"}, TOOL_ROW]))]
    written = write_jsonl("b.jsonl", [row.as_json() for row in rows])
    assert [s.row for s in read_rows(written)] == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "a.jsonl:3:15: not valid JSON: Expecting value (the line is cut off"),
        ('{"text": "cut', "a.jsonl:3:10: not valid JSON: Unterminated string"),
        (
            "{'text': 't'}",
            "a.jsonl:3:2: not valid JSON: Expecting property name enclosed in double quotes (as Python",
        ),
        ('{"text": None}', "a.jsonl:3:10: not valid JSON: Expecting value (as Python prints it"),
        ('{"text": "t"} {"text": "u"}', "a.jsonl:3:15: not valid JSON: Extra data"),
        ('{"text": "a\tb"}', "a.jsonl:3:12: not valid JSON: Invalid control character"),
        (r'{"text": "C:\data"}', r"a.jsonl:3:13: not valid JSON: Invalid \escape"),
        ('{"text": "t", "n": ' + 5000 * "1" + "}", "a.jsonl:3: a number has more digits than can be read"),
        ("[" * 100_000, "a.jsonl:3: brackets are nested"),
        ('{"text": ' + "[" * 100_000, "a.jsonl:3: brackets are nested"),
        ('{"text": "t", "text": "u"}', "a.jsonl:3: the key 'text' stands twice in one object"),
        ('{"messages": [{"role": "user", "role": "user"}]}', "a.jsonl:3: the key 'role' stands twice"),
        ('{"question": "q"}', "a.jsonl:3: question has no answer beside it"),
        ('["q"]', "a.jsonl:3: a row must be a JSON object, this is a list"),
        ('{"messages": []}', "a.jsonl:3: messages must be a list with at least one message"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "a.jsonl:3: no assistant turn"),
        (
            '{"messages": [{"role": "robot", "content": "q"}]}',
            "a.jsonl:3: messages[0].role is 'robot'; expected one of",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "a.jsonl:3: messages[0].content must be a text"),
        ('{"messages": [{"role": "assistant", "content": " "}]}', "a.jsonl:3: messages[0] is an empty assistant turn"),
        ('{"prompt": "p", "completion": ""}', "a.jsonl:3: completion is empty"),
        ('{"text": NaN}', "a.jsonl:3: NaN is not valid JSON"),
        ('{"text": -Infinity}', "a.jsonl:3: -Infinity is not valid JSON"),
        (r'{"text": "\ud83d"}', "a.jsonl:3: text holds half a surrogate pair"),
        (
            r'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\ud83d"}]}',
            "a.jsonl:3: messages[1].content holds half a surrogate pair",
        ),
    ],
)
def test_a_bad_row_is_named(write_jsonl: Write, line: str, says: str) -> None:
    path = write_jsonl("a.jsonl", [chat("q", "a"), "", line, chat("q", "b")])
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert says in str(caught.value)
    assert caught.value.exit_code == 3


def test_all_bad_rows_are_counted_and_the_first_twenty_listed(write_jsonl: Write, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"robot {number}"}]} for number in range(25)]
    with pytest.raises(DataError, match="1 row cannot be read") as caught:
        gate(write_jsonl("a.jsonl", rows), tmp_path)
    assert str(caught.value).count("expected one of system") == 20
    assert "and 5 more" in str(caught.value)


def test_a_fault_that_many_rows_share_is_told_once(write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl("a.jsonl", [*[{"question": "q", "reply to": "a"}] * 30, "{"])
    with pytest.raises(DataError, match="30 rows cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("unknown keys (question, reply to)") == 1
    assert f"{path}:1; {path}:2; {path}:3; …: 30 rows" in str(caught.value)
    assert f"{path}:31:2: 1 row cannot be read: not valid JSON" in str(caught.value)


def test_missing_empty_and_foreign_encodings_are_clear(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(DataError, match="has no rows"):
        read_rows(empty)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2 \(0xe9\)"):
        read_rows(latin)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "ok"}\r\n{"text": "two"}\r\n')
    assert len(read_rows(path)) == 2


def test_a_byte_order_mark_in_the_middle_of_joined_files_is_none(tmp_path: Path) -> None:
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "ok"}\n\xef\xbb\xbf{"text": "two"}\n')
    assert len(read_rows(path)) == 2


def test_identity_ignores_the_order_of_keys() -> None:
    one = parse_row({"messages": [{"role": "assistant", "content": "a"}]})
    two = parse_row({"messages": [{"content": "a", "role": "assistant"}]})
    assert one.identity() == two.identity()
