"""Rows in the forms of other programs are read as what they say; what means something else is refused by name."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.data.foreign_rows import checked_columns
from safetrain.core.data.rows import RowError, parse_row
from safetrain.core.errors import ConfigError
from tests.conftest import chat
from tests.core.data.reading import values
from tests.core.data.test_rows import CALL, IRON, TOOL, of, parsed, refusal, turn

TWO_TURNS = (turn("user", "x"), turn("assistant", "y"), turn("user", "q"), turn("assistant", "a"))
CALLED = {"type": "function", "function": CALL["function"]}
PAIR = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("value", "taken", "row"),
    [
        (
            {"instruction": "Symbol?", "input": "iron", "output": "Fe"},
            "instruction + input -> question, output -> answer",
            {"prompt": "Symbol?\n\niron", "completion": "Fe"},
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction + input -> question, output -> answer", PAIR),
        (
            {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["x", "y"]]},
            "instruction + input -> question, output -> answer, history -> turns before",
            of(turn("system", "s"), *TWO_TURNS),
        ),
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "open_qa"},
            "instruction + context -> question, response -> answer",
            {"prompt": "q\n\nc", "completion": "a"},
        ),
        ({"question": "q", "answer": 2}, "question -> question, answer -> answer", {**PAIR, "completion": "2"}),
        ({"prompt": "q", "response": "a"}, "prompt -> question, response -> answer", PAIR),
        ({"prompt": "", "query": "q", "response": "a"}, "query -> question, response -> answer", PAIR),
        (
            {"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1}]},
            "conversations (ShareGPT) -> messages",
            chat("q", "a"),
        ),
        (
            {"system": "s", "conversations": [{"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]},
            "conversations (ShareGPT) -> messages",
            of(turn("system", "s"), turn("user", "q"), turn("assistant", "a")),
        ),
        ({"dialog": chat("q", "a")["messages"]}, "dialog -> messages", chat("q", "a")),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "", chat("q", "a")),
        (chat("q", "a")["messages"], "", chat("q", "a")),
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
            "conversations (ShareGPT) -> messages",
            of(
                turn("user", "Weather?"),
                turn("assistant", None, tool_calls=[CALLED]),
                turn("tool", "sunny"),
                turn("assistant", "It is sunny."),
                tools=[TOOL],
            ),
        ),
        (
            {
                "systemInstruction": {"parts": [{"text": "s"}]},
                "contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}],
            },
            "contents (Gemini) -> messages",
            of(turn("system", "s"), turn("user", "q"), turn("assistant", "a")),
        ),
        (
            {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
            "contents -> messages",
            chat("q", "a"),
        ),
        (of(turn("human", "q"), turn("bot", "a")), "", chat("q", "a")),
        (
            of(turn("user", "q"), turn("assistant", "a", train=True), turn("assistant", "b", train=False)),
            "",
            of(turn("user", "q"), turn("assistant", "a"), turn("assistant", "b", weight=0)),
        ),
    ],
)
def test_other_forms_of_a_row_are_read(value: object, taken: str, row: object) -> None:
    found = parsed(value)
    assert (found.as_json(), found.taken) == (row, taken)


def test_what_was_not_taken_is_told() -> None:
    value = {"instruction": "q", "context": "", "response": "a", "source_id": "open_qa"}
    assert parse_row(value).ignored_keys == ("source_id",)


@pytest.mark.parametrize(
    ("beside", "group", "ignored"),
    [
        ({"category": "open_qa"}, "open_qa", ()),
        ({"task": " sums "}, "sums", ()),
        ({"category": "a", "task": "b"}, "a", ("task",)),
        ({"category": 7}, "", ("category",)),
        ({"category": "x" * 81}, "", ("category",)),
        ({"category": "\ud800"}, "", ("category",)),
    ],
)
def test_a_category_is_kept_for_tables_of_scores(beside: dict[str, object], group: str, ignored: tuple[str]) -> None:
    row = parse_row({"prompt": "q", "completion": "a", **beside})
    assert (row.group, row.ignored_keys) == (group, ignored)
    assert row.as_json() == {"prompt": "q", "completion": "a"}


def test_a_key_that_is_named_as_a_part_is_no_category() -> None:
    row = parse_row({"task": "q", "completion": "a"}, {"prompt": "task", "completion": "completion"})
    assert (row.group, row.messages[0].content) == ("", "q")


def test_openais_old_form_is_read() -> None:
    value = of(
        turn("user", "Weather?"),
        turn("assistant", None, function_call={"name": "weather", "arguments": '{"city": "Lisbon"}'}),
        turn("function", "sunny", name="weather"),
        turn("assistant", "It is sunny."),
        functions=[TOOL["function"]],
    )
    row: Any = parsed(value).as_json()
    assert row["tools"] == [TOOL]
    assert row["messages"][1]["tool_calls"] == [CALLED]
    assert row["messages"][2] == turn("tool", "sunny", name="weather")


def test_a_text_that_repeats_question_and_answer_is_not_the_row() -> None:
    """tatsu-lab/alpaca on the hub: the prompt is there twice, and only one of them is to be trained."""
    value = {"instruction": "q", "input": "i", "output": "a", "text": "Below…\n### q\n### i\n### a"}
    row = parse_row(value)
    assert row.as_json() == {"prompt": "q\n\ni", "completion": "a"}
    assert row.ignored_keys == ("text",)


def test_a_row_that_can_be_read_in_two_ways_names_both() -> None:
    said = refusal({"instruction": "q", "input": "", "output": "a", "text": "something else"})
    assert "can be read in two ways" in said
    assert "data.columns={text: text}" in said
    assert "instruction + input -> question, output -> answer" in said


EARLIER = [turn("user", "x"), turn("assistant", "y")]
SHOWN_BEFORE = of(turn("user", "x"), turn("assistant", "y", weight=0), turn("user", "q"), turn("assistant", "a"))


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "q", "output": "a", "history": EARLIER},
        {"history": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "question": "q", "answer": "a"},
        {"prompt": "q", "completion": "a", "history": EARLIER},
    ],
)
def test_turns_before_a_question_are_shown_and_the_answer_is_trained(value: object) -> None:
    found = parse_row(value)
    assert found.as_json() == SHOWN_BEFORE
    assert "history -> turns before" in found.taken


@pytest.mark.parametrize(("question", "answer"), [("question", "answer"), ("prompt", "completion")])
def test_turns_beside_a_question_and_its_answer_are_refused(question: str, answer: str) -> None:
    value = {question: "q", "context": EARLIER, answer: "a"}
    assert "read in two ways" in refusal(value)
    columns = f"{{prompt: {question}, completion: {answer}, history: context}}"
    assert columns in refusal(value)
    named = dict(part.split(": ") for part in columns.strip("{}").split(", "))
    assert parse_row(value, checked_columns(named)).as_json() == SHOWN_BEFORE


def test_a_history_that_cannot_be_put_before_the_question_is_refused() -> None:
    assert "history must be a list" in refusal({"prompt": "q", "completion": "a", "history": "x y"})
    assert "history stands beside" in refusal({"prompt": EARLIER[:1], "completion": EARLIER[1:], "history": EARLIER})
    assert refusal({"history": EARLIER, "question": "q", "said": "a"}).startswith("unknown keys")


def test_two_conversations_are_preference_data() -> None:
    """lmsys/chatbot_arena_conversations: which of the two was better, another key says."""
    value = {"model_a": "m", "winner": "model_b", "conversation_a": EARLIER, "conversation_b": EARLIER[:1]}
    assert refusal(value).startswith("two conversations (conversation_a, conversation_b), as in preference data")
    assert refusal(value).endswith("data.columns={messages: conversation_a} or data.columns={messages: conversation_b}")


# data.columns


@pytest.mark.parametrize(
    ("columns", "value", "row"),
    [
        ({"prompt": "frage", "completion": "antwort"}, {"frage": "q", "antwort": "a"}, PAIR),
        ({"prompt": "text", "completion": "label"}, {"text": "q", "label": 1}, {"prompt": "q", "completion": "1"}),
        (
            {"prompt": "p", "input": "i", "completion": "c"},
            {"p": "q", "i": "i", "c": "a"},
            {**PAIR, "prompt": "q\n\ni"},
        ),
        ({"text": "body"}, {"body": "t", "messages": 3}, {"text": "t"}),
        ({"messages": "turns"}, {"turns": chat("q", "a")["messages"]}, chat("q", "a")),
        ({"prompt": "q", "completion": "a", "system": None}, PAIR | {"q": "q", "a": "a"}, PAIR),
        ({"prompt": "q", "completion": "a", "history": "h"}, {"q": "q", "a": "a", "h": [["x", "y"]]}, of(*TWO_TURNS)),
    ],
)
def test_columns_name_what_is_taken(columns: dict[str, str | None], value: object, row: object) -> None:
    found = parse_row(value, checked_columns(columns))
    assert found.as_json() == row
    assert " -> " in found.taken


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(RowError, match=r"no key frage, which data.columns names; there are: antwort"):
        parse_row({"antwort": "a"}, checked_columns({"prompt": "frage", "completion": "antwort"}))


@pytest.mark.parametrize("columns", [{"question": "q"}, {"prompt": "q"}, {"system": "s"}, {}, "prompt", 3])
def test_columns_that_make_no_row_are_refused(columns: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.columns"):
        checked_columns(columns)
    assert checked_columns(None) is None


@pytest.mark.parametrize(
    "columns",
    [
        {"text": "t", "system": "s"},
        {"messages": "m", "history": "h"},
        {"messages": "m", "prompt": "p", "completion": "c"},
        {"text": "t", "prompt": "p"},
    ],
)
def test_columns_that_would_be_passed_over_are_refused(columns: object) -> None:
    with pytest.raises(ConfigError, match="not read beside"):
        checked_columns(columns)


def test_an_input_behind_messages_is_refused() -> None:
    columns = checked_columns({"prompt": "q", "input": "i", "completion": "a"})
    with pytest.raises(RowError, match="q is no text, and i cannot be put behind it"):
        parse_row({"q": EARLIER[:1], "i": "more", "a": "b"}, columns)
    assert parse_row({"q": EARLIER[:1], "i": "", "a": "b"}, columns).as_json() == chat("x", "b")


# What means something else


@pytest.mark.parametrize(
    ("value", "columns", "row"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "{prompt: prompt, completion: chosen}", PAIR),
        (
            {"question": "q", "system": "", "chosen": "a", "rejected": "b"},
            "{prompt: question, completion: chosen}",
            PAIR,
        ),
        (
            {"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"},
            "{prompt: instruction, input: input, completion: chosen}",
            {"prompt": "q\n\ni", "completion": "a"},
        ),
        ({"chosen": "Human: q AI: a", "rejected": "…"}, "{text: chosen}", {"text": "Human: q AI: a"}),
        ({"prompt": "q", "chosen": chat("q", "a")["messages"], "rejected": []}, "{messages: chosen}", chat("q", "a")),
        (
            {"prompt": [turn("user", "q")], "chosen": [turn("assistant", "a")], "rejected": []},
            "{prompt: prompt, completion: chosen}",
            chat("q", "a"),
        ),
        (
            {"chosen_messages": chat("q", "a")["messages"], "rejected_messages": []},
            "{messages: chosen_messages}",
            chat("q", "a"),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            "{prompt: conversations, completion: chosen}",
            chat("q", "a"),
        ),
    ],
)
def test_preference_data_is_refused_and_the_chosen_answers_can_be_taken(
    value: object, columns: str, row: object
) -> None:
    said = refusal(value)
    assert said.startswith("preference data (")
    assert said.endswith(f"data.columns={columns}")
    named = dict(part.split(": ") for part in columns.strip("{}").split(", "))
    assert parse_row(value, named).as_json() == row


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"rejected": "no"}, "there is no chosen answer"),
        (
            {"input": {"messages": []}, "preferred_output": [turn("assistant", "a")]},
            "preference data (preferred_output)",
        ),
        ({"instruction": "q", "output": ["good", "bad"]}, "preference data (two outputs)"),
        ({"question": "q", "response_a": "x", "response_b": "y", "winner": "a"}, "preference data (response_a, resp"),
        ({"question": "q", "response_j": "x", "response_k": "y"}, "preference data (response_j, response_k)"),
        ({"prompt": "q", "responses": ["x", "y"], "scores": [1, 0]}, "preference data (responses, scores)"),
        ({"prompt": "q", "responses": ["x", "y"], "rankings": [1, 0]}, "preference data (responses, rankings)"),
        ({"text": "fine film", "sentiment": "pos", "id": 3}, "sentiment: data for a classifier"),
        ({"text": "fine film", "label": 1}, "label: data for a classifier"),
        ({"input": "fine film", "label": "good"}, "data.columns={prompt: input, completion: label}"),
        ({"text": "fine film", "labels": ["a"]}, "labels: data for a classifier"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "pairs of texts for an embedding model"),
        ({"sentence1": "a", "sentence2": "b", "score": 0.3}, "pairs of texts for an embedding model"),
        ({"text": "t", "embedding": [0.1]}, "embedding: these rows are vectors"),
        ({"input_ids": [1], "labels": [1]}, "input_ids: these rows are tokens"),
    ],
)
def test_rows_for_another_purpose_are_refused_by_name(value: object, says: str) -> None:
    assert says in refusal(value)


@pytest.mark.parametrize(
    ("value", "ignored"),
    [
        ({"text": "fine film", "category": "film"}, ()),
        ({"text": "fine film", "class": "a long sentence " * 3}, ("class",)),
        ({"text": "fine film", "class": "3b", "title": "t"}, ("class", "title")),
        ({**PAIR, "sentiment": "pos"}, ("sentiment",)),
        ({"input": "q", "output": "a", "is_correct": False, "rating": 3}, ("is_correct", "rating")),
        ({"question": "q", "answer_a": "x", "answer_b": "y", "answer": "A"}, ("answer_a", "answer_b")),
    ],
)
def test_what_only_looks_like_a_label_is_left_out(value: object, ignored: tuple[str, ...]) -> None:
    assert parse_row(value).ignored_keys == ignored


def converted(value: object, tmp_path: Path, more: Sequence[object] = ()) -> list[object]:
    """The rows that the command of the refusal makes of it and ``more``."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    (tmp_path / "old.json").write_text("\n".join([json.dumps(value), json.dumps(list(more))]))  # lines, and an array
    (command,) = re.findall(r"jq -c '[^']*' old\.json > new\.jsonl", refusal(value))
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    return values(tmp_path / "new.jsonl")


