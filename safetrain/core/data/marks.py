"""Replaces what people wrote in a chat by marks, so that what the template writes around it can be seen.

A template can react to what a message is (empty or not, its white space, the control strings that the template itself
spells or looks for, such as ``</think>``). All that is kept; each other run of words becomes one mark. That it reacts
to no other words is assumed, and checked: a rendering that contradicts it does not align (turns.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.template import REASONING_KEYS

MARK = re.compile(r"Zq(\d{5,})qZ")
END_OF_THINKING = re.compile(r"</think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|</seed:think>|◁/think▷")


@dataclass(frozen=True)
class Slot:
    """A run of words. ``kind``: content, thinking, name (of a called tool) or argument."""

    message: int
    kind: str
    text: str


@dataclass(frozen=True)
class Marked:
    """A chat with marks, and what each mark stands for. ``key`` is equal for chats of one shape."""

    messages: tuple[dict[str, Any], ...]
    slots: tuple[Slot, ...]
    key: str


@dataclass(frozen=True)
class Marking:
    """What is marked. Some templates look a called tool up by its name, or parse what a tool returned."""

    names: bool = True
    others: bool = True  # messages that are not the assistant's


def mark_messages(
    messages: Sequence[Mapping[str, Any]], control: "re.Pattern[str] | None", source: str, marking: Marking
) -> Marked:
    """``messages`` as the template reads them, with marks. ``control`` finds the template's own control strings."""
    marker = _Marker(control, source, marking)
    marked = tuple(marker.message(index, message) for index, message in enumerate(messages))
    return Marked(marked, tuple(marker.slots), "\0".join(map(_shape, marked)))


def _shape(message: Mapping[str, Any]) -> str:
    """Equal for messages that differ in their words alone."""
    if len(message) == 2 and isinstance(message["content"], str):
        return f"{message['role']}\1{message['content']}"
    return json.dumps(message, ensure_ascii=False)


class _Marker:
    def __init__(self, control: "re.Pattern[str] | None", source: str, marking: Marking) -> None:
        self._control, self._source, self._marking = control, source, marking
        self.slots: list[Slot] = []

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """One message with its words replaced."""
        if message["role"] != "assistant" and not self._marking.others:
            return dict(message)
        if len(message) == 2:  # role and content, as most are
            return {"role": message["role"], "content": self._content(index, message.get("content"))}
        marked = dict(message)
        thinking = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
        if thinking and message["role"] == "assistant":  # copies of one text under the names that templates read
            text = self._words(index, "thinking", message[thinking[0]])
            marked.update(dict.fromkeys(thinking, text))
        marked["content"] = self._content(index, message.get("content"))
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _content(self, index: int, content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": self._content(index, part["text"])} for part in content]
        if not isinstance(content, str):
            return content
        if self._control is None or self._control.search(content) is None:
            return self._words(index, "content", content)
        found = list(self._control.finditer(content))
        ends = [match.start() for match in found if END_OF_THINKING.fullmatch(match.group())]
        pieces, start = [], 0
        for match in found:
            kind = "thinking" if ends and match.start() <= ends[-1] else "content"
            pieces += [self._words(index, kind, content[start : match.start()]), match.group()]
            start = match.end()
        return "".join([*pieces, self._words(index, "content", content[start:])])

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        name = function.get("name")
        if (
            self._marking.names
            and isinstance(name, str)
            and f"'{name}'" not in self._source
            and f'"{name}"' not in self._source
        ):
            function["name"] = self._words(index, "name", name)
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # as JSON text: the text stays JSON
            try:
                arguments = json.dumps(self._value(index, json.loads(arguments)), ensure_ascii=False)
            except ValueError:
                arguments = self._words(index, "argument", arguments)
        elif arguments is not None:
            arguments = self._value(index, arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def _value(self, index: int, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._value(index, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(index, item) for item in value]
        return self._words(index, "argument", value) if isinstance(value, str) else value

    def _words(self, index: int, kind: str, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        self.slots.append(Slot(index, kind, core))
        return f"{text[:start]}Zq{len(self.slots) - 1:05d}qZ{text[start + len(core) :]}"
