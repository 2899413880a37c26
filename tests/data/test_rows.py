"""Every form of a row that is met in the wild is read as what it says, or refused with the mapping that helps."""

import json
import pickle

import pytest

from safetrain.data.forms import parse_row
from safetrain.data.json_rows import RowError, load
from safetrain.data.rows import Row
from tests.conftest import chat

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


def test_openais_weight_is_honoured() -> None:
    roles, texts = ("user", "assistant") * 2, ("Capital of France?", "Paris", "Again?", "Paris, as said.")
    row = parsed(of(*(turn(*pair, weight=n // 2) for n, pair in enumerate(zip(roles, texts, strict=True)))))
    assert [message.trained for message in row.messages] == [True, False, True, True]
    assert all("weight" not in message.for_template() for message in row.messages)
    assert [message.get("weight") for message in row.as_json()["messages"]] == [None, 0, None, None]


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


# What is refused in one row, and what is said


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (of(turn("robot", "q")), "messages[0].role is 'robot'; expected one of system"),
        (of(turn("user", 3)), "messages[0].content must be a string or {"),
        (of(turn("assistant", " ")), "messages[0] is an empty assistant turn"),
        (of(turn("user", [{"type": "image_url", "image_url": {}}])), "a part of type 'image_url': only text can be"),
        (
            of(turn("user", ["q", 3])),
            'messages[0].content[1] must be a string or {"type": "text", "text": "…"}, not a',
        ),
        (of(turn("user", "q", images=["a.png"])), "messages[0].images: only text can be trained on: leave the row out"),
        (of(turn("user", "q"), turn("assistant", "a", weight=0)), "no assistant turn to train"),
        (of(turn("assistant", "a", weight=0.5)), "messages[0].weight is 0.5; expected 0 (not trained on) or 1"),
        (of(turn("user", "q", tool_calls=[CALL])), "only an assistant turn calls tools"),
        (calling({"function": {"arguments": "{}"}}), "tool_calls[0] is an object with the keys arguments; expected {"),
        (
            calling({"name": "f", "parameters": {}}),
            "tool_calls[0] is an object with the keys name, parameters; expected",
        ),
        (calling({"name": "f", "arguments": {"a": "\ud83d"}}), "messages[1] holds half a surrogate pair"),
        ({**IRON, "tools": {"name": "f"}}, "tools must be a list, or the JSON text of a list, not an object"),
        (
            {**IRON, "tools": [{"name": "f", "input_schema": {}}]},
            "tools[0] is an object with the keys name, input_schema",
        ),
    ],
)
def test_a_refusal_says_what_to_write(value: object, says: str) -> None:
    assert says in refusal(value)
