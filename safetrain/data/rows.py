"""A training row: messages or bare text, with its tools; how it is written to data/validated."""

import json
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
    made of where they are not the usual ones; ``group`` is its category or task, which answers are scored by.
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
            system = {"system": self.messages[0].content} if len(self.messages) > 2 else {}
            return {**system, **pair, **group}
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


def row_of(value: dict[str, Any], place: str = "messages") -> Row:
    """The row in ``value``, which has the usual keys; ``place`` is what messages are called in errors."""
    if value.get("messages") is not None:
        messages = _with_system(value.get("system"), parse_messages(value["messages"], place))
        return _chat(messages, value)
    if value.get("prompt") is None:
        text = _text(value["text"], "text")
        return Row("text", text=text, remarks=("INVISIBLE-CHARACTERS",) if _has_controls(text.encode()) else ())
    prompt, completion = value["prompt"], value["completion"]
    before, after = _turns(prompt, "user", "prompt"), _turns(completion, "assistant", "completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        if not any(message.role == "assistant" for message in after):
            raise RowError("completion has no assistant turn: there is nothing to learn in this row")
        before = tuple(replace(m, trained=False) if m.role == "assistant" else m for m in before)  # as in TRL
        return _chat(_with_system(value.get("system"), before) + after, value)
    turns = _with_system(value.get("system"), before) + after
    if value.get("tools"):  # mlx-lm's completions have none: it becomes the format that does
        return _chat(turns, value)
    return Row("completions", turns, remarks=_remarks(turns))


def _chat(messages: tuple[Message, ...], value: dict[str, Any]) -> Row:
    trained = [message.trained for message in messages if message.role == "assistant"]
    if not any(trained):
        why = "every assistant turn has weight 0" if trained else "no assistant turn"
        raise RowError(f"{why}: there is nothing to learn in this row")
    tools = tools_text(value.get("tools") or value.get("functions"))  # as OpenAI wrote it before
    return Row("tools" if tools else "chat", messages, tools, remarks=_remarks(messages))


def _with_system(text: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A system text beside the messages (Bedrock, LLaMA-Factory) comes first among them."""
    if text is None or text == "":
        return messages
    system = Message("system", _text(text, "system"))
    if messages[0] == system:
        return messages
    if messages[0].role in ("system", "developer"):
        raise RowError("the system text stands twice and differs: beside messages and in messages[0]; keep one")
    return (system, *messages)


def _turns(value: object, role: str, key: str) -> tuple[Message, ...]:
    """A list of messages, or a text as one message of this role."""
    return parse_messages(value, key) if isinstance(value, list) else (Message(role, _text(value, key)),)


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
