"""Keys that are nearly the usual ones, and rows in which two things could be the question or the answer."""

import pytest

from safetrain.core.data.rows import RowError, parse_row
from tests.conftest import chat
from tests.core.data.test_foreign_rows import EARLIER, PAIR
from tests.core.data.test_rows import parsed, refusal, turn


@pytest.mark.parametrize(
    ("value", "taken", "row"),
    [
        ({"Question": "q", "ANSWER": "a"}, "Question -> question, ANSWER -> answer", PAIR),
        (
            {"Context": "c", "question": "q", "Answer": "a"},
            "question + Context -> question, Answer -> answer",
            {**PAIR, "prompt": "q\n\nc"},
        ),
        (
            {"Instruction": "q", "Input": "i", "Output": "a"},
            "Instruction + Input -> question, Output -> answer",
            {**PAIR, "prompt": "q\n\ni"},
        ),
        ({"Prompt": "q", "completion": "a"}, "Prompt -> prompt", PAIR),
        ({"Messages": chat("q", "a")["messages"]}, "Messages -> messages", chat("q", "a")),
        ({"Text": "t"}, "Text -> text", {"text": "t"}),
    ],
)
def test_usual_keys_in_other_capitals_are_read_and_said(value: object, taken: str, row: object) -> None:
    found = parsed(value)
    assert (found.as_json(), found.taken, found.ignored_keys) == (row, taken, ())


def test_a_key_in_other_capitals_never_stands_in_for_one_that_is_there() -> None:
    row = parse_row({"prompt": "q", "completion": "a", "Completion": "b", "Source": "wiki"})
    assert (row.as_json(), row.ignored_keys) == (PAIR, ("Completion", "Source"))
    assert refusal({"question": "q", "Answer": "a", "ANSWER": "b"}).startswith("unknown keys (question, Answer, ANS")
    assert refusal({"Prompt": "q", "Chosen": "a", "Rejected": "b"}).endswith("written Prompt, Chosen, Rejected")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"question": "q", "answer": ["a"]}, "answer is a list; it must be a text"),
        ({"question": "q", "answer": {"text": "a"}}, "answer is an object; it must be a text"),
        ({"instruction": "q", "Output": True}, "output is true or false; it must be a text"),
        ({"question": ["q"], "answer": "a"}, "question is a list; it must be a text"),
        ({"question": "q", "answers": ["a", "b"]}, "answers is a list; write the one answer to learn"),
    ],
)
def test_a_usual_key_with_no_text_is_said_to_be_that(value: object, says: str) -> None:
    assert refusal(value).startswith(says)


def test_an_input_that_is_no_text_is_not_passed_over() -> None:
    columns = {"prompt": "q", "input": "i", "completion": "a"}
    with pytest.raises(RowError, match="i is a list; it must be a text"):
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


@pytest.mark.parametrize(
    ("value", "ways"),
    [
        ({"frage": ASKED, "antwort": "Neon."}, ("prompt: frage, completion: antwort", "messages: frage")),
        ({"frage": ASKED[:1], "Antwort": "Neon."}, ("prompt: frage, completion: Antwort",)),
        ({"frage": ASKED[:2], "antwort": "Neon."}, ("prompt: frage, completion: antwort", "messages: frage")),
        ({"messages": ASKED[:1], "answer": "Neon."}, ("prompt: messages, completion: answer",)),
        (
            {"conversation": ASKED, "resposta": "Neon."},
            ("prompt: conversation, completion: resposta", "messages: conversation"),
        ),
    ],
)
def test_an_answer_beside_turns_that_may_lack_it_is_refused(value: dict[str, object], ways: tuple[str, ...]) -> None:
    assert ("read in two ways" in refusal(value)) is (len(ways) == 2)
    for way in ways:
        assert f"data.columns={{{way}}}" in refusal(value)
        row = parse_row(value, dict(part.split(": ") for part in way.split(", ")))
        assert ("Neon." in [message.content for message in row.messages]) is ("completion" in way)
    assert refusal(value).count("data.columns=") == len(ways)


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
