"""A training row: parsed from one value in any of the forms that are met, without files or tokens."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from safetrain.core.data.capitals import as_written, respelled, usual_capitals
from safetrain.core.data.foreign_rows import (
    AS_OBJECTS,
    TWO_WAYS,
    Columns,
    Taken,
    UnknownKeysError,
    by_columns,
    key_names,
    pair,
    refuse_beside_completion,
    refuse_beside_messages,
    refuse_turns_beside,
    unknown_row,
    usual_form,
    with_history,
)
from safetrain.core.data.messages import Message, joined_text, parse_messages
from safetrain.core.data.other_meanings import refuse_other_meanings, refuse_several_answers
from safetrain.core.data.strict_json import Remedy, RowError, kind, require_unicode, shown
from safetrain.core.data.tool_forms import tools_text
from safetrain.core.data.turn_forms import is_turn

__all__ = ["Message", "Row", "RowError", "is_row", "parse_row"]

CHAT_KEYS = frozenset(("messages", "tools", "system", "functions"))
COMPLETION_KEYS = frozenset(("prompt", "completion", "tools", "system"))
TEXT_KEYS = frozenset(("text",))
GROUPS, MOST_GROUP = ("category", "task"), 80  # keys that say what kind of row it is, and the longest such text
CONTROLS = bytes(code for code in range(32) if chr(code) not in "\t\n\r")


_encode = json.JSONEncoder(ensure_ascii=False).encode  # made once: json.dumps makes one at each call


@dataclass(frozen=True, slots=True)
class Row:
    """A training example: messages (chat, tools, completions) or bare text. ``tools`` is JSON text or empty.

    ``ignored_keys`` are keys of the object that nothing reads, ``remarks`` the ids of what deserves a word, ``taken``
    says which keys the row was made of, where they are not the usual ones; ``group`` its category or task, which
    answers are scored by.
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
        """The object to write to data/validated, in the format it came in."""
        if self.format == "text":
            return {"text": self.text}
        if self.format == "completions":
            pair = {"prompt": self.messages[-2].content, "completion": self.messages[-1].content}
            return pair if len(self.messages) == 2 else {"system": self.messages[0].content, **pair}
        value: dict[str, Any] = {"messages": [message.as_json() for message in self.messages]}
        if self.format == "tools":
            value["tools"] = json.loads(self.tools)
        return value

    @property
    def system(self) -> str:
        """Its system prompt; empty where it has none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    def with_group(self) -> dict[str, Any]:
        """As ``as_json``, with the category that answers are scored by."""
        value = self.as_json()
        return {**value, GROUPS[0]: self.group} if self.group else value

    def identity(self) -> str:
        """Equal for rows that say the same, whatever the order of their keys."""
        return json.dumps(self.as_json(), sort_keys=True, ensure_ascii=False)

    def question(self) -> str:
        """What the row asks, without the answers: rows that share it must not be split between train and test."""
        if self.format == "text":
            return self.text
        return _encode([(m.role, m.content) for m in self.messages if m.role != "assistant"])


def parse_row(value: object, columns: Columns | None = None) -> Row:
    """The row in ``value``, taken by ``columns`` or, without them, by the usual names; raises RowError."""
    row = _parsed(value, columns)
    return _with_group(row, value) if row.ignored_keys and isinstance(value, dict) else row


def _with_group(row: Row, value: dict[str, Any]) -> Row:
    for key in GROUPS:
        text = value.get(key) if key in row.ignored_keys else None
        if isinstance(text, str) and len(text) <= MOST_GROUP and text.isprintable():
            return replace(row, group=text.strip(), ignored_keys=tuple(k for k in row.ignored_keys if k != key))
    return row


def _parsed(value: object, columns: Columns | None) -> Row:
    if isinstance(value, list) and value and all(map(is_turn, value)):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RowError(f"a row must be a JSON object, this is {kind(value)}", AS_OBJECTS)
    if columns:
        return _taken(value, by_columns(value, columns))
    written = usual_capitals(value)
    return _respelled(value, written) if written else _by_names(value)


def _respelled(value: dict[str, Any], written: Columns) -> Row:
    try:
        row = _by_names(respelled(value, written))
    except UnknownKeysError:
        raise UnknownKeysError(key_names(value), value) from None
    except RowError as error:
        raise RowError(f"{error}; here the keys are written {', '.join(written.values())}", error.remedy) from None
    ignored = tuple(sorted(written.get(key, key) for key in row.ignored_keys))
    return replace(row, taken=as_written(row.taken, written, row.ignored_keys), ignored_keys=ignored)


def _by_names(value: dict[str, Any]) -> Row:
    """The row by its usual keys."""
    refuse_other_meanings(value)
    row = _usual_row(value)
    if row is not None:
        return row
    taken = usual_form(value)
    if taken is None:
        refuse_several_answers(value)
        raise unknown_row(value)
    return _taken(value, taken)


def is_row(value: object) -> bool:
    """Whether it is a row by the usual names, also one that can be read in two ways."""
    try:
        parse_row(value)
    except RowError as error:
        return str(error).startswith(TWO_WAYS)
    return True


def _usual_row(value: dict[str, Any], place: str = "messages") -> Row | None:
    if value.get("messages") is not None:
        if len(value) > 1:
            refuse_beside_messages(value)
        return _chat(value, place)
    if value.get("prompt") is not None and value.get("completion") is not None:
        refuse_turns_beside(value, "prompt", "completion")
        if len(value) > 2:
            refuse_beside_completion(value)
        if value.get("history"):
            return replace(_chat(with_history(value), "messages"), taken="history -> turns before")
        return _completions(value)
    if value.get("text") is not None:
        return _text_row(value)
    return None


def _taken(value: dict[str, Any], taken: Taken) -> Row:
    row = _usual_row(taken.value, taken.place)
    if row is None:
        raise RowError(f"null or nothing for messages, prompt and completion, or text ({taken.how})")
    return replace(row, taken=taken.how, ignored_keys=_ignored(value, taken.used))


def _chat(value: dict[str, Any], place: str) -> Row:
    messages = parse_messages(value["messages"], place)
    if value.get("system") is not None:
        messages = _with_system(value["system"], messages)
    return _row_of(messages, value, CHAT_KEYS)


def _with_system(text: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A system text that stands beside the messages (Bedrock, LLaMA-Factory) comes first among them."""
    system = _system(text)
    if not system or messages[0] == system[0]:
        return messages
    if messages[0].role in ("system", "developer"):
        raise RowError("the system text stands twice and differs: beside messages and in messages[0]; keep one")
    return system + messages


