"""A training row, messages or bare text: how it is made of its parts, and written to data/validated."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from safetrain.data.messages import Message, joined_text, parse_messages, tools_text
from safetrain.data.strict_json import RowError, kind, require_unicode

GROUP = "category"  # the key under which a row's category is written
CONTROLS = bytes(code for code in range(32) if chr(code) not in "\t\n\r")


@dataclass(frozen=True, slots=True)
class Row:
    """A training example: messages (chat, tools, completions) or bare text. ``tools`` is JSON text or empty.

    ``ignored_keys`` are keys that nothing reads, ``remarks`` ids of findings, ``taken`` says which keys the row was
    made of where they are not the usual ones; ``group`` is its category or task, by which answers are scored.
    """

    format: str
    messages: tuple[Message, ...] = ()
    tools: str = ""
    text: str = ""
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)
    taken: str = field(default="", compare=False)
    group: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        """The object to write to data/validated, in the format it came in, with its category."""
        group = {GROUP: self.group} if self.group else {}
        if self.format == "text":
            return {"text": self.text, **group}
        if self.format == "completions":
            pair = {"prompt": self.messages[-2].content, "completion": self.messages[-1].content}
            return {**({"system": self.system} if self.system else {}), **pair, **group}
        tools = {"tools": json.loads(self.tools)} if self.format == "tools" else {}
        return {"messages": [message.as_json() for message in self.messages], **tools, **group}

    @property
    def system(self) -> str:
        """Its system prompt; empty where it has none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    def identity(self) -> str:
        """Equal for rows that say the same, whatever the order of their keys. Most are plain chats without JSON."""
        if self.tools or any(message.details or not message.trained for message in self.messages):
            return json.dumps(replace(self, group="").as_json(), sort_keys=True, ensure_ascii=False)
        return "\0".join([self.format, self.text, *(f"{each.role}\1{each.content}" for each in self.messages)])


def row_of(parts: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """The row of messages, of prompt and completion, or of text; ``keys`` are the names of the parts in errors."""
    if "text" in parts:
        text = _text(parts["text"], keys["text"])
        return Row("text", text=text, remarks=("INVISIBLE-CHARACTERS",) if _has_controls(text.encode()) else ())
    if "messages" in parts:
        turns = parse_messages(parts["messages"], keys.get("messages", "messages"))
    else:
        turns = _pair(parts, keys)
    messages = _with_system(parts.get("system"), turns)
    trained = [message.trained for message in messages if message.role == "assistant"]
    if not any(trained):
        why = "every assistant turn has weight 0 or is part of the prompt" if trained else "no assistant turn"
        raise RowError(f"{why}: there is nothing to learn in this row")
    is_plain = isinstance(parts.get("prompt"), str) and isinstance(parts.get("completion"), str)
    is_plain = is_plain and not parts.get("tools") and not parts.get("history")  # mlx-lm's completions have neither
    tools = tools_text(parts.get("tools"))
    form = "tools" if tools else "completions" if is_plain else "chat"
    return Row(form, messages, tools, remarks=_remarks(messages))


def _pair(parts: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The turns of a prompt, with what it is about and what was said before, and of a completion."""
    prompt, completion, more = parts["prompt"], parts["completion"], parts.get("input")
    if more:
        if not isinstance(prompt, str) or not isinstance(more, str):
            raise RowError(f"{keys['input']} is {kind(more)}; it and the prompt must be texts")
        prompt = "\n\n".join(text for text in (prompt, more) if text.strip()) or prompt
    before = _earlier(parts.get("history")) + _turns(prompt, "user", keys["prompt"])
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _shown_only(before)  # as in TRL
    return before + _turns(completion, "assistant", keys["completion"])


def _turns(value: object, role: str, key: str) -> tuple[Message, ...]:
    """A list of messages, or a text as one message of this role."""
    return parse_messages(value, key) if isinstance(value, list) else (Message(role, _text(value, key)),)


def _earlier(history: object) -> tuple[Message, ...]:
    """The turns of LLaMA-Factory's pairs, which are trained, or of messages, which are only shown."""
    if not history:
        return ()
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        return _shown_only(parse_messages(history, "history"))
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    return parse_messages(turns, "history")


def _shown_only(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(each, trained=False) if each.role == "assistant" else each for each in messages)


def _with_system(text: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages after the system text that stands beside them (Bedrock, LLaMA-Factory)."""
    if text is None or text == "":
        return messages
    system = Message("system", _text(text, "system"))
    if messages[0].role not in ("system", "developer"):
        return (system, *messages)
    if messages[0] != system:
        raise RowError("the system text stands twice and differs: beside messages and in messages[0]; keep one")
    return messages


def _remarks(messages: tuple[Message, ...]) -> tuple[str, ...]:
    """The ids of findings that the messages alone show."""
    found = []
    if not all(message.content.strip() for message in messages if message.role in ("user", "tool")):
        found.append("EMPTY-MESSAGE")
    if messages[-1].role == "user":
        found.append("ENDS-WITH-USER")
    if _has_controls(joined_text(messages)):
        found.append("INVISIBLE-CHARACTERS")
    return tuple(found)


def _has_controls(content: bytes) -> bool:
    """Whether there is NUL or the like. To delete them from bytes is several times faster than a search by pattern."""
    return len(content.translate(None, CONTROLS)) != len(content)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} must be a text, this is {kind(value)}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    require_unicode(value, key)
    return value
