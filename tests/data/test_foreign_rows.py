"""Rows in the forms of other programs are read as what they say; what can mean something else is refused."""

from typing import Any

import pytest

from safetrain.core.errors import ConfigError
from safetrain.data.forms import checked_columns, parse_row
from safetrain.data.json_rows import RowError
from tests.conftest import chat
from tests.data.reading import settings_in
from tests.data.test_rows import of, parsed, refusal, turn

TWO_TURNS = (turn("user", "x"), turn("assistant", "y"), turn("user", "q"), turn("assistant", "a"))
PAIR = {"prompt": "q", "completion": "a"}
EARLIER = [turn("user", "x"), turn("assistant", "y")]
SHOWN_BEFORE = of(turn("user", "x"), turn("assistant", "y", weight=0), turn("user", "q"), turn("assistant", "a"))


def columns_of(setting: str) -> dict[str, str]:
    """The parts and keys in words such as ``prompt: frage, completion: antwort``."""
    return dict(part.split(": ") for part in setting.split(", "))


@pytest.mark.parametrize(
    ("value", "taken", "row"),
    [
        ({"question": "q", "answer": 2}, "question -> prompt, answer -> completion", {**PAIR, "completion": "2"}),
        ({"prompt": "", "query": "q", "response": "a"}, "query -> prompt, response -> completion", PAIR),
        (of(turn("human", "q"), turn("bot", "a")), "", chat("q", "a")),
        (of(turn("user", "q"), turn("assistant", "a", train=True), turn("assistant", "b", train=False)), "",
         of(turn("user", "q"), turn("assistant", "a"), turn("assistant", "b", weight=0))),
        ({"prompt": "q", "completion": "a", "history": [["x", "y"]]}, "", of(*TWO_TURNS)),
        ({**chat("q", "a"), "images": [], "label": None}, "", chat("q", "a")),
        ({"prompt": "q", "reply": "a", "history": EARLIER}, "reply -> completion", SHOWN_BEFORE),
    ],
)  # fmt: skip
def test_other_forms_of_a_row_are_read(value: object, taken: str, row: object) -> None:
    found = parsed(value)
    assert (found.as_json(), found.taken) == (row, taken)


def test_keys_beside_the_parts_are_named_as_ignored() -> None:
    row = parse_row({"prompt": "q", "completion": "a", "category": "a", "task": "b", "empty": ""})
    assert row.ignored_keys == ("category", "task")
    assert row.as_json() == {"prompt": "q", "completion": "a"}


# data.columns


