"""One turn of a chat, read from the forms in which OpenAI and the hub write it."""

import json
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.strict_json import RowError, dump, kind, require_unicode, shown
from safetrain.core.data.tool_forms import tool_calls
from safetrain.core.data.turn_forms import OLD_KEYS, ROLES, usual_turn

TEXT_PARTS = ("text", "input_text", "output_text")
PART_NAMES = {
    **dict.fromkeys(("image_url", "image", "input_image"), "an image"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video"),
    **dict.fromkeys(("file", "input_file", "document"), "a file"),
}
PART_REMEDIES = {
    **dict.fromkeys(("thinking", "reasoning"), "write it in the message's key reasoning_content"),
    **dict.fromkeys(("tool_use", "tool_call"), "write it in the message's key tool_calls"),
    "tool_result": "write it as a message with role 'tool'",
    "refusal": "write it as a text, if the model shall learn to say it",
}
MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos")
OWN_KEYS = ("role", "content", "weight", "loss_weight")


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

    def for_template(self) -> dict[str, Any]:
        """The mapping that chat templates read."""
        return {"role": self.role, "content": self.content, **(json.loads(self.details) if self.details else {})}

    def as_json(self) -> dict[str, Any]:
        """The object to write; ``parse_message`` reads the same message from it."""
        value = self.for_template()
        if self.content_is_null:
            value["content"] = None
        return value if self.trained else {**value, "weight": 0}


def parse_messages(value: object, place: str) -> tuple[Message, ...]:
    """The turns in ``value``, a list; ``place`` names it in errors. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{place} must be a list with at least one message")
    return tuple([parse_message(item, f"{place}[{index}]") for index, item in enumerate(value)])


def parse_message(value: object, place: str) -> Message:
    """The turn in ``value``; raises RowError. Half characters in its content are left to ``joined_text``."""
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object with role and content, this is {kind(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and role in ROLES and type(content) is str and content and not content.isspace():
        return Message(role, content)  # nearly all: worth a way of its own, 100,000 rows have some 300,000 of them
    if role not in ROLES or not OLD_KEYS.isdisjoint(value):
        value = usual_turn(value, place)
        role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        said = f"'{shown(role)}'" if isinstance(role, str) else kind(role) if role is not None else "missing"
        raise RowError(f"{place}.role is {said}; expected one of {', '.join(ROLES)}")
    details = _details(value, role, place)
    calls, is_null = "tool_calls" in details, content is None
    if not isinstance(content, str):
        content = "" if is_null and calls else _text_of(content, place, reasons="reasoning_content" in details)
    if role == "assistant" and not calls and not content.strip():
        only = ": it has reasoning_content, and no answer" if "reasoning_content" in details else ""
        raise RowError(f"{place} is an empty assistant turn{only}")
    return Message(role, content, dump(details, place) if details else "", _trained(value, role, place), is_null)


def joined_text(messages: tuple[Message, ...], place: str) -> bytes:
    """All contents in UTF-8, at once because it is quicker; raises RowError for half a character."""
    try:
        return "".join([message.content for message in messages]).encode()
    except UnicodeEncodeError:
        for index, message in enumerate(messages):
            require_unicode(message.content, f"{place}[{index}].content")
        raise  # two halves in two messages are no character either, and each was found above


def _details(value: dict[str, Any], role: str, place: str) -> dict[str, object]:
    """The other keys, those that are null left out, tool calls in one form."""
    details = {key: item for key, item in value.items() if item is not None and key not in OWN_KEYS}
    for key in MEDIA_KEYS:
        if details.get(key):
            raise RowError(
                f"{place}.{key}: images, audio and video cannot be trained here, only text: leave the row out"
            )
    calls = details.pop("tool_calls", None)
    if not calls:
        return details
    if role != "assistant":
        raise RowError(f"{place}.tool_calls stand in a message of role '{role}': only an assistant turn calls tools")
    # where it stood: templates may print what they get in its order
    return {
        key: tool_calls(calls, f"{place}.tool_calls") if key == "tool_calls" else details[key]
        for key in value
        if key == "tool_calls" or key in details
    }


def _trained(value: dict[str, Any], role: str, place: str) -> bool:
    """OpenAI's ``weight``, LLaMA-Factory's ``loss_weight``.

    Turns of other roles are never trained: there, 0 says what happens anyway and 1 is the default.
    """
    for key in ("weight", "loss_weight"):
        weight = value.get(key)
        if weight is None:
            continue
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowError(f"{place}.{key} is {shown(weight)}; expected 0 (not trained) or 1 (trained)")
        return weight == 1 or role != "assistant"
    return True


def _text_of(content: object, place: str, *, reasons: bool) -> str:
    """The text of content that is no text: parts are joined, all else is refused."""
    if isinstance(content, list):
        return "".join([_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)])
    if content is None:
        why = ": it has reasoning_content, and no answer" if reasons else " and there are no tool_calls"
        raise RowError(f'{place}.content is null or missing{why}; write a text ("" for a tool that gave nothing)')
    remedy = "; put it in quotes" if isinstance(content, int | float) else ""
    raise RowError(f"{place}.content must be a text, this is {kind(content)}{remedy}")


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError(f"{place} must be a text part, this is {kind(part)}")
    name = part.get("type", "text")
    text = part.get("text", part.get("value"))  # LLaMA-Factory's parts have value
    if name in TEXT_PARTS and isinstance(text, str):
        return text
    if isinstance(name, str) and name in PART_NAMES:
        what = PART_NAMES[name]
        raise RowError(f"{place} is {what} (type '{name}'): only text can be trained here; leave the row out")
    if isinstance(name, str) and name in PART_REMEDIES:
        raise RowError(f"{place} is a part of type '{name}': {PART_REMEDIES[name]}")
    raise RowError(f'{place} is no text part (type \'{shown(name)}\'); expected {{"type": "text", "text": "…"}}')
