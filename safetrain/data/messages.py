"""The turns of a chat and its tools, read from the forms of OpenAI, ShareGPT and Gemini, brought to OpenAI's."""

import json
from dataclasses import dataclass
from typing import Any

from safetrain.data.strict_json import RowError, dump, kind, load, load_object, require_unicode, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {  # what others call them, in small letters
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter", "customer", "client", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatbot", "chatgpt", "agent", "answer", "response"), "assistant"),
    **dict.fromkeys(("observation", "ipython", "environment", "function_response", "tool_result"), "tool"),
    **dict.fromkeys(("tool_results", "tool_response", "tool_output", "function"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")
OTHER_FORMS = frozenset(("from", "function_call", "train", "training", "parts"))
OWN_KEYS = ("role", "content", "weight", "loss_weight")
MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos")
TEXT_PARTS = ("text", "input_text", "output_text")
TEXT_ALONE = "only text can be trained here; leave the row out"
PART_REMEDIES = {  # by the type of a part
    "thinking": "write it in the message's key reasoning_content",
    "reasoning": "write it in the message's key reasoning_content",
    "tool_use": "write it in the message's key tool_calls",
    "tool_call": "write it in the message's key tool_calls",
    "tool_result": "write it as a message with role 'tool'",
    "refusal": "write it as a text, if the model should learn to say it",
    **dict.fromkeys(
        ("image", "image_url", "input_image"), "an image: only text can be trained here; leave the row out"
    ),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio: only text can be trained here; leave the row out"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video: only text can be trained here; leave the row out"),
    **dict.fromkeys(("file", "input_file", "document"), "a file: only text can be trained here; leave the row out"),
}
CALL = '{"type": "function", "function": {"name": …, "arguments": {…}}}'
TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``details`` is the JSON text of its other keys (tool_calls, name), empty when there are none.

    ``trained`` is False for an assistant turn of weight 0. ``content_is_null`` tells a null beside tool calls from "".
    """

    role: str
    content: str
    details: str = ""
    trained: bool = True
    content_is_null: bool = False

    @property
    def calls_tools(self) -> bool:
        """Whether the turn has tool calls."""
        return '"tool_calls"' in self.details

    def for_template(self) -> dict[str, Any]:
        """The mapping that chat templates read."""
        return {"role": self.role, "content": self.content, **(json.loads(self.details) if self.details else {})}

    def as_json(self) -> dict[str, Any]:
        """The object to write; ``parse_messages`` reads the same message from it."""
        value = self.for_template()
        if self.content_is_null:
            value["content"] = None
        return value if self.trained else {**value, "weight": 0}


def is_turn(value: object) -> bool:
    """Whether it looks like one turn of a chat, in any of the forms."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "parts" in value or "tool_calls" in value))
        or ("from" in value and "value" in value)
    )


