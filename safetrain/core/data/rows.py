"""What a training row is. Parses one JSON object in any of mlx-lm's formats; knows nothing about files or tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = "chat {messages}, tools {messages, tools}, completions {prompt, completion}, text {text}"


class RowError(ValueError):
    """One row cannot be used; the message says why. The reader adds file and line."""


@dataclass(frozen=True)
class Message:
    """One turn. ``details`` is the JSON text of its other keys (tool_calls, name), empty when there are none."""

    role: str
    content: str
    details: str = ""

    def for_template(self) -> dict[str, Any]:
        """The mapping that chat templates read."""
        return {"role": self.role, "content": self.content, **(json.loads(self.details) if self.details else {})}


@dataclass(frozen=True)
class Row:
    """A training example: messages (chat, tools, completions) or bare text. ``tools`` is JSON text or empty."""

    format: str
    messages: tuple[Message, ...] = ()
    tools: str = ""
    text: str = ""

    def as_json(self) -> dict[str, Any]:
        """The object to write to data/validated, in the format it came in."""
        if self.format == "text":
            return {"text": self.text}
        if self.format == "completions":
            return {"prompt": self.messages[0].content, "completion": self.messages[1].content}
        value: dict[str, Any] = {"messages": [message.for_template() for message in self.messages]}
        if self.format == "tools":
            value["tools"] = json.loads(self.tools)
        return value

    def identity(self) -> str:
        """Equal for rows that say the same, whatever the order of their keys."""
        return json.dumps(self.as_json(), sort_keys=True, ensure_ascii=False)

    def question(self) -> str:
        """What the row asks, without the answers: rows that share it must not be split between train and test."""
        if self.format == "text":
            return self.text
        return json.dumps([(m.role, m.content) for m in self.messages if m.role != "assistant"], ensure_ascii=False)


def parse_row(value: object) -> Row:
    """The row in ``value``; raises RowError."""
    if not isinstance(value, Mapping):
        raise RowError(f"a row must be a JSON object, this is a {type(value).__name__}")
    if "messages" in value:
        tools = json.dumps(value["tools"], ensure_ascii=False) if value.get("tools") else ""
        return Row("tools" if tools else "chat", _messages(value["messages"]), tools)
    if "prompt" in value and "completion" in value:
        turns = (
            Message("user", _text(value["prompt"], "prompt")),
            Message("assistant", _text(value["completion"], "completion")),
        )
        return Row("completions", turns)
    if "text" in value:
        return Row("text", text=_text(value["text"], "text"))
    keys = ", ".join(map(str, value)) or "none"
    raise RowError(f"unknown keys ({keys}); expected one of: {FORMATS}")


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RowError("messages must be a list with at least one message")
    messages = tuple(_message(item, index) for index, item in enumerate(value))
    if not any(message.role == "assistant" for message in messages):
        raise RowError("no assistant turn: there is nothing to learn in this row")
    return messages


def _message(value: object, index: int) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(f"messages[{index}] must be an object with role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise RowError(f"messages[{index}].role is {role!r}; expected one of {', '.join(ROLES)}")
    details = {key: item for key, item in value.items() if key not in ("role", "content")}
    if content is None and details.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RowError(f"messages[{index}].content must be a text, this is {type(content).__name__}")
    _require_unicode(content, f"messages[{index}].content")
    if role == "assistant" and not content.strip() and not details.get("tool_calls"):
        raise RowError(f"messages[{index}] is an empty assistant turn")
    return Message(str(role), content, json.dumps(details, ensure_ascii=False) if details else "")


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} must be a text, this is {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    _require_unicode(value, key)
    return value


def _require_unicode(text: str, key: str) -> None:
    r"""JSON can say half a character (``\ud83d`` alone), which no tokenizer and no file takes."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RowError(f"{key} holds half a surrogate pair, which is no character")
