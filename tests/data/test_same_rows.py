"""A row means the same in every container: the same tokens and labels, or one sentence that names the difference."""

import csv
import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as parquet_files

from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.files import rows_of
from safetrain.data.findings import Findings
from safetrain.data.folders import DataFiles
from safetrain.data.tokenize import DataSettings, RowReader
from safetrain.data.validate import validate
from tests.data.models import model_with
from tests.data.reading import lines, refusal_of, values

WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], object]

TEXT = pyarrow.string()
ARGUMENTS = pyarrow.struct(
    {"amount": pyarrow.int64(), "city": TEXT, "exact": pyarrow.bool_(), "tags": pyarrow.list_(TEXT),
     "where": pyarrow.struct({"lat": pyarrow.float64(), "name": TEXT})}
)  # fmt: skip
KIND = pyarrow.struct({"enum": pyarrow.list_(TEXT), "type": TEXT})
PROPERTIES = pyarrow.struct(dict.fromkeys(ARGUMENTS.names, KIND))


def columns_of(content: Any, arguments: Any, properties: Any) -> Any:
    """The schema of rows of chats with tools."""
    call = pyarrow.struct({"type": TEXT, "function": pyarrow.struct({"name": TEXT, "arguments": arguments})})
    turn = {"role": TEXT, "content": content, "name": TEXT, "tool_calls": pyarrow.list_(call),
            "weight": pyarrow.int64()}  # fmt: skip
    parameters = pyarrow.struct({"type": TEXT, "properties": properties})
    tool = {"type": TEXT, "function": pyarrow.struct({"name": TEXT, "parameters": parameters})}
    lists = {"messages": pyarrow.list_(pyarrow.struct(turn)), "tools": pyarrow.list_(pyarrow.struct(tool))}
    return pyarrow.schema({**lists, "system": TEXT, "source": pyarrow.null()})


def as_text(value: object) -> object:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def with_text(rows: Rows, *, deep: bool) -> Rows:
    """The rows with messages and tools as JSON text; with ``deep``, each turn, call and parameters."""
    if not deep:
        return [{key: as_text(item) for key, item in row.items()} for row in rows]
    changed: Rows = json.loads(json.dumps(rows))
    for row in changed:
        for message in row["messages"]:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = as_text(call["function"]["arguments"])
        for tool in row["tools"] or []:
            tool["function"]["parameters"] = as_text(tool["function"]["parameters"])
        row["messages"] = [as_text(message) for message in row["messages"]]
    return changed


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["messages", "tools", "system", "source"])
        writer.writeheader()
        writer.writerows(with_text(rows, deep=False))


def structs(rows: Rows) -> Any:
    """A table as pyarrow makes it: each struct has the fields of all rows."""
    is_text = all(isinstance(message["content"], str | None) for row in rows for message in row["messages"])
    content = TEXT if is_text else pyarrow.list_(pyarrow.struct({"type": TEXT, "text": TEXT}))
    return pyarrow.Table.from_pylist(rows, columns_of(content, ARGUMENTS, PROPERTIES))


def with_json(rows: Rows) -> Any:
    """A table as `datasets` makes it: turns and the parameters of tools have the type arrow.json."""
    turns = json_cells([turn for row in rows for turn in row["messages"]])
    ends = [sum(len(row["messages"]) for row in rows[:count]) for count in range(len(rows) + 1)]
    cells = {
        "messages": pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), turns),
        "tools": json_cells([row["tools"] for row in rows]),
        "system": pyarrow.array([row.get("system") for row in rows], TEXT).dictionary_encode(),
    }
    return pyarrow.table(cells)


def json_cells(cells: list[object]) -> Any:
    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(list(map(json.dumps, cells)), TEXT))