def parse_messages(value: object, place: str) -> tuple[Message, ...]:
    """The turns in ``value``, a list; ``place`` names it in errors. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{place} must be a list with at least one message")
    return tuple([_message(item, f"{place}[{index}]") for index, item in enumerate(value)])


def joined_text(messages: tuple[Message, ...]) -> bytes:
    """All contents in UTF-8, at once because it is quicker; raises RowError for half a character."""
    try:
        return "".join([message.content for message in messages]).encode()
    except UnicodeEncodeError:
        for index, message in enumerate(messages):
            require_unicode(message.content, f"messages[{index}].content")
        raise  # two halves in two messages are not a character either, and each was found above


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object with role and content, this is {kind(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and role in ROLES and type(content) is str and content and not content.isspace():
        return Message(role, content)  # nearly all: 100,000 rows have some 300,000 of them
    if role not in ROLES or not OTHER_FORMS.isdisjoint(value):
        value = _usual_turn(value, place)
        role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        said = f"'{shown(role)}'" if isinstance(role, str) else kind(role) if role is not None else "missing"
        raise RowError(f"{place}.role is {said}; expected one of {', '.join(ROLES)}")
    details = _details(value, role, place)
    calls, is_null = "tool_calls" in details, content is None
    only = ": it has reasoning_content and no answer" if "reasoning_content" in details else ""
    if not isinstance(content, str):
        content = "" if is_null and calls else _text_of(content, place, only)
    if role == "assistant" and not calls and not content.strip():
        raise RowError(f"{place} is an empty assistant turn{only}")
    return Message(role, content, dump(details, place) if details else "", _is_trained(value, role, place), is_null)


def _usual_turn(value: dict[str, Any], place: str) -> dict[str, Any]:
    """The turn with role, content, tool_calls and weight; what is not understood is left as it is."""
    turn = dict(value)
    if turn.get("role") is None and "from" in turn:  # ShareGPT
        turn["role"] = turn.pop("from")
        if turn.get("content") is None:
            turn["content"] = turn.pop("value", None)
    if "content" not in turn and isinstance(turn.get("parts"), list):  # Gemini
        turn["content"] = [{"type": "text", **part} if isinstance(part, dict) else part for part in turn.pop("parts")]
    for key in ("train", "training"):
        if isinstance(turn.get(key), bool):
            turn.setdefault("weight", int(turn.pop(key)))
    if turn.get("function_call"):  # OpenAI, before tools
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    name = turn["role"].strip().casefold() if isinstance(turn.get("role"), str) else ""
    if name in CALL_ROLES:
        calls = turn.pop("content", None)
        if isinstance(calls, str):
            try:
                calls = load(calls)
            except RowError as error:
                raise RowError(f"{place} is a call whose text must be JSON: {error}") from None
        return {**turn, "role": "assistant", "content": None, "tool_calls": calls if type(calls) is list else [calls]}
    return {**turn, "role": ROLE_NAMES[name]} if name in ROLE_NAMES else turn


def _details(value: dict[str, Any], role: str, place: str) -> dict[str, object]:
    """The other keys without those that are null, in their order (templates may print them), tool calls in one form."""
    details: dict[str, object] = {}
    for key, item in value.items():
        if item is None or key in OWN_KEYS or (key == "tool_calls" and not item):
            continue
        if key in MEDIA_KEYS and item:
            raise RowError(f"{place}.{key}: images, audio and video cannot be trained here: leave the row out")
        if key == "tool_calls" and role != "assistant":
            raise RowError(f"{place}.tool_calls: only an assistant turn calls tools, and this has role '{role}'")
        details[key] = _tool_calls(item, f"{place}.tool_calls") if key == "tool_calls" else item
    return details


def _is_trained(value: dict[str, Any], role: str, place: str) -> bool:
    """OpenAI's ``weight``, LLaMA-Factory's ``loss_weight``; turns of other roles are never trained anyway."""
    for key in ("weight", "loss_weight"):
        weight = value.get(key)
        if weight is None:
            continue
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowError(f"{place}.{key} is {shown(weight)}; expected 0 (not trained) or 1 (trained)")
        return weight == 1 or role != "assistant"
    return True


def _text_of(content: object, place: str, only: str) -> str:
    """The text of content that is not a text: parts are joined, all else is refused."""
    if isinstance(content, list):
        return "".join([_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)])
    if content is None:
        why = only or " and there are no tool_calls"
        raise RowError(f'{place}.content is null or missing{why}; write a text ("" for a tool that gave nothing)')
    raise RowError(f"{place}.content must be a text, this is {kind(content)}")


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError(f"{place} must be a text part, this is {kind(part)}")
    name = part.get("type", "text")
    text = part.get("text", part.get("value"))  # LLaMA-Factory's parts have value
    if name in TEXT_PARTS and isinstance(text, str):
        return text
    if isinstance(name, str) and name in PART_REMEDIES:
        raise RowError(f"{place} is a part of type '{name}': {PART_REMEDIES[name]}")
    raise RowError(f'{place} is not a text part (type \'{shown(name)}\'); expected {{"type": "text", "text": "…"}}')


def _tool_calls(value: object, place: str) -> list[dict[str, object]]:
    """The calls of one message, each ``{"type": "function", "function": {"name", "arguments"}}``."""
    if not isinstance(value, list):
        raise RowError(f"{place} must be a list of calls, this is {kind(value)}; a call is written {CALL}")
    return [_tool_call(item, f"{place}[{index}]") for index, item in enumerate(value)]


def _tool_call(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object, this is {kind(value)}; a call is written {CALL}")
    call = {key: item for key, item in value.items() if item is not None}
    if "function" not in call and "name" in call:  # Hermes and mlx-lm: the call without the object around it
        inner = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
        call = {**call, "function": inner}
    call.setdefault("type", "function")
    function = call.get("function")
    if not isinstance(function, dict):
        raise RowError(f"{place}.function must be an object, this is {kind(function)}; a call is written {CALL}")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RowError(f"{place}.function.name must be the name of the called tool; a call is written {CALL}")
    if "parameters" in function and function.get("arguments") is None:
        raise RowError(f"{place}.function has parameters: in a call they are named arguments")
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: object, place: str) -> object:
    """An object, or the text where it holds no object. OpenAI writes a call without arguments as ``""``."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        parsed = load_object(value)
        return value if parsed is None else parsed
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object or its JSON text, this is {kind(value)}")
    return value


def tools_text(value: object) -> str:
    """The tools of a row as JSON text of a list, each in OpenAI's form; empty when there are none."""
    if isinstance(value, str) and value.strip():
        try:
            value = load(value)
        except RowError as error:
            raise RowError(f"tools is a text that must be a JSON list: {error}") from None
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return ""
    if not isinstance(value, list):
        raise RowError(f"tools must be a list, or the JSON text of a list, this is {kind(value)}")
    return dump([_tool(item, f"tools[{index}]") for index, item in enumerate(value)], "tools")


def _tool(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object, this is {kind(value)}; a tool is written {TOOL}")
    if "input_schema" in value:
        raise RowError(f"{place} has input_schema (Anthropic's form): name it parameters; a tool is written {TOOL}")
    if "function" not in value and "name" in value:  # flat, as in OpenAI's Responses and in `functions`
        inner = {key: item for key, item in value.items() if key != "type"}
        value = {"type": value.get("type") or "function", "function": inner}
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        keys = ", ".join(map(shown, value)) or "none"
        raise RowError(f"{place} names no function (keys: {keys}); a tool is written {TOOL}")
    return value if value.get("type") else {**value, "type": "function"}