def _system(value: object) -> tuple[Message, ...]:
    if value is None or value == "":
        return ()
    return (Message("system", _text(value, "system")),)


def _completions(value: dict[str, Any]) -> Row:
    prompt, completion, system = value["prompt"], value["completion"], _system(value.get("system"))
    if isinstance(prompt, list) or isinstance(completion, list):
        return _row_of(_joined(prompt, completion, value.get("system")), value, COMPLETION_KEYS)
    turns = (*system, *_turns(prompt, "user", "prompt"), *_turns(completion, "assistant", "completion"))
    if value.get("tools"):  # mlx-lm's completions have none: it becomes the format that does
        return _row_of(turns, value, COMPLETION_KEYS)
    return Row("completions", turns, ignored_keys=_ignored(value, COMPLETION_KEYS), remarks=_remarks(turns))


def _joined(prompt: object, completion: object, system: object) -> tuple[Message, ...]:
    """TRL's prompt and completion as lists of messages. As there, only the completion is trained."""
    before, after = _turns(prompt, "user", "prompt"), _turns(completion, "assistant", "completion")
    if not any(message.role == "assistant" for message in after):
        raise RowError("completion has no assistant turn: there is nothing to learn in this row")
    shown_only = tuple(replace(m, trained=False) if m.role == "assistant" else m for m in before)
    return _with_system(system, shown_only) + after


def _turns(value: object, role: str, key: str) -> tuple[Message, ...]:
    """A list of messages, or a text as one message of this role."""
    return parse_messages(value, key) if isinstance(value, list) else (Message(role, _text(value, key)),)


def _row_of(messages: tuple[Message, ...], value: dict[str, Any], keys: frozenset[str]) -> Row:
    trained = [message.trained for message in messages if message.role == "assistant"]
    if not trained:
        raise RowError("no assistant turn: there is nothing to learn in this row")
    if True not in trained:
        raise RowError("every assistant turn has weight 0: there is nothing to learn in this row")
    remarks = _remarks(messages)
    if len(value) == 1:
        return Row("chat", messages, remarks=remarks)
    offered = value.get("tools") or value.get("functions")  # as OpenAI wrote it before
    tools = tools_text(offered) if offered else ""
    return Row("tools" if tools else "chat", messages, tools, "", _ignored(value, keys), remarks)


def _text_row(value: dict[str, Any]) -> Row:
    text = _text(value["text"], "text")
    other = pair(value) if len(value) > 1 else None
    if other is not None:
        return _two_ways(value, text, other)
    remarks = ("CONTROL-CHARACTERS",) if _has_controls(text.encode()) else ()
    return Row("text", text=text, ignored_keys=_ignored(value, TEXT_KEYS), remarks=remarks)


def _two_ways(value: dict[str, Any], text: str, other: Taken) -> Row:
    """A text beside a question and its answer: where it only repeats them, as Alpaca's does, they are the row."""
    asked, answered = (other.value.get(key) for key in ("prompt", "completion"))
    said = [part for part in (asked, answered) if isinstance(part, str)]
    if len(said) == 2 and all(line.strip() in text for part in said for line in part.split("\n\n")):
        return _taken(value, other)
    raise RowError(
        f"{TWO_WAYS}: text as it stands, every token of it trained "
        f"(data.columns={{text: text}}), or {other.how} (data.columns={{prompt: …, completion: …}})",
        Remedy(ways=({"text": "text"},)),
    )


def _ignored(value: dict[str, Any], used: frozenset[str]) -> tuple[str, ...]:
    """The keys that nothing reads, unless they are empty."""
    return tuple(
        sorted(shown(key) for key, item in value.items() if key not in used and item not in (None, "", [], {}))
    )


def _remarks(messages: tuple[Message, ...]) -> tuple[str, ...]:
    found = []
    if not all(message.content.strip() for message in messages if message.role in ("user", "tool")):
        found.append("EMPTY-MESSAGE")
    if messages[-1].role == "user":
        found.append("ENDS-WITH-USER")
    if any('"tool_calls"' in message.details and _has_text_arguments(message) for message in messages):
        found.append("ARGUMENTS-TEXT")
    if _has_controls(joined_text(messages, "messages")):
        found.append("CONTROL-CHARACTERS")
    return tuple(found)


def _has_text_arguments(message: Message) -> bool:
    """Whether the arguments of a call are a text that is no JSON object."""
    return any(isinstance(call["function"].get("arguments"), str) for call in json.loads(message.details)["tool_calls"])


def _has_controls(content: bytes) -> bool:
    """NUL and the like. Deleting them from the bytes is several times faster than a search by pattern."""
    return len(content.translate(None, CONTROLS)) != len(content)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} must be a text, this is {kind(value)}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    require_unicode(value, key)
    return value
