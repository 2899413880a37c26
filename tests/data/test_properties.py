"""Any bytes give rows or a clear error; what is written is read back as the same."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safetrain.core.errors import DataError, SafetrainError
from safetrain.data.files import rows_of
from safetrain.data.forms import parse_row
from safetrain.data.json_rows import RowError
from safetrain.data.repair import repair
from tests.data.planted import COMPRESSIONS, CONTAINERS, ENCODINGS, ROWS, arrow_stream, parquet

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
            done = repair(folder / "a", folder / "b.jsonl", drop_bad=True)
        except SafetrainError:
            assert sorted(path.name for path in folder.iterdir()) == ["a"]
            return
        assert (folder / "a").read_bytes() == content
        again = repair(folder / "b.jsonl", folder / "c.jsonl")
        assert (again.read, again.written, again.changes) == (done.written, done.written, {})
        assert (folder / "b.jsonl").read_bytes() == (folder / "c.jsonl").read_bytes()
