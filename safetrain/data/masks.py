"""Where each assistant turn stands in a rendered chat, for any template: from after its header to its closing token.

A chat is rendered as it is and with marks in place of its words (marks.py). What stands around the marks is the
template's own text, and it is the same for all chats of one shape, which share a layout. In it, a turn begins after the
last header that a generation prompt also ends with, and ends at the first closing token after its last mark. A chat is
placed by finding its real words where its layout has marks: every character has to be accounted for.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.template import (
    ChatTemplate,
    Controls,
    PlainAnswers,
    Skeleton,
    TemplateError,
    borders,
    common_prefix,
    plain_answers,
    skeleton_of,
)
from safetrain.data.marks import USUAL, ChatForm, Marked, Marking, Slot, align, is_null, mark_messages
from safetrain.data.refusals import cause, takes
from safetrain.data.rows import Row

KEPT = 4096  # layouts, and openings, that are remembered
MARKINGS = (Marking(), Marking(names=False), Marking(names=False, others=False))
EMPTY_THINKING = re.compile(
    r"\s*(?:<think>\s*</think>|</think>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|close\|>think<\|sep\|>|<\|channel>thought\s*<channel\|>|<seed:think>\s*</seed:think>|◁think▷\s*◁/think▷)\s*"
)
THINKING = re.compile(r"think|thought", re.IGNORECASE)


class RenderError(ValueError):
    """A row that the template cannot render for training. ``id`` names the finding."""

    def __init__(self, identifier: str, message: str) -> None:
        super().__init__(message)
        self.id = identifier


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a skeleton. Offsets are characters within the literals around it."""

    message: int
    first: int  # the place of its first mark
    last: int
    start: int  # in literals[first]: where the labels begin
    thinking_end: int  # the same after an empty thinking block, if it begins with one, else equal to ``start``
    end: int  # in literals[last + 1]: where the labels end
    closing: str  # the token that closes it, empty if nothing does
    asked: str  # what the generation prompt opens an answer with that this turn does not show
    shown: str  # what this turn shows in its place, as part of its header


@dataclass(frozen=True)
class TemplateLayout:
    """How a template writes chats of one shape."""

    form: ChatForm
    marking: Marking
    skeleton: Skeleton
    turns: tuple[Turn, ...]
    lost: frozenset[int]  # slots that it does not write
    tools_lost: bool

    @property
    def losses(self) -> int:
        """How much is lost, to compare forms by."""
        return len(self.lost) + self.tools_lost


@dataclass(frozen=True)
class PlacedChat:
    """A chat as text, its layout, and where in the text each mark of the skeleton stands."""

    layout: TemplateLayout
    slots: tuple[Slot, ...]
    text: str
    places: tuple[tuple[int, int], ...]


