"""A chat with placeholders for what people wrote, and the search for the real words in a rendered chat.

A template can react to what a message is: empty or not, its white space, the control strings that the template itself
spells or looks for, such as ``</think>``. All that stays; each other run of words becomes one placeholder. That the
template reacts to no other words is assumed, and checked: if it does, the rendered texts do not align.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.template import Skeleton
from safetrain.data.rows import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
CONTROL = re.compile(r"</?[^<>\s{}%]{1,60}>|\[/?[A-Z][A-Z_]+\]|◁/?\w+▷")  # what may be a template's control string
LOOKED_FOR = re.compile(  # texts that a template looks for in a message: '/no_think' in content, content.split('…')
    r"""['"]([^'"\n]{2,60})['"]\s*(?:not\s+)?in\b|\.(?:(?:starts|ends)with|r?split|replace|r?find|r?index|r?partition)"""
    r"""\(\s*['"]([^'"\n]{2,60})['"]"""
)
END_OF_THINKING = re.compile(r"</think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|</seed:think>|◁/think▷")

Chat = list[dict[str, Any]]  # messages as a template reads them


@dataclass(frozen=True)
class Placeholder:
    """A run of words and where it stands. ``kind``: content, thinking, or call (a string of a tool call)."""

    message: int
    kind: str
    text: str


@dataclass(frozen=True)
class MarkedChat:
    """A chat with placeholders. ``shape`` is equal for chats that differ only in their words."""

    messages: Chat
    placeholders: tuple[Placeholder, ...]
    shape: str


def chat_of(messages: Sequence[Message]) -> Chat:
    """The messages as most templates read them; reasoning stands under both of its usual names."""
    chat = [message.for_template() for message in messages]
    for value in chat:
        reasoning = next((value[key] for key in REASONING_KEYS if isinstance(value.get(key), str)), None)
        if reasoning is not None:  # as transformers does: gpt-oss reads thinking, most read reasoning_content
            value.update(reasoning_content=reasoning, thinking=reasoning)
    return chat


def mark(chat: Chat, source: str) -> MarkedChat:
    """The chat with placeholders, for the template ``source``."""
    marker = _Marker(_control_strings(source))
    marked = [marker.message(index, message) for index, message in enumerate(chat)]
    return MarkedChat(marked, tuple(marker.placeholders), json.dumps(marked, ensure_ascii=False))


class _Marker:
    def __init__(self, control: "re.Pattern[str] | None") -> None:
        self._control = control
        self.placeholders: list[Placeholder] = []

    def message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """One message with its words replaced."""
        marked = dict(message)
        thinking = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
        if thinking:
            marked.update(dict.fromkeys(thinking, self._placeholder(index, "thinking", message[thinking[0]])))
        marked["content"] = self._content(index, message["content"])
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _content(self, index: int, content: str) -> str:
        if self._control is None or self._control.search(content) is None:
            return self._placeholder(index, "content", content)
        found = list(self._control.finditer(content))
        thinking_end = max((one.start() for one in found if END_OF_THINKING.fullmatch(one.group())), default=-1)
        pieces, start = [], 0
        for match in found:
            kind = "thinking" if match.start() <= thinking_end else "content"
            pieces += [self._placeholder(index, kind, content[start : match.start()]), match.group()]
            start = match.end()
        return "".join([*pieces, self._placeholder(index, "content", content[start:])])

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with its arguments replaced; its name where no argument has words, so that the call can be found."""
        function, before = dict(call["function"]), len(self.placeholders)
        function["arguments"] = self._value(index, function.get("arguments"))
        if len(self.placeholders) == before:
            function["name"] = self._value(index, function.get("name"))
        return {**call, "function": function}

    def _value(self, index: int, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._value(index, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(index, item) for item in value]
        return self._placeholder(index, "call", value) if isinstance(value, str) else value

    def _placeholder(self, index: int, kind: str, text: str) -> str:
        words = text.strip()
        if not words:
            return text
        start = len(text) - len(text.lstrip())
        self.placeholders.append(Placeholder(index, kind, words))
        return f"{text[:start]}Zq{len(self.placeholders) - 1:05d}qZ{text[start + len(words) :]}"


@functools.lru_cache(maxsize=8)
def _control_strings(source: str) -> "re.Pattern[str] | None":
    """Finds every text that a template can react to inside a message: what it spells or looks for."""
    looked_for = {one or two for one, two in LOOKED_FOR.findall(source)}
    found = set(CONTROL.findall(source)) | {text for text in looked_for if not re.fullmatch(r"\w+|(?:\s|\\n)+", text)}
    longest_first = sorted(found, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if found else None


def align(skeleton: Skeleton, placeholders: Sequence[Placeholder], text: str) -> list[tuple[int, int]] | None:
    """Where each placeholder's words stand in the real ``text``; None if the literal texts around them differ.

    Every character of ``text`` is accounted for. Words may be written as they are, or escaped.
    """
    literals = skeleton.literals
    position, spans = len(literals[0]), []
    if not text.startswith(literals[0]):
        return None
    for literal, number in zip(literals[1:], skeleton.places, strict=True):
        real = placeholders[number].text
        for written in (real,) if text.startswith(real, position) else spellings(real):
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
