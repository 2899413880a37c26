"""Bad rows are named by file, line and column; good ones of every format are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
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


def test_every_format_of_mlx_lm_is_read_and_survives_writing(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", [chat("é?", "á."), {"prompt": "p", "completion": "c"}, {"text": "t"}, TOOL_ROW])
    rows = [sourced.row for sourced in read_rows(path)]
    assert [row.format for row in rows] == ["chat", "completions", "text", "tools"]
    assert [each.row for each in read_rows(write_jsonl("b.jsonl", [row.as_json() for row in rows]))] == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "a.jsonl:3:15: not valid JSON: Expecting value (the line is cut off"),
        ('{"text": "cut', "a.jsonl:3:10: not valid JSON: Unterminated string"),
        ("{'text': 't'}", "a.jsonl:3:2: not valid JSON: Expecting property name enclosed in double quotes (this is"),
        ('{"text": None}', "a.jsonl:3:10: not valid JSON: Expecting value (this is how Python prints it"),
        ('{"text": "t"} {"text": "u"}', "a.jsonl:3:15: not valid JSON: Extra data"),
        (r'{"text": "C:\data"}', r"a.jsonl:3:13: not valid JSON: Invalid \escape"),
        ("[" * 100_000, "a.jsonl:3: brackets are nested"),
        ('{"text": "t", "text": "u"}', "a.jsonl:3: the key 'text' occurs twice in one object"),
        ('{"question": "q"}', "a.jsonl:3: question has no answer next to it"),
        ('["q"]', "a.jsonl:3: a row must be a JSON object, not a list"),
        ('{"messages": []}', "a.jsonl:3: messages must be a list with at least one message"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "a.jsonl:3: no assistant turn"),
        ('{"prompt": "p", "completion": ""}', "a.jsonl:3: completion is empty"),
        ('{"text": -Infinity}', "a.jsonl:3: -Infinity is not valid JSON"),
        (r'{"text": "\ud83d"}', "a.jsonl:3: text holds half a surrogate pair"),
    ],
)
def test_a_bad_row_is_named(write_jsonl: Write, line: str, says: str) -> None:
    path = write_jsonl("a.jsonl", [chat("q", "a"), "", line, chat("q", "b")])
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert says in str(caught.value)
    assert caught.value.exit_code == 3


def test_bad_rows_are_counted_the_first_listed_and_a_fault_of_many_told_once(
    write_jsonl: Write, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": f"robot {number}"}]} for number in range(25)]
    with pytest.raises(DataError, match="1 row cannot be read") as caught:
        gate(write_jsonl("a.jsonl", rows), tmp_path)
    assert str(caught.value).count("expected one of system") == 20
    assert "and 5 more" in str(caught.value)
    path = write_jsonl("b.jsonl", [*[{"question": "q", "reply to": "a"}] * 30, "{"])
    with pytest.raises(DataError, match="30 rows cannot be read") as caught:
        gate(path, tmp_path)
    assert str(caught.value).count("unknown keys (question, reply to)") == 1
    assert f"{path}:1; {path}:2; {path}:3; …: 30 rows" in str(caught.value)
    assert f"{path}:31:2: 1 row cannot be read: not valid JSON" in str(caught.value)


def test_byte_order_marks_are_no_fault_also_where_files_were_joined(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "ok"}\r\n\xef\xbb\xbf{"text": "two"}\r\n')
    assert len(read_rows(path)) == 2
