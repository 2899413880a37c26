"""Puts marks in place of what people wrote in a chat, so that what the template writes around it can be seen.

A template can react to what a message is: empty or not, its white space, the control strings that the template itself
spells or looks for, such as ``</think>``. All that stays; each other run of words becomes one mark. That the template
reacts to no other words is assumed, and checked: a rendering that contradicts it does not align with its marked one.
"""

import functools
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.template import Skeleton
from safetrain.data.messages import Message
from safetrain.data.rows import Row

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
CONTROL = re.compile(r"</?[^<>\s{}%]{1,60}>|\[/?[A-Z][A-Z_]+\]|◁/?\w+▷")  # what may be a template's control string
ASKED_FOR = re.compile(  # texts that a template looks for in a message: '/no_think' in content, content.startswith('…')
    r"""['"]([^'"\n]{2,60})['"]\s*(?:not\s+)?in\b|\.(?:(?:starts|ends)with|r?split|replace|r?find|r?index|r?partition)"""
    r"""\(\s*['"]([^'"\n]{2,60})['"]"""
)
END_OF_THINKING = re.compile(r"</think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|</seed:think>|◁/think▷")


@dataclass(frozen=True)
class ChatForm:
    """One of the ways to hand the same chat to a template. Published templates want different ones."""

    arguments_as_text: bool = False
    null_content: bool = False  # None where there is a call and no text, as OpenAI has it
    developer_as_system: bool = False
    content_as_parts: bool = False

    def chat(self, row: Row) -> list[dict[str, Any]]:
        """All messages of a row, as a template reads them."""
        return [self._of(message) for message in row.messages]

    def _of(self, message: Message) -> dict[str, Any]:
        value = message.for_template()
        if len(value) == 2 and self == USUAL:
            return value
        if self.developer_as_system and value["role"] == "developer":
            value["role"] = "system"
        reasoning = next((value[key] for key in REASONING_KEYS if isinstance(value.get(key), str)), None)
        if reasoning is not None:  # as transformers does: gpt-oss reads thinking, most read reasoning_content
            value = {"thinking": reasoning, **value, "reasoning_content": reasoning}
        if self.null_content and is_null(message):
            value["content"] = None
        elif self.content_as_parts:
            value["content"] = [{"type": "text", "text": message.content}]
        if self.arguments_as_text and value.get("tool_calls"):
            value["tool_calls"] = [_with_text_arguments(call) for call in value["tool_calls"]]
        return value


USUAL = ChatForm()


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


def is_null(message: Message) -> bool:
    """Whether there is a call and no text: null and an empty text say the same."""
    return message.role == "assistant" and not message.content and message.calls_tools


def mark_messages(messages: Sequence[Mapping[str, Any]], source: str, marking: Marking) -> Marked:
    """``messages`` as the template with this ``source`` reads them, with marks."""
    marker = _Marker(source, marking)
    marked = tuple(marker.message(index, message) for index, message in enumerate(messages))
    shapes = (
        f"{each['role']}\1{each['content']}"
        if len(each) == 2 and isinstance(each["content"], str)
        else json.dumps(each, ensure_ascii=False)
        for each in marked
    )
    return Marked(marked, tuple(marker.slots), "\0".join(shapes))


def align(skeleton: Skeleton, slots: Sequence[Slot], text: str) -> list[tuple[int, int]] | None:
    """Where each mark of the skeleton stands in the chat's real ``text``; None if that is not the same chat.

    Every character of ``text`` is accounted for. Words may be written as they are, or escaped.
    """
    literals = skeleton.literals
    position, spans = len(literals[0]), []
    if not text.startswith(literals[0]):
        return None
    for literal, number in zip(literals[1:], skeleton.places, strict=True):
        words = slots[number].text
        for written in (words,) if text.startswith(words, position) else spellings(words):
            end = position + len(written)
            if text.startswith(written, position) and text.startswith(literal, end):
                spans.append((position, end))
                position = end + len(literal)
                break
        else:
            return None
    return spans if position == len(text) else None


def spellings(text: str) -> Iterator[str]:
    """The ways in which templates write words: as they are, or escaped."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]
    yield html.escape(text)
    yield re.sub(r"\s+", " ", text)


@functools.lru_cache(maxsize=8)
def _control_pattern(source: str) -> "re.Pattern[str] | None":
    """Finds every text that a template can react to inside a message: what it spells or looks for."""
    looked_for = {one or two for one, two in ASKED_FOR.findall(source)}
    found = set(CONTROL.findall(source)) | {text for text in looked_for if not re.fullmatch(r"\w+|(?:\s|\\n)+", text)}
    ordered = sorted(found, key=lambda text: (-len(text), text))  # the longest first
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class _Marker:
    def __init__(self, source: str, marking: Marking) -> None:
        self._control, self._source, self._marking = _control_pattern(source), source, marking
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
            marked.update(dict.fromkeys(thinking, self._words(index, "thinking", message[thinking[0]])))
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
        name, arguments = function.get("name"), function.get("arguments")
        is_spelled = f"'{name}'" in self._source or f'"{name}"' in self._source
        if self._marking.names and isinstance(name, str) and not is_spelled:
            function["name"] = self._words(index, "name", name)
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


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
