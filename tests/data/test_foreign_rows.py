"""Rows in the forms of other programs are read as what they say; what means something else is refused by name."""

import json
from typing import Any

import pytest

from safetrain.core.errors import ConfigError
from safetrain.data.forms import as_setting, checked_columns, parse_row
from safetrain.data.strict_json import RowError
from tests.conftest import chat
from tests.data.test_rows import CALL, IRON, TOOL, of, parsed, refusal, turn

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
            {"prompt": "q\n\nc", "completion": "a", "category": "open_qa"},
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
    assert row.as_json() == {"prompt": "q", "completion": "a", **({"category": group} if group else {})}


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
    assert "data.columns={prompt: instruction, completion: output}" in said


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
    with pytest.raises(RowError, match="i is a text; it and the prompt must be texts"):
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
        ({"instruction": "q", "output": ["good", "bad"]}, "output is a list; it must be a text"),
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


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({**chat("q", "a"), "label": True}, "label: answers marked good and bad (KTO)"),
        ({**chat("q", "a"), "label": "easy"}, "label changes what the row means"),
        ({**chat("q", "a"), "weight": 2}, "weight: rows cannot be weighted"),
        ({"question": "q", "answers": {"text": ["a"], "answer_start": [0]}}, "answers is an object; it must be a text"),
        ({**chat("<image>q", "a"), "images": ["1.jpg"]}, "images: images, audio and video cannot be trained here"),
    ],
)
def test_what_changes_the_meaning_of_a_row_is_refused(value: object, says: str) -> None:
    assert says in refusal(value)


def test_null_media_and_labels_are_not_there() -> None:
    assert parsed({**IRON, "images": [], "label": None}) == parse_row(IRON)


def test_unknown_keys_come_with_a_setting_to_look_at() -> None:
    with pytest.raises(RowError, match=r"unknown keys \(id, frage, antwort\)") as caught:
        parse_row({"id": "7", "frage": "Wer war es?", "antwort": "Niemand."})
    (columns,) = caught.value.columns
    assert as_setting(columns) == "data.columns={prompt: frage, completion: antwort}"
    with pytest.raises(RowError, match="unknown keys") as caught:
        parse_row({"Who was it?": "Where is it?", "It was Ann.": "Here."})
    assert (caught.value.columns, "not a header" in caught.value.do) == ((), True)