@pytest.mark.parametrize(
    ("value", "name", "rows"),
    [
        ({**chat("q", "a"), "label": True}, "label: answers marked good and bad (KTO)", [chat("q", "a")]),
        ({**chat("q", "a"), "label": "easy"}, "label changes what the row means", [chat("q", "a")]),
        ({**chat("q", "a"), "weight": 2}, "weight: rows cannot be weighted", [chat("q", "a")]),
        (
            {"instruction": "q", "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b"}]},
            "self-instruct's seed tasks",
            [PAIR, {"prompt": "q\n\ni", "completion": "b"}],
        ),
        ({"question": "q", "answers": {"text": ["a"], "answer_start": [0]}}, "answers is an object", [PAIR]),
    ],
)
def test_what_has_to_be_chosen_comes_with_the_command(
    value: object, name: str, rows: list[object], tmp_path: Path
) -> None:
    assert name in refusal(value)
    assert converted(value, tmp_path) == rows


@pytest.mark.parametrize("key", ["images", "image", "videos", "audio", "audios"])
def test_images_are_refused_by_name(key: str, tmp_path: Path) -> None:
    value = {**chat("<image>q", "a"), key: ["1.jpg"]}
    assert refusal(value).startswith(f"{key}: only text can be trained here; to keep the rows without it")
    assert converted(value, tmp_path, more=[{**IRON, key: []}, IRON]) == [IRON, IRON]