@pytest.mark.parametrize(
    ("columns", "value", "row"),
    [
        ({"prompt": "text", "completion": "label"}, {"text": "q", "label": 1}, {"prompt": "q", "completion": "1"}),
        (
            {"prompt": "p", "input": "i", "completion": "c"},
            {"p": "q", "i": "i", "c": "a"},
            {**PAIR, "prompt": "q\n\ni"},
        ),
        ({"prompt": "q", "completion": "a", "system": None}, PAIR | {"q": "q", "a": "a"}, PAIR),
        ({"prompt": "q", "completion": "chosen"}, {"q": "q", "chosen": "a", "rejected": "b"}, PAIR),
        ({"prompt": "q", "input": "i", "completion": "a"}, {"q": EARLIER[:1], "i": "", "a": "b"}, chat("x", "b")),
    ],
)
def test_columns_name_what_is_taken(columns: dict[str, str | None], value: object, row: object) -> None:
    found = parse_row(value, checked_columns(columns))
    assert found.as_json() == row
    assert " -> " in found.taken


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": "a"}, "no key q, i, which data.columns names; the row has: a"),
        ({"q": EARLIER[:1], "i": "more", "a": "b"}, "i is a string; this key and the prompt must be strings"),
        ({"q": "q", "i": "", "a": " "}, "a is empty"),
    ],
)
def test_what_the_columns_do_not_find_is_named(value: object, says: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(value, checked_columns({"prompt": "q", "input": "i", "completion": "a"}))
    assert str(caught.value) == says.replace("q, i", "q")


@pytest.mark.parametrize(
    "columns",
    [
        {"question": "q"}, {"prompt": "q"}, {"system": "s"}, {}, "prompt", 3, {"text": "t", "system": "s"},
        {"messages": "m", "history": "h"}, {"messages": "m", "prompt": "p", "completion": "c"},
    ],
)  # fmt: skip
def test_columns_that_make_no_row_are_refused(columns: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.columns does not describe a row"):
        checked_columns(columns)
    assert checked_columns(None) is None


# Two ways


@pytest.mark.parametrize(
    ("value", "ways"),
    [
        ({"problem": "q", "solution": "s", "answer": 4, "source": "a contest"},
         ["prompt: problem, completion: answer", "prompt: problem, completion: solution"]),
        ({"instruction": "q", "input": "", "output": "a", "text": "something else"},
         ["prompt: instruction, input: input, completion: output", "text: text"]),
        ({"messages": EARLIER, "question": "q", "answer": "a"},
         ["messages: messages", "prompt: question, completion: answer"]),
        ({"question": "q", "context": EARLIER, "answer": "a"},
         ["messages: context", "prompt: question, completion: answer"]),
        ({"prompt": [turn("user", ["q"])], "completion": [turn("assistant", ["a"])], "question": "other?"},
         ["prompt: prompt, completion: completion", "prompt: question, completion: completion"]),
    ],
)  # fmt: skip
def test_a_row_that_can_be_read_in_two_ways_names_the_settings(value: dict[str, Any], ways: list[str]) -> None:
    with pytest.raises(RowError, match="can be read in two ways") as caught:
        parse_row(value)
    assert settings_in(caught.value) == [f"{{{way}}}" for way in ways]
    assert all(f"data.columns={{{way}}}" in str(caught.value) for way in ways)
    for way in ways:
        assert parse_row(value, checked_columns(columns_of(way))).format in ("chat", "completions", "text")


@pytest.mark.parametrize(
    ("value", "ignored"),
    [
        ({"prompt": "2 + 2?", "completion": "It is 4.", "answer": 4}, ("answer",)),
        ({"prompt": "Below: q", "instruction": "q", "completion": "a", "text": "Below: q a"}, ("instruction", "text")),
        ({"prompt": [turn("user", "q")], "question": "q", "completion": [turn("assistant", "a")]}, ("question",)),
        ({**chat("q", "a"), "problem": "q", "solution": "long", "answer": "a"}, ("answer", "problem", "solution")),
        (
            {**chat("q", "a"), "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a "}]},
            ("conversations",),
        ),
        ({"question": "q", "answer_a": "x", "answer_b": "y", "answer": "A"}, ("answer_a", "answer_b")),
        ({**PAIR, "labels": ["sums"], "sentiment": "pos"}, ("labels", "sentiment")),
    ],
)
def test_what_repeats_the_row_or_means_nothing_is_left_out(value: object, ignored: tuple[str, ...]) -> None:
    assert parse_row(value).ignored_keys == ignored


# What means something else


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({**chat("q", "a"), "label": True}, "label: classes and KTO marks are not supported"),
        ({**chat("q", "a"), "weight": 2}, "weight: rows cannot be weighted; remove this key"),
        ({**chat("<image>q", "a"), "images": ["1.jpg"]}, "images: only text can be trained on: leave the row out"),
        ({"instruction": "q", "output": ["good", "bad"]}, "output must be a string, not a list"),
        ({"instruction": "q", "output": True}, "output must be a string, not true or false"),
    ],
)
def test_what_changes_the_meaning_of_a_row_is_refused(value: object, says: str) -> None:
    assert says in refusal(value)


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        ({"id": "7", "frage": "Wer war es?", "antwort": "Niemand."}, "{prompt: frage, completion: antwort}"),
        ({"question": "q", "response_a": "a", "response_b": "bb"}, "{prompt: question, completion: response_b}"),
        ({"body": "t", "n": None}, "{text: body}"),
    ],
)
def test_unknown_keys_come_with_a_setting_to_look_at(value: object, setting: str) -> None:
    with pytest.raises(RowError, match=r"unknown keys \(") as caught:
        parse_row(value)
    assert settings_in(caught.value) == [setting]
    with pytest.raises(RowError, match="unknown keys") as caught:
        parse_row({"Who was it?": "Where is it?", "It was Ann.": "Here."})  # a table without a header
    assert (settings_in(caught.value), "not a header" in caught.value.do) == ([], True)
