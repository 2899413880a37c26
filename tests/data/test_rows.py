"""Every form of a row that is met in the wild is read as what it says, or refused with the mapping that helps."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ConfigError
from safetrain.data.forms import checked_columns, named_columns, parse_row
from safetrain.data.rows import Row, RowError, load
from tests.conftest import chat
from tests.data.reading import settings_in

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lisbon"}}}
AS_TEXT = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lisbon"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IRON = chat("Symbol of iron?", "Fe.")


def turn(role: str, content: object, **other: object) -> dict[str, object]:
    """A message."""
    return {"role": role, "content": content, **other}


def of(*messages: dict[str, object], **other: object) -> dict[str, object]:
    """A chat row."""
    return {"messages": list(messages), **other}


def calling(*calls: object, content: object = None) -> dict[str, object]:
    """A row in which a tool is called."""
    return of(
        turn("user", "Weather?"),
        turn("assistant", content, tool_calls=list(calls)),
        turn("tool", "sunny", tool_call_id="c1"),
        turn("assistant", "It is sunny."),
    )


def parsed(value: object) -> Row:
    """The row, which is written and pickled without loss."""
    row = parse_row(value)
    assert parse_row(json.loads(json.dumps(row.as_json()))) == row
    assert pickle.loads(pickle.dumps(row)) == row
    return row


def refusal(value: object) -> str:
    """What is said of a row that is refused."""
    with pytest.raises(RowError) as caught:
        parse_row(load(json.dumps(value)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


def test_content_in_parts_is_joined_and_llama_factory_s_weights_are_read() -> None:
    parts = ["Symbol ", {"type": "text", "text": "of "}, {"type": "input_text", "text": "iron?"}]
    answer = [{"type": "output_text", "text": "Fe."}]
    assert parsed(of(turn("user", parts), turn("assistant", answer))) == parse_row(IRON)
    value = of(
        turn("user", [{"type": "text", "value": "Symbol of iron?"}], loss_weight=0.0),
        turn("assistant", [{"type": "text", "value": "Fe."}], loss_weight=1.0),
    )
    assert parsed(value) == parse_row(IRON)


@pytest.mark.parametrize("call", [CALL, AS_TEXT, {"id": "c1", "name": "weather", "arguments": {"city": "Lisbon"}}])
def test_calls_are_brought_to_one_form(call: object) -> None:
    message = parsed(calling(call)).messages[1].for_template()
    assert (message["tool_calls"], message["content"]) == ([CALL], "")


@pytest.mark.parametrize(
    ("arguments", "read"),
    [("", {}), (None, {}), ('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("Lisbon", "Lisbon"), ('{"a": NaN}', '{"a": NaN}')],
)
def test_arguments_are_an_object_where_they_say_one(arguments: object, read: object) -> None:
    row = parsed(calling({"function": {"name": "weather", "arguments": arguments}}))
    (call,) = row.messages[1].for_template()["tool_calls"]
    assert json.dumps(call) == json.dumps({"function": {"name": "weather", "arguments": read}, "type": "function"})


@pytest.mark.parametrize(("said", "is_trained"), [
    ({"weight": 0}, False), ({"train": False}, False), ({"loss": False}, False), ({"train_on_turn": False}, False),
    ({"masked": True}, False), ({"loss_scale": 0.0}, False), ({"loss": True, "masked": False}, True),
    ({"training": None}, True),
])  # fmt: skip
def test_keys_that_keep_a_turn_out_of_training_are_obeyed(said: dict[str, object], is_trained: bool) -> None:
    row = parsed(
        of(turn("user", "q", **said), turn("assistant", "a", **said), turn("user", "r"), turn("assistant", "b"))
    )
    assert [message.trained for message in row.messages] == [True, is_trained, True, True]
    assert row.messages[1].keys == {}


def test_null_keys_are_left_out_and_keys_that_templates_may_read_stay() -> None:
    nulls = of(turn("user", "Symbol of iron?", name=None), turn("assistant", "Fe.", tool_calls=[], refusal=None))
    assert parsed(nulls) == parse_row(IRON)
    row = parsed(of(turn("user", "q", name="Ann"), turn("assistant", "a", reasoning_content="so")))
    assert [message.for_template() for message in row.messages] == [
        {"role": "user", "content": "q", "name": "Ann"},
        {"role": "assistant", "content": "a", "reasoning_content": "so"},
    ]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]], [{"function": TOOL["function"]}]])
def test_tools_are_brought_to_one_form(tools: object) -> None:
    row = parsed({**calling(CALL), "tools": tools})
    assert (row.format, json.loads(row.tools)) == ("tools", [TOOL])
    assert parsed({"prompt": "q", "completion": "a", "tools": tools}).format == "tools"
    assert all(parsed({**IRON, "tools": json.loads(empty)}) == parse_row(IRON) for empty in ("null", "[]", '""'))


def test_a_system_text_beside_the_rest_is_read() -> None:
    row = parsed({"prompt": "q", "completion": "a", "system": "Be brief."})
    assert row.format == "completions"
    assert [(m.role, m.content) for m in row.messages] == [("system", "Be brief."), ("user", "q"), ("assistant", "a")]
    assert parsed({**IRON, "system": "Be brief."}).messages[0].content == "Be brief."
    twice = of(turn("system", "Be brief."), *IRON["messages"], system="Be long.")  # type: ignore[misc]
    assert "two different system prompts" in refusal(twice)


def test_prompt_and_completion_as_messages_train_the_completion_alone() -> None:
    asked = [turn("user", "Iron?"), turn("assistant", "Fe."), turn("user", "Gold?")]
    row = parsed({"prompt": asked, "completion": [turn("assistant", "Au.")]})
    assert (row.format, [message.trained for message in row.messages]) == ("chat", [True, False, True, True])
    assert "in the prompt are not trained" in refusal({"prompt": asked, "completion": [turn("user", "Au.")]})


def test_keys_that_nothing_reads_are_told_and_null_ones_are_not_there() -> None:
    row = parsed({**IRON, "source": "wiki", "id": 0, "meta": None, "parallel_tool_calls": False})
    assert row.ignored_keys == ("id", "parallel_tool_calls", "source")
    assert (row, row.identity()) == (parse_row(IRON), parse_row(IRON).identity())
    empty = dict.fromkeys(("prompt", "completion", "text", "images", "label", "tools", "chosen", "functions"))
    assert parsed({**empty, **IRON}).ignored_keys == ()
    assert parsed({**empty, "messages": None, "text": "t"}).format == "text"
    swapped = [{key: message[key] for key in ("content", "role")} for message in IRON["messages"]]  # type: ignore[attr-defined]
    assert parse_row({"messages": swapped}).identity() == parse_row(IRON).identity()


ASKED = {"prompt": "Which?", "options": ["red", "green", "0"], "answer": "red"}
SHOWN = "Which?\n- red\n- green\n- 0"

# What is refused in one row, and what is said


@pytest.mark.parametrize(("value", "says"), [
    (of(turn("robot", "q")), "messages[0].role is robot; expected one of system"),
    (of(turn("assistant", " ")), "messages[0] is an empty assistant turn"),
    (of(turn("user", [{"type": "image_url", "image_url": {}}])), "a part of type 'image_url': only text can be"),
    (of(turn("user", ["q", 3])), 'messages[0].content[1] must be a string or {"type": "text", "text": "…"}, not a'),
    (of(turn("user", "q"), turn("assistant", "a", weight=0)), "no assistant turn to train"),
    (of(turn("assistant", "a", weight=0.5)), "messages[0].weight is 0.5; expected 0 or 1"),
    (of(turn("assistant", "a", loss=0.3)), "messages[0].loss is 0.3; expected 0 or 1"),
    (of(turn("assistant", "a", train="false")), "messages[0].train is the string 'false'; expected 0 or 1"),
    (of(turn("assistant", "a", weight=1, train=False)), "messages[0]: weight and train contradict each other"),
    (of(turn("assistant", "a", train_detail=[{"begin_offset": 0}])), "train_detail is [{'begin_offset': 0}]; expected"),
    (of(turn("user", "q", tool_calls=[CALL])), "only an assistant turn calls tools"),
    (calling({"name": "f", "parameters": {}}), "tool_calls[0] must be {"),
    (calling({"name": "f", "arguments": {"a": "\ud83d"}}), "messages[1] contains half a surrogate pair"),
    ({**IRON, "tools": {"name": "f"}}, "tools must be a list, or the JSON text of a list, not an object"),
    ({**chat("q", "a"), "label": True}, "label: a class needs one text (text, sentence or a question) and no answer"),
    ({"prompt": "q", "completion": "a", "label": "x"}, "label: a class needs one text"),
    ({"premise": "q", "hypothesis": "a", "label": "x"}, "label: a class needs one text"),
    ({"text": "q", "label": ""}, "label is empty"),
    ({"text": "q", "label": None}, "label is empty"),
    ({"text": "q", "label": "1.0"}, "label is 1.0: a class without a name"),
    ({"question": "q", "sentence": "other", "label": "x"}, "can be read in two ways: by question, label"),
    ({"text": "q", "label": 3}, "label is 3: a class without a name"),
    ({"text": "q", "label": "1"}, "label is 1: a class without a name"),
    ({"text": "q", "label": True}, "label is true or false: a class without a name, or a KTO mark"),
    ({"text": "q", "labels": ["x", "y"]}, "labels: classes and KTO marks"),
    ({**ASKED, "answer": 4}, "answer is 4; expected one of options, its number from 0, or its letter"),
    ({**ASKED, "answer": "blue"}, "answer is blue; expected one of options"),
    ({**ASKED, "answer": "ß"}, "answer is ß; expected one of options"),
    ({**ASKED, "options": ["red"]}, "options must be a list of at least two different texts"),
    ({**ASKED, "options": ["red", "red"]}, "options must be a list of at least two different texts"),
    ({**ASKED, "options": {"A": "red"}}, "options must be a list"),
    ({**ASKED, "options": [1, 2, 0], "answer": 1}, "answer is 1: an option, or the number of another"),
    ({**chat("q", "a"), "weight": 2}, "weight: rows cannot be weighted; remove this key"),
    ({**chat("<image>q", "a"), "images": ["1.jpg"]}, "images: only text can be trained on: leave the row out"),
    ({"instruction": "q", "output": ["good", "bad"]}, "output must be a string, not a list"),
])  # fmt: skip
def test_a_refusal_says_what_to_write(value: object, says: str) -> None:
    assert says in refusal(value)


TWO_TURNS = (turn("user", "x"), turn("assistant", "y"), turn("user", "q"), turn("assistant", "a"))
PAIR = {"prompt": "q", "completion": "a"}
EARLIER = [turn("user", "x"), turn("assistant", "y")]
SHOWN_BEFORE = of(turn("user", "x"), turn("assistant", "y", weight=0), turn("user", "q"), turn("assistant", "a"))


@pytest.mark.parametrize(("value", "taken", "row"), [
    ({"question": "q", "answer": 2}, "question -> prompt, answer -> completion", {**PAIR, "completion": "2"}),
    ({"prompt": "", "query": "q", "response": "a"}, "query -> prompt, response -> completion", PAIR),
    (of(turn("human", "q"), turn("bot", "a")), "", chat("q", "a")),
    ({"text": "q", "label": "pos"}, "text -> prompt, label -> completion", {"prompt": "q", "completion": "pos"}),
    ({"sentence": "q", "label": "pos", "idx": 3}, "sentence -> prompt, label -> completion",
     {"prompt": "q", "completion": "pos"}),
    *[({**ASKED, "answer": answer}, "answer -> completion",
       {"prompt": SHOWN, "completion": text, "options": ["red", "green", "0"]})
      for answer, text in ((1, "green"), ("B", "green"), ("red", "red"), ("0", "0"), (2, "0"), ("c", "0"))],
    ({"question": "Which? red or blue", "choices": ["red", "blue"], "answer": 1},
     "question -> prompt, answer -> completion, choices -> options",
     {"prompt": "Which? red or blue", "completion": "blue", "options": ["red", "blue"]}),
    ({"instruction": "Which?", "input": "A text.", "label": "pos"},
     "instruction -> prompt, input -> input, label -> completion",
     {"prompt": "Which?\n\nA text.", "completion": "pos"}),
    ({"question": "Which?", "context": "A text.", "options": ["a", "b"], "answer": "b"},
     "question -> prompt, context -> input, answer -> completion",
     {"prompt": "Which?\n\nA text.\n- a\n- b", "completion": "b", "options": ["a", "b"]}),
    ({"question": "What is 10 + 1?", "choices": [0, 1, 11], "answer": 2},
     "question -> prompt, answer -> completion, choices -> options",
     {"prompt": "What is 10 + 1?\n- 0\n- 1\n- 11", "completion": "11", "options": ["0", "1", "11"]}),
    ({"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}, "answerKey": "B"},
     "question -> prompt, answerkey -> completion, choices -> options",
     {"prompt": "Which?\n- red\n- blue", "completion": "blue", "options": ["red", "blue"]}),
    ({"prompt": "Sum?", "options": '["1", "2"]', "answer": "2"}, "answer -> completion",
     {"prompt": "Sum?\n- 1\n- 2", "completion": "2", "options": ["1", "2"]}),
    (of(turn("user", "q"), turn("assistant", "a", train=True), turn("assistant", "b", train=False)), "",
     of(turn("user", "q"), turn("assistant", "a"), turn("assistant", "b", weight=0))),
    ({"prompt": "q", "completion": "a", "history": [["x", "y"]]}, "", of(*TWO_TURNS)),
    ({**chat("q", "a"), "images": [], "label": None}, "", chat("q", "a")),
    ({"prompt": "q", "reply": "a", "history": EARLIER}, "reply -> completion", SHOWN_BEFORE),
])  # fmt: skip
def test_other_forms_of_a_row_are_read(value: object, taken: str, row: object) -> None:
    found = parsed(value)
    assert (found.as_json(), found.taken) == (row, taken)


# data.columns


@pytest.mark.parametrize(("columns", "value", "row"), [
    ({"prompt": "text", "completion": "label"}, {"text": "q", "label": 1}, {"prompt": "q", "completion": "1"}),
    ({"prompt": "q", "completion": "a", "system": None}, PAIR | {"q": "q", "a": "a"}, PAIR),
    ({"prompt": "q", "completion": "chosen"}, {"q": "q", "chosen": "a", "rejected": "b"}, PAIR),
    ({"prompt": "q", "input": "i", "completion": "a"}, {"q": EARLIER[:1], "i": "", "a": "b"}, chat("x", "b")),
])  # fmt: skip
def test_columns_name_what_is_taken(columns: dict[str, str | None], value: object, row: object) -> None:
    found = parse_row(value, checked_columns(columns))
    assert found.as_json() == row
    assert " -> " in found.taken


@pytest.mark.parametrize(("value", "says"), [
    ({"a": "a"}, "no key q, which data.columns names; the row's keys: a"),
    ({"q": EARLIER[:1], "i": "more", "a": "b"}, "i is a string; this key and the prompt must be strings"),
    ({"q": "q", "i": "", "a": " "}, "a is empty"),
])  # fmt: skip
def test_what_the_columns_do_not_find_is_named(value: object, says: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(value, checked_columns({"prompt": "q", "input": "i", "completion": "a"}))
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "columns",
    [{"question": "q"}, {"prompt": "q"}, {}, "prompt", {"text": "t", "system": "s"}, {"messages": "m", "history": "h"}],
)
def test_columns_that_make_no_row_are_refused(columns: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.columns does not describe a row"):
        checked_columns(columns)
    assert checked_columns(None) is None


# Two ways


@pytest.mark.parametrize(("value", "keys", "setting"), [
    ({"problem": "q", "solution": "s", "answer": 4, "source": "a contest"}, "problem, answer, or with solution",
     "prompt: problem, completion: answer"),
    ({"instruction": "q", "input": "", "output": "a", "text": "something else"}, "output, or with text",
     "prompt: instruction, input: input, completion: output"),
    ({"messages": EARLIER, "question": "q", "answer": "a"}, "messages, or with question, answer", "messages: messages"),
    ({"question": "q", "context": EARLIER, "answer": "a"}, "context, or with question, answer", "messages: context"),
    ({"prompt": [turn("user", ["q"])], "completion": [turn("assistant", ["a"])], "question": "other?"},
     "completion, or with question", "prompt: prompt, completion: completion"),
])  # fmt: skip
def test_a_row_that_can_be_read_in_two_ways_is_refused(value: dict[str, Any], keys: str, setting: str) -> None:
    with pytest.raises(RowError, match=f"in two ways: by .*{keys}") as caught:
        parse_row(value)
    assert settings_in(caught.value) == [f"{{{setting}}}"]
    columns = dict(part.split(": ") for part in setting.split(", "))
    assert parse_row(value, checked_columns(columns)).format in ("chat", "completions", "text")


@pytest.mark.parametrize(("value", "ignored"), [
    ({"prompt": "2 + 2?", "completion": "It is 4.", "answer": 4}, ("answer",)),
    ({"prompt": "Below: q", "instruction": "q", "completion": "a", "text": "Below: q a"}, ("instruction", "text")),
    ({"prompt": [turn("user", "q")], "question": "q", "completion": [turn("assistant", "a")]}, ("question",)),
    ({**chat("q", "a"), "problem": "q", "solution": "long", "answer": "a"}, ("answer", "problem", "solution")),
    ({"question": "q", "answer_a": "x", "answer_b": "y", "answer": "A"}, ("answer_a", "answer_b")),
    ({**PAIR, "labels": ["sums"], "sentiment": "pos"}, ("labels", "sentiment")),
])  # fmt: skip
def test_what_repeats_the_row_or_means_nothing_is_left_out(value: object, ignored: tuple[str, ...]) -> None:
    assert parse_row(value).ignored_keys == ignored


@pytest.mark.parametrize(("value", "setting"), [
    ({"id": "7", "frage": "Wer war es?", "antwort": "Niemand."}, "{prompt: frage, completion: antwort}"),
    ({"question": "q", "response_a": "a", "response_b": "bb"}, "{prompt: question, completion: response_b}"),
    ({"body": "t", "n": None}, "{text: body}"),
    ({"id": "7", "dialog": json.dumps(EARLIER)}, "{messages: dialog}"),
])  # fmt: skip
def test_unknown_keys_come_with_a_setting_to_look_at(value: object, setting: str) -> None:
    with pytest.raises(RowError, match=r"unknown keys \(") as caught:
        parse_row(value)
    assert settings_in(caught.value) == [setting]


def test_a_table_without_a_header_is_told() -> None:
    with pytest.raises(RowError, match="unknown keys") as caught:
        parse_row({"Who was it?": "Where is it?", "It was Ann.": "Here."})  # a table without a header
    assert (settings_in(caught.value), "not a header" in caught.value.do) == ([], True)


PUBLIC = [json.loads(line) for line in Path(__file__).with_name("public_rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("given", PUBLIC, ids=lambda given: given["set"])
def test_what_is_made_or_said_of_a_row_of_a_public_set(given: dict[str, Any]) -> None:
    if "becomes" in given:
        assert parsed(given["row"]).as_json() == given["becomes"]
        return
    with pytest.raises(RowError) as caught:
        parse_row(given["row"])
    assert given["says"] in str(caught.value)
    assert settings_in(caught.value) == [f"{{{way}}}" for way in given["columns"]]
    for way in given["columns"] if "chosen" in str(given["row"]) else ():  # the printed setting reads the row
        parse_row(given["row"], named_columns(part.replace(": ", "=") for part in way.split(", ")))