def write_arrow(path: Path, table: Any, *, file: bool) -> None:
    with (pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


CONTAINERS: dict[str, Write] = {
    "JSON array": lambda path, rows: path.write_text(json.dumps(rows)),
    "JSON text in JSON lines": lambda path, rows: path.write_text(lines(with_text(rows, deep=False))),
    "JSON text in parts of JSON lines": lambda path, rows: path.write_text(lines(with_text(rows, deep=True))),
    "CSV": write_csv,
    "Parquet": lambda path, rows: parquet_files.write_table(structs(rows), path, row_group_size=2),
    "Parquet without Arrow's schema": lambda path, rows: parquet_files.write_table(
        with_json(rows), path, store_schema=False
    ),
    "Parquet of datasets": lambda path, rows: parquet_files.write_table(with_json(rows), path),
    "Arrow stream": lambda path, rows: write_arrow(path, structs(rows), file=False),
    "Arrow stream of datasets": lambda path, rows: write_arrow(path, with_json(rows), file=False),
    "Arrow file": lambda path, rows: write_arrow(path, structs(rows), file=True),
}

WORDS = st.sampled_from(["iron", "São Tomé", '[{"role": "user"}]', '{"a": 1}', "null", " 1.0 ", 'a "b"\nc', "true"])
ARGUMENT = st.fixed_dictionaries({}, optional={
    "city": WORDS, "amount": st.integers(0, 2**53), "exact": st.booleans(), "tags": st.lists(WORDS, max_size=2),
    "where": st.fixed_dictionaries({}, optional={"lat": st.sampled_from([0.5, -1.25, 3.0]), "name": WORDS}),
})  # fmt: skip
PROPERTY = st.fixed_dictionaries({"type": WORDS}, optional={"enum": st.just(["a"])})


def ordered(value: Any) -> Any:
    """With the keys of each object in one order, as Arrow keeps them."""
    return {key: ordered(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


@st.composite
def rows_of_chats(draw: st.DrawFn) -> Rows:
    """Rows of chats; some answer with text and some with calls, whose arguments differ from row to row."""
    in_parts = draw(st.booleans())

    def turn(role: str, text: str | None, **more: object) -> dict[str, object]:
        parts = [{"type": "text", "text": each} for each in (text, "!")] if text and in_parts else text
        nulls = {"name": None} if draw(st.booleans()) else {}
        return {"role": role, "content": parts, **nulls, **more}

    rows: Rows = []
    for _ in range(draw(st.integers(1, 4))):
        messages = [turn("system", draw(WORDS))] if draw(st.booleans()) else []
        for _ in range(draw(st.integers(0, 2))):
            call = {"type": "function", "function": {"name": "look_up", "arguments": ordered(draw(ARGUMENT))}}
            weight: dict[str, object] = {"weight": draw(st.sampled_from([0, 1, None]))} if draw(st.booleans()) else {}
            messages += [turn("user", draw(WORDS)), turn("assistant", None, tool_calls=[call], **weight)]
            messages += [turn("tool", draw(WORDS))]
        messages += [turn("user", draw(WORDS)), turn("assistant", draw(WORDS))]
        properties = ordered(draw(st.dictionaries(st.sampled_from(ARGUMENTS.names), PROPERTY)))
        function = {"name": "look_up", "parameters": {"type": "object", "properties": properties}}
        tool = {"type": "function", "function": function}
        rows.append({"messages": messages, "tools": draw(st.sampled_from([[tool], [], None]))})
    return rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(model_with(tmp_path_factory.mktemp("model"), WITH_TOOLS))


def tokens_of(path: Path, tokenizer: ChatTokenizer) -> list[tuple[list[int], list[bool]]]:
    """The ids and labels of every row."""
    findings = Findings()
    reader = RowReader(DataFiles(("train",), (path,)), tokenizer, DataSettings(), findings)
    rows = [row for _, block in reader.blocks() for row in block]
    findings.refuse_errors()
    return [(row.tokens.ids.tolist(), row.tokens.trained.tolist()) for row in rows if row.tokens is not None]


@given(rows_of_chats())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_same_rows_have_the_same_tokens_and_labels_in_every_container(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: ChatTokenizer, rows: Rows
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_text(lines(rows))
    expected = tokens_of(folder / "a.jsonl", tokenizer)
    assert len(expected) == len(rows)
    for name, write in CONTAINERS.items():
        write(folder / name, rows)
        assert tokens_of(folder / name, tokenizer) == expected, name


# Nulls, and the types of columns


def calling(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": turns, "tools": None, "system": None, "source": None}


def test_a_null_that_the_user_wrote_is_kept_and_one_that_a_struct_adds_is_not(tmp_path: Path) -> None:
    rows = [calling({"city": None, "tags": [None]}), calling({"amount": 1, "where": {"name": None}})]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    kept = values(tmp_path / "a.jsonl")
    assert '{"city": null, "tags": [null]}' in json.dumps(kept)
    for name in ("CSV", "JSON text in JSON lines", "JSON text in parts of JSON lines", "Parquet of datasets"):
        CONTAINERS[name](tmp_path / name, rows)
        assert values(tmp_path / name) == kept, name
    CONTAINERS["Parquet"](tmp_path / "a.parquet", rows)
    first, second = (row["messages"][1]["tool_calls"][0]["function"] for row in values(tmp_path / "a.parquet"))  # type: ignore[index]
    assert (first["arguments"], second["arguments"]) == ({"tags": [None]}, {"amount": 1, "where": {}})
    pairs = pyarrow.array([[("city", None), ("unit", "km")]], pyarrow.map_(TEXT, TEXT))  # a map has a row's own keys
    parquet_files.write_table(pyarrow.table({"at": pairs}), tmp_path / "b.parquet")
    assert [value for _, value in rows_of(tmp_path / "b.parquet")] == [{"at": {"city": None, "unit": "km"}}]


NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(("array", "value"), [
    (pyarrow.array(["a"], pyarrow.large_string()), "a"),
    (pyarrow.array(["a"], pyarrow.string_view()), "a"),
    (pyarrow.array(["a"]).dictionary_encode(), "a"),
    (pyarrow.array([["a", None]], pyarrow.list_view(TEXT)), ["a", None]),
    (pyarrow.array([["a"]], pyarrow.list_(TEXT, 1)), ["a"]),
    (pyarrow.array([0.1], pyarrow.float32()), 0.1),
    (pyarrow.array([Decimal("1.50")]), "1.50"),
    (pyarrow.array([date(2024, 5, 1)]), "2024-05-01"),
    (pyarrow.array([NOON]), "2024-05-01 12:00:00+00:00"),
    (pyarrow.array([{"at": 1}], pyarrow.struct({"at": pyarrow.timestamp("ns")})),
     {"at": "1970-01-01 00:00:00.000000001"}),
    (pyarrow.array([True]), True),
    (pyarrow.array([2**63 - 1]), 2**63 - 1),
    (pyarrow.array(["ação".encode()]), "ação"),
    (pyarrow.array([b"a\xe7"]), None),
    (pyarrow.array([""]), ""),
    (pyarrow.array(["1.0"]), "1.0"),
    (pyarrow.nulls(1), None),
    (pyarrow.array(['{"a": null}'], pyarrow.json_(pyarrow.large_string())), {"a": None}),
])  # fmt: skip
def test_each_type_of_column_is_the_value_that_json_lines_would_have(tmp_path: Path, array: Any, value: object) -> None:
    write_arrow(tmp_path / "a.arrow", pyarrow.table({"x": array}), file=False)
    assert [found for _, found in rows_of(tmp_path / "a.arrow")] == [{"x": value}]


@pytest.mark.parametrize(("table", "says"), [
    (pyarrow.table([["q"], ["a"]], ["text", "text"]), "two columns named text"),
    (pyarrow.table({"messages": pyarrow.array(['[{"role": NaN}]'], pyarrow.json_())}),
     "row 1: messages is a string that must be JSON: NaN is not"),
    (pyarrow.table({"text": [b"a\xe7"]}), "row 1: text must be a string, not null"),
    (pyarrow.table({"messages": ['[{"role": "user"']}), "row 1: messages is a string that must be JSON"),
    (pyarrow.table({"question": ["q"], "answer": [float("nan")]}), "completion contains NaN, or a number"),
])  # fmt: skip
def test_a_column_that_cannot_be_read_is_named(tmp_path: Path, table: Any, says: str) -> None:
    write_arrow(tmp_path / "a.arrow", table, file=False)
    assert says in refusal_of(tmp_path / "a.arrow")


def test_pairs_of_chats_as_json_text_are_chats_and_a_single_json_answer_stays_text(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "q"}
    chosen, rejected = ([asked, {"content": text, "role": "assistant"}] for text in "ab")
    rows: Rows = [{"prompt": "q", "chosen": chosen, "rejected": rejected}]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    (tmp_path / "b.jsonl").write_text(lines(with_text(rows, deep=False)))
    assert values(tmp_path / "a.jsonl") == values(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text(lines([{"prompt": "Write a chat.", "completion": json.dumps(chosen)}]))
    assert values(tmp_path / "c.jsonl") == [{"prompt": "Write a chat.", "completion": json.dumps(chosen)}]


def test_unused_keys_of_turns_and_arguments_that_are_not_json_are_findings_with_their_rows(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    asked = {"role": "user", "content": "q", "train": True}
    rows: Rows = [{"messages": [asked, {"role": "assistant", "content": "a", "weigth": 0, "reasoning": "so"}]}]
    for arguments in ('{"a": ', "[1]", '{"a": 1}'):
        row = calling(arguments)
        row["messages"][0]["content"] = arguments
        rows.append(row)
    (tmp_path / "a.jsonl").write_text(lines(rows))
    found = {finding.id: finding for finding in validate([tmp_path / "a.jsonl"], tokenizer.folder).findings}
    path = tmp_path / "a.jsonl"
    assert found["ARGUMENTS-NOT-JSON"].where == (f"{path}:2", f"{path}:3")
    assert "messages[].train, messages[].weigth" in found["KEYS-IGNORED"].message
    assert found["KEYS-IGNORED"].where == (f"{path}:1",)


def test_numbers_of_classes_are_their_names_where_datasets_has_written_them(tmp_path: Path) -> None:
    """As in the Parquet files of the Hub: the names stand in the schema's metadata."""
    table = pyarrow.table({"text": ["a", "b", "c"], "label": [1, 0, -1], "count": [1, 0, 2]})
    features = {
        "label": {"names": ["neg", "pos"], "_type": "ClassLabel"},
        "text": {"dtype": "string", "_type": "Value"},
    }
    named = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet_files.write_table(named, tmp_path / "a.parquet")
    rows = [row for _, row in rows_of(tmp_path / "a.parquet")]
    assert rows == [
        {"text": "a", "label": "pos", "count": 1},
        {"text": "b", "label": "neg", "count": 0},
        {"text": "c", "label": -1, "count": 2},
    ]
    for metadata in ("{", "[]", '{"info": {"features": {"label": {"_type": "ClassLabel"}}}}'):
        parquet_files.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "b.parquet")
        assert [row["label"] for _, row in rows_of(tmp_path / "b.parquet")] == [1, 0, -1]  # type: ignore[index]
