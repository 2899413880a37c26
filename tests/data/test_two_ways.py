"""Rows in which two things could be the question or the answer."""

import pytest

from safetrain.data.forms import parse_row
from safetrain.data.strict_json import RowError
from tests.conftest import chat
from tests.data.test_foreign_rows import EARLIER, PAIR
from tests.data.test_rows import refusal, turn


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"question": "q", "answer": ["a"]}, "answer is a list; it must be a text"),
        ({"question": "q", "answer": {"text": "a"}}, "answer is an object; it must be a text"),
        ({"instruction": "q", "output": True}, "output is true or false; it must be a text"),
        ({"question": ["q"], "answer": "a"}, "question is a list; it must be a text"),
        ({"question": "q", "answers": ["a", "b"]}, "answers is a list; it must be a text"),
    ],
)
def test_a_usual_key_with_no_text_is_said_to_be_that(value: object, says: str) -> None:
    assert refusal(value).startswith(says)


def test_an_input_that_is_no_text_is_not_passed_over() -> None:
    columns = {"prompt": "q", "input": "i", "completion": "a"}
    with pytest.raises(RowError, match="i is a list; it and the prompt must be texts"):
        parse_row({"q": "q", "i": ["x"], "a": "a"}, columns)


@pytest.mark.parametrize(
    ("value", "ways"),
    [
        (
            {"instruction": "i", "question": "q", "answer": "a"},
            ["prompt: instruction, completion: answer", "prompt: question, completion: answer",
             "prompt: instruction, input: question, completion: answer"],
        ),
        (
            {"problem": "q", "solution": "s", "answer": 4, "source": "a contest"},
            ["prompt: problem, completion: answer", "prompt: problem, completion: solution"],
        ),
    ],
)  # fmt: skip
def test_two_questions_or_two_answers_are_refused(value: object, ways: list[str]) -> None:
    assert "read in two ways" in refusal(value)
    for way in ways:
        assert f"data.columns={{{way}}}" in refusal(value)
    assert refusal(value).count("data.columns=") == len(ways)


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ({"prompt": "q", "response": "Como.", "completion": "Garda."}, "prompt: prompt, completion: response"),
        ({"prompt": "q", "question": "other?", "completion": "a"}, "prompt: question, completion: completion"),
        ({**chat("q", "a"), "prompt": "x", "completion": "y"}, "prompt: prompt, completion: completion"),
        ({**chat("q", "a"), "question": "q", "answer": "y"}, "prompt: question, completion: answer"),
        ({**chat("q", "a"), "conversations": EARLIER}, "messages: conversations"),
    ],
)
def test_another_question_or_answer_beside_the_usual_keys_is_refused(value: dict[str, object], way: str) -> None:
    assert "read in two ways" in refusal(value)
    assert f"data.columns={{{way}}}" in refusal(value)
    named = dict(part.split(": ") for part in way.split(", "))
    assert parse_row(value, named).taken


@pytest.mark.parametrize(
    ("value", "ignored"),
    [
        ({"prompt": "2 + 2?", "completion": "It is 4.", "answer": 4}, ("answer",)),
        ({"prompt": "Below: q", "instruction": "q", "completion": "a", "text": "Below: q a"}, ("instruction", "text")),
        ({"prompt": [turn("user", "q")], "question": "q", "completion": [turn("assistant", "a")]}, ("question",)),
        ({"prompt": "q", "completion": "a", "user": "ann", "source": "wiki"}, ("source", "user")),
        ({**chat("q", "a"), "prompt": "x"}, ("prompt",)),
        ({**chat("q", "a"), "problem": "q", "solution": "long", "answer": "a"}, ("answer", "problem", "solution")),
        ({**chat("q", "a"), "text": "<user>q<model>a"}, ("text",)),
        (
            {**chat("q", "a"), "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a "}]},
            ("conversations",),
        ),
    ],
)
def test_what_repeats_the_usual_keys_is_left_out(value: object, ignored: tuple[str, ...]) -> None:
    assert parse_row(value).ignored_keys == ignored


ASKED = [turn("user", "Which metal?"), turn("assistant", "Iron."), turn("user", "And which gas?")]


@pytest.mark.parametrize(("key", "answer"), [("messages", "answer"), ("conversation", "response")])
def test_an_answer_beside_turns_that_lack_it_is_refused(key: str, answer: str) -> None:
    value = {key: ASKED, answer: "Neon."}
    assert f"data.columns={{prompt: {key}, completion: {answer}}}" in refusal(value)
    row = parse_row(value, {"prompt": key, "completion": answer})
    assert row.messages[-1].content == "Neon."
    assert [message.trained for message in row.messages if message.role == "assistant"] == [False, True]


@pytest.mark.parametrize(
    "value",
    [
        {"frage": ASKED[:2], "antwort": "Iron."},  # it stands among the turns
        {"conversation": ASKED[:2], "answer": "Neon."},  # a reference beside a whole chat
        {"frage": ASKED[:2], "antwort": ""},
    ],
)
def test_an_answer_that_the_turns_do_not_lack_is_left_out(value: dict[str, object]) -> None:
    assert [message.content for message in parse_row(value).messages] == ["Which metal?", "Iron."]


def test_a_question_that_stands_twice_is_one() -> None:
    assert parse_row({"prompt": "q", "question": "q ", "answer": "a", "output": ""}).as_json() == PAIR
