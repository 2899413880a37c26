"""Finds each assistant turn in a rendered chat, for any template: from after its header to its closing token.

A chat is rendered twice: with its words, and with a placeholder for each run of words. The text around the
placeholders is the template's own literal text. A turn begins where the generation prompt for that answer ends, and
ends at the first closing token after its last placeholder.

A template can depend on whether a message is empty, on its white space, and on the control strings that the template
spells or looks for, such as ``</think>``. All of that stays in place; every other run of words becomes a placeholder.
If the template depends on other words, the two texts do not align, and the row is refused.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from safetrain.core.text.tokenizer import (
    END_OF_THINKING,
    ChatTemplate,
    PlainAnswers,
    Skeleton,
    TemplateError,
    Tools,
    borders,
    common_prefix,
    skeleton_of,
)
from safetrain.data.rows import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
CONTROL = re.compile(r"</?[^<>\s{}%]{1,60}>|\[/?[A-Z][A-Z_]+\]|◁/?\w+▷")  # strings that may be control strings
LOOKED_FOR = re.compile(  # texts that a template searches for: '/no_think' in content, content.split('…')
    r"""['"]([^'"\n]{2,60})['"]\s*(?:not\s+)?in\b|\.(?:(?:starts|ends)with|r?split|replace|r?find|r?index|r?partition)"""
    r"""\(\s*['"]([^'"\n]{2,60})['"]"""
)
EMPTY_THINKING = re.compile(
    r"\s*(?:<think>\s*</think>|</think>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|close\|>think<\|sep\|>|<\|channel>thought\s*<channel\|>|<seed:think>\s*</seed:think>|◁think▷\s*◁/think▷)\s*"
)
THINKING = re.compile(r"think|thought", re.IGNORECASE)

Chat = list[dict[str, Any]]  # messages in the form that templates read


class Placeholder(NamedTuple):
    """A run of words of a message. ``kind``: content, thinking, or call (a string in a tool call)."""

    message: int
    kind: str
    text: str


def chat_of(messages: Sequence[Message]) -> Chat:
    """The messages in the form that most templates read, with reasoning under both of its usual keys."""
    chat = [message.for_template() for message in messages]
    for value in chat:
        reasoning = next((value[key] for key in REASONING_KEYS if isinstance(value.get(key), str)), None)
        if reasoning is not None:  # as transformers does: gpt-oss reads thinking, most read reasoning_content
            value.update(reasoning_content=reasoning, thinking=reasoning)
    return chat


def mark(chat: Chat, source: str) -> tuple[Chat, tuple[Placeholder, ...]]:
    """Replace the words of a chat by placeholders, for the template ``source``.

    Chats that differ only in their words become the same messages.
    """
    marker = _Marker(_control_strings(source))
    messages = [marker.message(index, message) for index, message in enumerate(chat)]
    return messages, tuple(marker.placeholders)


class _Marker:
    def __init__(self, control: re.Pattern[str]) -> None:
        self._control = control
        self.placeholders: list[Placeholder] = []

    def message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """Copy a message with its words replaced by placeholders."""
        copy = dict(message)
        thinking = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
        if thinking:
            copy.update(dict.fromkeys(thinking, self._placeholder(index, "thinking", message[thinking[0]])))
        copy["content"] = self._content(index, message["content"])
        if message.get("tool_calls"):
            copy["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return copy

    def _content(self, index: int, content: str) -> str:
        pieces = self._control.split(content)  # every second piece is a control string
        ends = [place for place in range(1, len(pieces), 2) if END_OF_THINKING.fullmatch(pieces[place])]
        for place in range(0, len(pieces), 2):
            kind = "thinking" if place < max(ends, default=0) else "content"
            pieces[place] = self._placeholder(index, kind, pieces[place])
        return "".join(pieces)

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the arguments of a call, or its name if no argument has words, so that the call can be located."""
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
def _control_strings(source: str) -> re.Pattern[str]:
    """A pattern for every string on which the template can depend: those it spells or searches for."""
    looked_for = {one or two for one, two in LOOKED_FOR.findall(source)}
    strings = set(CONTROL.findall(source)) | {text for text in looked_for if not re.fullmatch(r"\w+|(?:\s|\\n)+", text)}
    return re.compile(f"({'|'.join(map(re.escape, sorted(strings, key=lambda text: (-len(text), text)))) or '(?!)'})")


def align(skeleton: Skeleton, placeholders: Sequence[Placeholder], text: str) -> list[tuple[int, int]] | None:
    """The span of each placeholder's words in the real ``text``, plain or escaped; None if the literals differ.

    Spans and literals together cover every character of ``text``.
    """
    literals = skeleton.literals
    position, spans = len(literals[0]), []
    if not text.startswith(literals[0]):
        return None
    for literal, number in zip(literals[1:], skeleton.places, strict=True):
        real = placeholders[number].text
        as_json = [] if text.startswith(real, position) else [json.dumps(real, ensure_ascii=False), json.dumps(real)]
        for spelling in (real, *(each[1:-1] for each in as_json)):
            end = position + len(spelling)
            if text.startswith(spelling, position) and text.startswith(literal, end):
                spans.append((position, end))
                position = end + len(literal)
                break
        else:
            return None
    return spans if position == len(text) else None


# Turns


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a layout. Offsets are characters in the literal text before or after its placeholders."""

    message: int
    first: int  # index of its first placeholder in the skeleton
    last: int
    start: int  # where the labels begin, in literals[first]
    is_thinking_empty: bool  # it begins with an empty thinking block
    end: int  # where the labels end, in literals[last + 1]
    closing: str  # the token that closes it; empty if none does
    prompt_opening: str  # how the generation prompt ends, if this turn begins differently
    own_opening: str  # how this turn begins instead


def written_by(template: ChatTemplate, chat: Chat, tools: Tools, *, prompt: bool = False) -> str | None:
    """Render a chat; None if the template refuses it."""
    try:
        return template.write(chat, tools, prompt=prompt)
    except TemplateError:
        return None


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant turns in the skeleton of a chat whose words are placeholders."""

    template: ChatTemplate
    plain: PlainAnswers
    messages: Chat
    tools: Tools
    placeholders: Sequence[Placeholder]
    skeleton: Skeleton
    openings: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # for each literal text before a turn

    def turns(self) -> tuple[Turn, ...]:
        """Find all assistant turns that contain a placeholder, in the order of the text."""
        owners = [self.placeholders[number].message for number in self.skeleton.places]
        turns, earlier = [], set[int]()
        for message, group in itertools.groupby(range(len(owners)), key=lambda place: owners[place]):
            places = list(group)
            numbers = [self.skeleton.places[place] for place in places]
            if self.messages[message]["role"] == "assistant" and not earlier.issuperset(numbers):
                if len(set(numbers)) < len(numbers):  # the header of a tool's result may repeat the call's name
                    alone = self._prefix(message + 1)
                    places = places[: sum(number in numbers for number in alone.places) if alone else None]
                turns.append(self._turn(message, places[0], places[-1]))
            earlier.update(numbers)
        return tuple(turns)

    def _turn(self, message: int, first: int, last: int) -> Turn:
        before, after = self.skeleton.literals[first], self.skeleton.literals[last + 1]
        is_last = not any(later["role"] == "assistant" for later in self.messages[message + 1 :])
        if is_last or before not in self.openings:  # the prompt for the last answer may depend on all earlier turns
            self.openings[before] = self._opening(message, first, before)
        start, prompt_opening, own_opening = self.openings[before]
        if self.placeholders[self.skeleton.places[last]].kind == "call":
            end, closing = self._end_of_call(message, last)
        else:
            end, closing = self.plain.closing(after)
        is_empty = EMPTY_THINKING.match(before, start) is not None
        return Turn(message, first, last, start, is_empty, end, closing, prompt_opening, own_opening)

    def _opening(self, message: int, first: int, before: str) -> tuple[int, str, str]:
        """Find where a turn's header ends in the text before it, and how prompt and turn continue if they differ.

        The text is compared with the generation prompt for this answer; if that is unusable, with the usual header.
        """
        prompt, shared, prompt_end = self._prefix(message, prompt=True), 0, ""
        if prompt is not None and prompt.places[-1:] == self.skeleton.places[:first][-1:]:
            prompt_end = prompt.literals[-1]
            shared = common_prefix(before, prompt_end)
        if not before[:shared].strip():
            return _header_end(before, self.plain.header, thinking=True) or len(before), "", ""
        start = shared + _header_end(before[shared:], prompt_end[shared:], thinking=False)  # it may end with a reminder
        own = self.plain.own_header  # after a tool's result a prompt may lack the header that the chat has
        if own and own in before[start:]:
            start = before.rindex(own) + len(own)
        return start, prompt_end[shared:], before[shared:start]

    def _end_of_call(self, message: int, last: int) -> tuple[int, str]:
        """Find where the turn of a call ends in the text after it, and its closing token.

        The first token that ends plain answers ends it; else it ends where the text begins to depend on later turns.
        """
        after, plain = self.skeleton.literals[last + 1], self.plain
        ends = plain.controls.stops | plain.closings()
        for place, token in plain.controls.found_in(after):
            if token in ends:
                return place + len(token), token
        shared = len(after)
        if last + 1 < len(self.skeleton.places):
            alone, number = self._prefix(message + 1), self.skeleton.places[last]
            if alone is None or number not in alone.places:
                return 0, ""
            shared = common_prefix(after, alone.literals[len(alone.places) - alone.places[::-1].index(number)])
        tail = after[:shared]
        header = (place for place, token in plain.controls.found_in(tail) if token in plain.openers)
        tail = tail[: next(header, shared)].rstrip()
        closing = next((token for _, token in plain.controls.found_in(tail)[::-1] if tail.endswith(token)), "")
        return len(tail), closing

    def _prefix(self, count: int, *, prompt: bool = False) -> Skeleton | None:
        """Render only the first ``count`` messages to a skeleton; None if the template refuses them."""
        text = written_by(self.template, self.messages[:count], self.tools, prompt=prompt) if count else None
        return None if text is None else skeleton_of(text)


def _header_end(before: str, header: str, *, thinking: bool) -> int:
    """The end in ``before`` of the longest suffix of ``header`` that occurs there; 0 if none does.

    Without ``thinking``, a suffix that opens or closes thinking does not count: it may belong to the turn.
    """
    for border in borders(header, len(header)):
        part = header[border:]
        if part.strip() and part in before and (thinking or not THINKING.search(part)):
            return before.rindex(part) + len(part)
    return 0