class Layouts:
    """Places chats of one template. A chat whose layout is known costs one rendering and a comparison."""

    def __init__(self, template: ChatTemplate, controls: Controls) -> None:
        self._template, self._controls = template, controls
        self._known: dict[str, TemplateLayout | RenderError] = {}
        self._finders: dict[str, _TurnFinder] = {}

    def place(self, row: Row, tools: Sequence[Any] | None) -> PlacedChat:
        """The chat as text, and where everything in it stands; raises RenderError."""
        try:
            return self._placed(row, tools)
        except TemplateError as error:
            raise RenderError(_identifier(error), error.message) from error

    def _placed(self, row: Row, tools: Sequence[Any] | None) -> PlacedChat:
        source, chat = self._template.source(tools), USUAL.chat(row)
        plain = mark_messages(chat, source, MARKINGS[0])
        key = plain.key + row.tools
        known = self._known.get(key)
        if isinstance(known, TemplateLayout):
            usual = known.form == USUAL and known.marking == MARKINGS[0]
            marked = plain if usual else mark_messages(known.form.chat(row), source, known.marking)
            text = self._template.write(chat if known.form == USUAL else known.form.chat(row), tools)
            places = align(known.skeleton, marked.slots, text)
            if places is not None:
                return PlacedChat(known, marked.slots, text, tuple(places))
        elif known is not None and self._refuses_again(chat, tools, known):
            raise RenderError(known.id, str(known))
        if len(self._known) >= KEPT:
            self._known.clear()
        try:
            found = self._search(row, tools, source)
        except RenderError as error:
            self._known[key] = error
            raise
        self._known[key] = found.layout
        return found

    def plain(self, tools: Sequence[Any] | None) -> PlainAnswers:
        """What the template writes around plain answers in rows with or without tools."""
        return self._finder(tools).plain(tools)

    def _search(self, row: Row, tools: Sequence[Any] | None, source: str) -> PlacedChat:
        """Try all forms of the row; what loses least is taken. Raises the refusal where the template takes none."""
        refusals: dict[bool, TemplateError] = {}  # the first one as text, and as parts
        best: PlacedChat | None = None
        may_be_null = any(map(is_null, row.messages))
        for form in _forms(row):
            try:
                placed = self._laid_out(row, form, tools, source)
            except TemplateError as error:
                refusals.setdefault(form.content_as_parts, error)
                continue
            if placed is not None and (best is None or _rank(placed) < _rank(best)):
                best = placed
            if best is not None and not best.layout.losses and not form.null_content and not may_be_null:
                break
        if best is not None:
            return best
        if not refusals:
            said = "it changes the words of its messages, so that answers cannot be found in what it writes"
            raise RenderError("TEMPLATE-REFUSES", said)
        form = ChatForm(content_as_parts=self.wants_parts(tools))
        first = refusals.get(form.content_as_parts) or next(iter(refusals.values()))
        why = cause(self._template, form.chat(row), tools, first.message) if first.kind == "refuses" else ""
        raise RenderError(_identifier(first), f'{why} ("{first.message}")' if why else first.message)

    def _laid_out(self, row: Row, form: ChatForm, tools: Sequence[Any] | None, source: str) -> PlacedChat | None:
        """The row in a layout of its own; None where the marked chat is not rendered as the real one is."""
        chat = form.chat(row)
        for marking in MARKINGS:
            marked = mark_messages(chat, source, marking)
            try:
                written = self._template.write(marked.messages, tools)
            except TemplateError:
                continue
            if form.content_as_parts and "'type': 'text'" in written:
                return None  # it prints the list
            skeleton = skeleton_of(written)
            lost = set(range(len(marked.slots))) - set(skeleton.places)
            if _prints_python(marked, written):  # {'city': …} is not JSON: no reader takes such a call
                lost |= {number for number, slot in enumerate(marked.slots) if slot.kind == "argument"}
            turns = self._finder(tools).turns(marked, skeleton, tools)
            own_text = "\0".join(skeleton.literals)
            tools_lost = any(tool["function"]["name"] not in own_text for tool in tools or ())
            text = self._template.write(chat, tools)
            places = align(skeleton, marked.slots, text)
            if places is not None:
                layout = TemplateLayout(form, marking, skeleton, turns, frozenset(lost), tools_lost)
                return PlacedChat(layout, marked.slots, text, tuple(places))
        self._template.write(chat, tools)  # says why, if the template does not want it
        return None

    def _refuses_again(self, chat: list[Any], tools: Sequence[Any] | None, known: RenderError) -> bool:
        """Whether this chat is refused like the earlier one of its shape: that may have been refused for its words."""
        try:
            self._template.write(chat, tools)
        except TemplateError:
            return True
        return str(known).startswith("it changes the words")

    def wants_parts(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template takes a plain chat only with content in parts."""
        chat: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat]
        return not takes(self._template, chat, tools) and takes(self._template, parts, tools)

    def _finder(self, tools: Sequence[Any] | None) -> "_TurnFinder":
        source = self._template.source(tools)
        if source not in self._finders:
            self._finders[source] = _TurnFinder(self._template, self._controls)
        return self._finders[source]


def _identifier(error: TemplateError) -> str:
    return "TEMPLATE-REFUSES" if error.kind == "refuses" else "TEMPLATE-SANDBOX"


def _forms(row: Row) -> Iterator[ChatForm]:
    """The ways to say this row, the usual one first."""
    calls = any(message.calls_tools for message in row.messages)
    developer = any(message.role == "developer" for message in row.messages)
    null = any(map(is_null, row.messages))
    choices = [(False, True)[: 1 + possible] for possible in (True, developer, null, calls)]
    for parts, as_system, as_null, as_text in itertools.product(*choices):
        yield ChatForm(as_text, as_null, as_system, parts)


def _rank(placed: PlacedChat) -> tuple[int, bool, bool, bool, int]:
    """Fewest losses first, then the usual form.

    Null or an empty text: the shorter result, because some templates write ``None``, or an empty answer after a call.
    """
    form, losses = placed.layout.form, placed.layout.losses
    return losses, form.content_as_parts, form.developer_as_system, form.arguments_as_text, len(placed.text)


def _prints_python(marked: Marked, written: str) -> bool:
    """Whether arguments are written as Python prints a dictionary."""
    calls = [call for message in marked.messages for call in message.get("tool_calls") or ()]
    arguments = [call["function"].get("arguments") for call in calls]
    return any(isinstance(value, dict) and value and str(value) in written for value in arguments)


class _TurnFinder:
    """Finds the turns of marked chats of one template. What it learns of headers and closings it keeps."""

    def __init__(self, template: ChatTemplate, controls: Controls) -> None:
        self._template, self._controls = template, controls
        self._openings: dict[str, tuple[int, str, str]] = {}  # by the literal before a turn
        self._plain: PlainAnswers | None = None

    def plain(self, tools: Sequence[Any] | None) -> PlainAnswers:
        """What the template writes around plain answers, seen once."""
        if self._plain is None:
            self._plain = plain_answers(self._template, self._controls, tools)
        return self._plain

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

    def _turn(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, first: int, last: int
    ) -> Turn:
        before, after = skeleton.literals[first], skeleton.literals[last + 1]
        start, asked, shown = self._opening(marked, skeleton, tools, message, first)
        if marked.slots[skeleton.places[last]].kind in ("name", "argument"):
            end, closing = self._end_of_call(marked, skeleton, tools, message, last)
        else:
            end, closing = self.plain(tools).closing(after)
        empty = EMPTY_THINKING.match(before, start)
        return Turn(message, first, last, start, empty.end() if empty else start, end, closing, asked, shown)

    def _opening(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, first: int
    ) -> tuple[int, str, str]:
        """Where in the literal before a turn its header ends; what a generation prompt has and what the turn has there.

        The two are empty where a prompt ends as the header does.
        """
        before = skeleton.literals[first]
        is_last = not any(later["role"] == "assistant" for later in marked.messages[message + 1 :])
        if is_last or before not in self._openings:  # what is asked for the last answer may depend on all before it
            known = self._by_prompt(marked, skeleton, tools, message, first)
            if known is None:
                end = _header_end(before, self.plain(tools).header, thinking=True)
                return len(before) if end is None else end, "", ""
            if len(self._openings) >= KEPT:
                self._openings.clear()
            self._openings[before] = known
        return self._openings[before]

    def _by_prompt(
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
        own = self.plain(tools).own_header  # and have none after a tool's result, where the whole chat has one
        if own and own in before[start:]:
            start = before.rindex(own) + len(own)
        return start, opened[shared:], before[shared:start]

    def _end_of_call(
        self, marked: Marked, skeleton: Skeleton, tools: Sequence[Any] | None, message: int, last: int
    ) -> tuple[int, str]:
        """The end of a call: a token that ends plain answers, else where the text begins to depend on what follows.

        A call has control strings of its own after its arguments, which end nothing.
        """
        after, plain = skeleton.literals[last + 1], self.plain(tools)
        ends = self._controls.stops | plain.closings()
        closed = next((item for item in self._controls.found_in(after) if item[1] in ends), None)
        if closed is not None:
            return closed[0] + len(closed[1]), closed[1]
        shared = len(after)
        if last + 1 < len(skeleton.places):
            try:
                alone = skeleton_of(self._template.write(marked.messages[: message + 1], tools))
            except TemplateError:
                return 0, ""
            if skeleton.places[last] not in alone.places:
                return 0, ""
            following = len(alone.places) - alone.places[::-1].index(skeleton.places[last])
            shared = common_prefix(after, alone.literals[following])
        found = self._controls.found_in(after[:shared])
        written = after[: next((place for place, token in found if token in plain.openers), shared)].rstrip()
        found = self._controls.found_in(written)
        closes = found and found[-1][0] + len(found[-1][1]) == len(written)
        return len(written), found[-1][1] if closes else ""


def _header_end(before: str, header: str, *, thinking: bool) -> int | None:
    """After the longest end of a known ``header`` that stands in ``before``; None where none does.

    Without ``thinking`` what opens or ends thinking is not a header: a turn may have it as its own.
    """
    for border in borders(header, len(header)):
        part = header[border:]
        if not thinking and THINKING.search(part):
            continue
        if part.strip() and (place := before.rfind(part)) >= 0:
            return place + len(part)
    return None
