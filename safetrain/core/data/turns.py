"""Where each assistant turn stands in a rendered chat: from just behind its header to the token that closes it.

A chat is rendered as it is and with marks in place of its words (marks.py). What lies around the marks is the
template's own text: behind the last header that a generation prompt also opens with, a turn begins; at the first
closing token behind its last mark, it ends.
"""

import collections
import html
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.marks import MARK, Marked, Slot
from safetrain.core.data.template import ChatTemplate, TemplateError

LEXEME = re.compile(r"</?[^<>\s]+>|\[[^\[\]\s]+\]|\w+|.", re.DOTALL)
EMPTY_THINKING = re.compile(
    r"\s*(?:<think>\s*</think>|</think>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|close\|>think<\|sep\|>|<\|channel>thought\s*<channel\|>|<seed:think>\s*</seed:think>|◁think▷\s*◁/think▷)\s*"
)

THINKING = re.compile(r"think|thought", re.IGNORECASE)
KEPT_OPENINGS = 4096


@dataclass(frozen=True)
class Skeleton:
    """A marked chat as rendered: ``literals[k]`` stands before the mark ``places[k]``, the last one at the end."""

    literals: tuple[str, ...]
    places: tuple[int, ...]  # numbers of slots; one may be written twice, or never


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a skeleton. Offsets are characters within the literals around it."""

    message: int
    first: int  # the place of its first mark
    last: int
    start: int  # in literals[first]: where the labels begin
    thinking_end: int  # the same behind an empty thinking block, if it begins with one, else equal to ``start``
    end: int  # in literals[last + 1]: where the labels end
    closing: str  # the token that closes it, empty if nothing does
    asked: str  # what the generation prompt opens an answer with that this turn does not show
    shown: str  # what this turn shows in its place, as part of its header


@dataclass(frozen=True)
class Controls:
    """The tokenizer's own strings: ``tokens`` finds every added token, ``stops`` end an answer."""

    tokens: "re.Pattern[str] | None"
    stops: frozenset[str]

    def found_in(self, text: str) -> list[tuple[int, str]]:
        """Each added token in ``text`` with its place."""
        return [] if self.tokens is None else [(match.start(), match.group()) for match in self.tokens.finditer(text)]


def skeleton_of(text: str) -> Skeleton:
    """A rendered chat with marks, taken apart."""
    parts = MARK.split(text)
    return Skeleton(tuple(parts[::2]), tuple(map(int, parts[1::2])))


