"""Rows in the forms of other programs are refused with a command, and the command makes the right rows of them."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import chat
from tests.core.data.reading import read_rows
from tests.core.data.test_rows import CALL, IRON, TOOL, of, refusal, turn


def converted(value: object, tmp_path: Path, number: int = 0, more: Sequence[object] = ()) -> list[Any]:
    """The rows that the command of the refusal makes of it and ``more``, as the reader has them."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (value, *more)))
    command = re.findall(r"jq -c '[^']*' old\.jsonl > new\.jsonl", refusal(value))[number]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    return [sourced.row.as_json() for sourced in read_rows(tmp_path / "new.jsonl")]


TWO_TURNS = (turn("user", "x"), turn("assistant", "y"), turn("user", "q"), turn("assistant", "a"))


@pytest.mark.parametrize(
    ("value", "name", "rows"),
    [
        (
            {"instruction": "Symbol?", "input": "iron", "output": "Fe"},
            "Alpaca's form (instruction, input, output)",
            [{"prompt": "Symbol?\n\niron", "completion": "Fe"}],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "Alpaca", [{"prompt": "q", "completion": "a"}]),
        (
            {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["x", "y"]]},
            "Alpaca",
            [of(turn("system", "s"), *TWO_TURNS)],
        ),
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "open_qa"},
            "Dolly's form (instruction, context, response)",
            [{"prompt": "q\n\nc", "completion": "a"}],
        ),
        ({"question": "1+1", "answer": 2}, "a question and its answer", [{"prompt": "1+1", "completion": "2"}]),
        ({"prompt": "q", "response": "a"}, "a question and its answer", [{"prompt": "q", "completion": "a"}]),
        ({"query": "q", "response": "a"}, "a question and its answer", [{"prompt": "q", "completion": "a"}]),
        (
            {
                "id": "seed_task_0",
                "instruction": "q",
                "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b"}],
            },
            "self-instruct's seed tasks",
            [{"prompt": "q", "completion": "a"}, {"prompt": "q\n\ni", "completion": "b"}],
        ),
        (
            {"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1}]},
            "ShareGPT's form (conversations, from, value)",
            [chat("q", "a")],
        ),
        ({"conversations": chat("q", "a")["messages"]}, "a chat under another name", [chat("q", "a")]),
        (
            {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "from and value (ShareGPT's form)",
            [chat("q", "a")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Weather?"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Lisbon"}}'},
                    {"from": "observation", "value": "sunny"},
                    {"from": "gpt", "value": "It is sunny."},
                ],
                "tools": json.dumps([TOOL["function"]]),
            },
            "ShareGPT's form",
            [
                of(
                    turn("user", "Weather?"),
                    turn("assistant", None, tool_calls=[{"function": CALL["function"], "type": "function"}]),
                    turn("tool", "sunny"),
                    turn("assistant", "It is sunny."),
                    tools=[TOOL],
                )
            ],
        ),
        (
            {
                "systemInstruction": {"parts": [{"text": "s"}]},
                "contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}],
            },
            "Gemini's form",
            [of(turn("system", "s"), turn("user", "q"), turn("assistant", "a"))],
        ),
        ({"data": [chat("q", "a"), IRON]}, "if the rows are in data", [chat("q", "a"), IRON]),
        (of(turn("human", "q"), turn("assistant", "a")), "role 'human': write 'user'", [chat("q", "a")]),
        (
            of(turn("user", "q"), turn("assistant", "a", train=True), turn("assistant", "b", train=False)),
            "is written weight",
            [of(turn("user", "q"), turn("assistant", "a"), turn("assistant", "b", weight=0))],
        ),
        ({**chat("q", "a"), "label": True}, "label: answers marked good and bad (KTO)", [chat("q", "a")]),
        ({**chat("q", "a"), "label": "easy"}, "label changes what the row means", [chat("q", "a")]),
        (
            {"text": "fine film", "label": 1},
            "label: data for a classifier",
            [{"prompt": "fine film", "completion": "1"}],
        ),
        ({**chat("q", "a"), "weight": 2}, "weight: rows cannot be weighted", [chat("q", "a")]),
    ],
)
def test_other_forms_of_a_row_come_with_the_command(value: object, name: str, rows: list[Any], tmp_path: Path) -> None:
    assert name in refusal(value)
    assert converted(value, tmp_path) == rows


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a"}),
        ({"question": "q", "system": "", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a"}),
        ({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"}, {"prompt": "q\n\ni", "completion": "a"}),
        ({"chosen": "Human: q Assistant: a", "rejected": "…"}, {"text": "Human: q Assistant: a"}),
        ({"prompt": "q", "chosen": chat("q", "a")["messages"], "rejected": []}, chat("q", "a")),
        ({"prompt": [turn("user", "q")], "chosen": [turn("assistant", "a")], "rejected": []}, chat("q", "a")),
        ({"chosen_messages": chat("q", "a")["messages"], "rejected_messages": []}, chat("q", "a")),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            chat("q", "a"),
        ),
        (
            {
                "input": {"messages": [turn("user", "q")], "tools": []},
                "preferred_output": [turn("assistant", "a")],
                "non_preferred_output": [turn("assistant", "b")],
            },
            chat("q", "a"),
        ),
    ],
)
def test_preference_data_is_refused_and_the_chosen_answers_can_be_kept(
    value: object, row: object, tmp_path: Path
) -> None:
    assert refusal(value).startswith("preference data (")
    assert converted(value, tmp_path) == [row]


@pytest.mark.parametrize("key", ["images", "image", "videos", "audio", "audios"])
def test_images_are_refused_by_name(key: str, tmp_path: Path) -> None:
    value = {**chat("<image>q", "a"), key: ["1.jpg"]}
    assert refusal(value).startswith(f"{key}: only text can be trained here; to keep the rows without it")
    assert converted(value, tmp_path, more=[{**IRON, key: []}, IRON]) == [IRON, IRON]


def test_openais_old_form_is_named_and_converted_at_once(tmp_path: Path) -> None:
    value = of(
        turn("user", "Weather?"),
        turn("assistant", None, function_call={"name": "weather", "arguments": '{"city": "Lisbon"}'}),
        turn("function", "sunny", name="weather"),
        turn("assistant", "It is sunny."),
    )
    functions = {**value, "functions": [TOOL["function"]]}
    assert refusal(functions).startswith("functions is OpenAI's old form: write tools")
    assert "function_call is OpenAI's old form: write tool_calls" in refusal(value)
    assert "role 'function' is OpenAI's old form: write 'tool'" in refusal(of(turn("function", "sunny")))
    (row,) = converted(functions, tmp_path)
    assert row["tools"] == [TOOL]
    assert row["messages"][1]["tool_calls"] == [{"type": "function", "function": CALL["function"]}]
    assert row["messages"][2] == turn("tool", "sunny", name="weather")


def test_a_row_that_can_be_read_in_two_ways_names_both(tmp_path: Path) -> None:
    value = {"instruction": "q", "input": "", "output": "a", "text": "### q\n### a"}
    said = refusal(value)
    assert "can be read in two ways" in said
    assert "Alpaca's form" in said
    assert converted(value, tmp_path, 0) == [{"text": "### q\n### a"}]
    assert converted(value, tmp_path, 1) == [{"prompt": "q", "completion": "a"}]