def align(skeleton: Skeleton, slots: Sequence[Slot], text: str) -> list[tuple[int, int]] | None:
    """Where each place of the skeleton stands in the chat's real ``text``; None if that is not the same chat.

    Exact: every character of ``text`` is accounted for. Words may be written as they are, or escaped.
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


class TurnFinder:
    """Finds the turns of marked chats of one template. What it learns of headers and closings it keeps."""

    def __init__(self, template: ChatTemplate, controls: Controls) -> None:
        self._template, self._controls = template, controls
        self._openings: dict[str, tuple[int, str, str]] = {}  # by the literal before a turn
        self._known: _Plain | None = None

    def turns(self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None) -> tuple[Turn, ...]:
        """Every assistant turn that has a mark in the skeleton, in the order of the text."""
        owners = [marked.slots[number].message for number in skeleton.places]
        found, seen = [], set[int]()
        for message, group in itertools.groupby(range(len(owners)), key=lambda place: owners[place]):
            places = list(group)
            numbers = [skeleton.places[place] for place in places]
            fresh = not seen.issuperset(numbers)
            seen.update(numbers)
            if fresh and marked.messages[message]["role"] == "assistant":
                if len(set(numbers)) < len(numbers):  # a tool's header may repeat the name of its call
                    places = places[: self._own_places(marked, tools, message, numbers)]
                found.append(self._turn(marked, skeleton, tools, message, places[0], places[-1]))
        return tuple(found)

    def _own_places(self, marked: Marked, tools: Sequence[Any] | None, message: int, numbers: list[int]) -> int:
        """How many of the marks belong to the turn: as many as are there when the chat ends with it."""
        try:
            alone = skeleton_of(self._template.write(marked.messages[: message + 1], tools)).places
        except TemplateError:
            return len(numbers)
        left = collections.Counter(alone)
        for place, number in enumerate(numbers):
            if not left[number]:
                return max(1, place)
            left[number] -= 1
        return len(numbers)

    def end_between(self, tools: Sequence[Any] | None) -> str:
        """The token that closes a plain answer in the middle of a chat, empty if nothing does."""
        return self._closing(self._plain(tools).between, tools, called=False)[1]

    def plain_closings(self, tools: Sequence[Any] | None) -> frozenset[str]:
        """The tokens that close plain answers, in the middle and at the end of a chat."""
        plain = self._plain(tools)
        found = (self._closing(part, tools, called=False)[1] for part in (plain.between, plain.at_end))
        return frozenset(closing for closing in found if closing)

    def _turn(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, first: int, last: int
    ) -> Turn:
        before, after = skeleton.literals[first], skeleton.literals[last + 1]
        start, asked, shown = self._opening(marked, skeleton, tools, message, first)
        kind = marked.slots[skeleton.places[last]].kind
        called = kind in ("name", "argument")
        end, closing = self._closing(after, tools, called=called)
        if called and not closing:
            end, closing = self._end_of_call(marked, skeleton, tools, message, last)
        empty = EMPTY_THINKING.match(before, start)
        thinking_end = empty.end() if empty else start
        return Turn(message, first, last, start, thinking_end, end, closing, asked, shown)

    def _opening(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, first: int
    ) -> tuple[int, str, str]:
        """Where in the literal before a turn its header ends; what a generation prompt has and what the turn has there.

        The two are empty where a prompt ends as the header does.
        """
        before = skeleton.literals[first]
        is_last = not any(later["role"] == "assistant" for later in marked.messages[message + 1 :])
        if is_last or before not in self._openings:  # what is asked for the last answer may depend on all before it
            known = self._asked(marked, skeleton, tools, message, first)
            if known is None:
                plain = self._plain(tools)
                end = _header_end(before, plain.header, thinking=True)
                return len(before) if end is None else end, "", ""
            if len(self._openings) >= KEPT_OPENINGS:
                self._openings.clear()
            self._openings[before] = known
        return self._openings[before]

    def _asked(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, first: int
    ) -> tuple[int, str, str] | None:
        """The same by comparison with a prompt for this answer; None where the template writes another chat then."""
        if message == 0:
            return None
        try:
            prompt = skeleton_of(self._template.write(marked.messages[:message], tools, prompt=True))
        except TemplateError:
            return None
        if prompt.places[-1:] != skeleton.places[:first][-1:]:
            return None
        before, opened = skeleton.literals[first], prompt.literals[-1]
        shared = common_prefix(before, opened)
        if not before[:shared].strip():
            return None
        reminded = _header_end(before[shared:], opened[shared:], thinking=False)  # a prompt may remind of something
        start = shared + (reminded or 0)
        own = self._plain(tools).own_header  # and have none behind a tool's result, where the whole chat has one
        if own and own in before[start:]:
            start = before.rindex(own) + len(own)
        return start, opened[shared:], before[shared:start]

    def _closing(self, after: str, tools: Sequence[Any] | None, *, called: bool) -> tuple[int, str]:
        """Where in the literal behind a turn its closing token ends, and that token; (0, "") where nothing closes it.

        A call has control strings of its own behind its arguments: there only tokens that end a plain answer count.
        """
        found, stops = self._controls.found_in(after), self._controls.stops
        if called:
            ends = stops | self.plain_closings(tools)
            return next(((place + len(token), token) for place, token in found if token in ends), (0, ""))
        if not found:
            return 0, ""
        plain = self._plain(tools)
        tail = plain.tail.strip()
        own_end = len(after) - len(after.lstrip()) + len(tail)  # white space of the answer itself may stand before it
        in_tail = bool(tail) and after.lstrip().startswith(tail)
        own = [item for item in found if item[0] < own_end] if in_tail else _at_once(found)
        for place, token in own:
            if token in stops:
                return place + len(token), token
        place, token = found[0]
        if after[:place].strip() or not plain.closes or token in plain.openers:
            return 0, ""  # where nothing closes an answer, this is the next header
        return place + len(token), token

    def _end_of_call(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, last: int
    ) -> tuple[int, str]:
        """The end of a call that no known token closes: where the text begins to depend on what follows."""
        after = skeleton.literals[last + 1]
        shared = len(after)
        if last + 1 < len(skeleton.places):
            try:
                alone = skeleton_of(self._template.write(marked.messages[: message + 1], tools))
            except TemplateError:
                return 0, ""
            if skeleton.places[last] not in alone.places:
                return 0, ""
            behind = len(alone.places) - alone.places[::-1].index(skeleton.places[last])
            shared = common_prefix(after, alone.literals[behind])
        openers = self._plain(tools).openers
        shared = next((place for place, token in self._controls.found_in(after[:shared]) if token in openers), shared)
        written = after[:shared].rstrip()
        found = self._controls.found_in(written)
        closes = found and found[-1][0] + len(found[-1][1]) == len(written)
        return len(written), found[-1][1] if closes else ""

    def _plain(self, tools: Sequence[Any] | None) -> "_Plain":
        """What the template writes around plain answers, seen once."""
        if self._known is None:
            self._known = self._seen(tools)
        return self._known

    def _seen(self, tools: Sequence[Any] | None) -> "_Plain":
        marks = [f"Zq{number:05d}qZ" for number in range(4)]
        chat = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant") * 2, marks, strict=True)]
        try:
            literals = skeleton_of(self._template.write(chat, tools)).literals
            opened = skeleton_of(self._template.write(chat[:3], tools, prompt=True)).literals[-1]
            asked = skeleton_of(self._template.write(chat, tools, prompt=True)).literals
        except TemplateError:
            return _Plain("", "", "", "", "", frozenset())
        if len(literals) != 5:
            return _Plain("", "", "", "", "", frozenset())
        between, at_end = literals[2], literals[4]
        tail = common_prefix(between, at_end)
        if asked == literals:  # the generation prompt always stands there
            at_end = at_end[:tail]
        header = literals[3][: common_prefix(literals[3], opened) or len(literals[3])]
        closing = {self._controls.found_in(part)[0][1] for part in (between, at_end) if self._controls.found_in(part)}
        openers = frozenset(token for _, token in self._controls.found_in(header)) - closing
        first = self._controls.found_in(header)[:1]
        begin = first[0][0] + len(first[0][1]) if first and first[0][1] in closing else 0
        return _Plain(header, header[begin:].lstrip(), between, at_end, between[:tail], openers)


@dataclass(frozen=True)
class _Plain:
    """The template's text around plain answers: ``header`` stands before one, from what closes the question on.

    ``between`` and ``at_end`` stand behind one in the middle and at the end of a chat; ``tail`` is how both begin.
    """

    header: str
    own_header: str  # without what closes the question
    between: str
    at_end: str
    tail: str
    openers: frozenset[str]  # control tokens of the header

    @property
    def closes(self) -> bool:
        """Whether the template closes an answer at the end of a chat with anything."""
        return bool(self.at_end.strip())


def _at_once(found: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Those control tokens that follow each other without anything between."""
    end = found[0][0]
    for place, token in found:
        if place != end:
            return
        end = place + len(token)
        yield place, token


def common_prefix(one: str, two: str) -> int:
    """How many characters two texts share from their beginning, up to a border of words and control strings."""
    most = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return max(set(_borders(one, most)) & set(_borders(two, most)), default=0)


def _borders(text: str, most: int) -> Iterator[int]:
    yield 0
    for match in LEXEME.finditer(text):
        if match.end() > most:
            return
        yield match.end()


def _header_end(before: str, header: str, *, thinking: bool) -> int | None:
    """Behind the longest end of a known ``header`` that stands in ``before``; None where none does.

    Without ``thinking`` what opens or ends thinking is no header: a turn may have it as its own.
    """
    for border in _borders(header, len(header)):
        part = header[border:]
        if not thinking and THINKING.search(part):
            continue
        if part.strip() and (place := before.rfind(part)) >= 0:
            return place + len(part)
    return None
