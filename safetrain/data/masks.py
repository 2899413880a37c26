"""How a template lays out a chat, and where each assistant turn stands in it: after its header, to its closing token.

A chat is rendered twice: as it is, and with a placeholder for each run of its words (placeholders.py). The text around
the placeholders is the template's own literal text, equal for all chats of one shape: their layout. In it, a turn
begins where the generation prompt for that answer ends, and ends at the first closing token after its last placeholder.
A chat of a known shape is rendered once, and its real words are looked for where the layout has placeholders: every
character has to be accounted for, so a template that reacts to words in another way is refused, not guessed.
"""

import itertools
import json
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
from safetrain.data.placeholders import Chat, MarkedChat, Placeholder, align, chat_of, mark
from safetrain.data.rows import Row

KEPT = 4096  # layouts that are remembered
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
class ChatForm:
    """One of the ways to hand the same chat to a template: published templates want different ones."""

    content_as_parts: bool = False
    developer_as_system: bool = False
    arguments_as_text: bool = False
    null_content: bool = False  # None where there is a call and no text, as OpenAI has it

    def of(self, chat: Chat) -> Chat:
        """The chat in this form."""
        return chat if self == USUAL else [self._message(dict(message)) for message in chat]

    def _message(self, value: dict[str, Any]) -> dict[str, Any]:
        if self.developer_as_system and value["role"] == "developer":
            value["role"] = "system"
        if self.null_content and _calls_without_text(value):
            value["content"] = None
        elif self.content_as_parts:
            value["content"] = [{"type": "text", "text": value["content"]}]
        if self.arguments_as_text and value.get("tool_calls"):
            value["tool_calls"] = [_with_text_arguments(call) for call in value["tool_calls"]]
        return value


USUAL = ChatForm()


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a layout. Offsets are characters of the literal text before or after its placeholders."""

    message: int
    first: int  # the place of its first placeholder
    last: int
    start: int  # in literals[first]: where the labels begin
    thinking_end: int  # the same after an empty thinking block, if it begins with one, else equal to ``start``
    end: int  # in literals[last + 1]: where the labels end
    closing: str  # the token that closes it, empty if nothing does
    prompt_opening: str  # how the generation prompt ends, where this turn does not begin so
    own_opening: str  # what this turn has in its place, as part of its header


@dataclass(frozen=True)
class TemplateLayout:
    """How a template writes chats of one shape."""

    form: ChatForm
    skeleton: Skeleton
    turns: tuple[Turn, ...]
    lost: frozenset[int]  # numbers of the placeholders that it does not write
    tools_lost: bool


@dataclass(frozen=True)
class PlacedChat:
    """A chat as text, its layout, and where in the text the words of each placeholder stand."""

    layout: TemplateLayout
    placeholders: tuple[Placeholder, ...]
    text: str
    places: tuple[tuple[int, int], ...]

    @property
    def rank(self) -> tuple[int, bool, bool, bool, int]:
        """Orders forms of a chat: fewest losses, then the usual form, then the shorter text.

        Some templates write a null content as ``None``, others an empty one as an empty answer after a call.
        """
        form, losses = self.layout.form, len(self.layout.lost) + self.layout.tools_lost
        return losses, form.content_as_parts, form.developer_as_system, form.arguments_as_text, len(self.text)


class Layouts:
    """Places chats of one template. A chat of a known shape costs one rendering and a comparison."""

    def __init__(self, template: ChatTemplate, controls: Controls) -> None:
        self._template, self._controls = template, controls
        self._known: dict[str, TemplateLayout] = {}
        self._plain: dict[str, PlainAnswers] = {}  # by the template's source

    def place(self, row: Row, tools: Sequence[Any] | None) -> PlacedChat:
        """The chat as text, and where everything in it stands; raises RenderError."""
        try:
            return self._place(row, tools)
        except TemplateError as error:
            if error.kind != "refuses":
                raise RenderError("TEMPLATE-SANDBOX", error.message) from error
            raise RenderError("TEMPLATE-REFUSES", error.message + _hint(row, error.message)) from error

    def plain(self, tools: Sequence[Any] | None) -> PlainAnswers:
        """What the template writes around plain answers in rows with or without tools."""
        source = self._template.source(tools)
        if source not in self._plain:
            self._plain[source] = plain_answers(self._template, self._controls, tools)
        return self._plain[source]

    def _place(self, row: Row, tools: Sequence[Any] | None) -> PlacedChat:
        source, chat = self._template.source(tools), chat_of(row.messages)
        marked = mark(chat, source)
        shape = marked.shape + row.tools
        layout = self._known.get(shape)
        if layout is not None:
            text = self._template.write(layout.form.of(chat), tools)
            places = align(layout.skeleton, marked.placeholders, text)
            if places is not None:
                return PlacedChat(layout, marked.placeholders, text, tuple(places))
        if len(self._known) >= KEPT:
            self._known.clear()
        placed = self._search(chat, marked, tools)
        self._known[shape] = placed.layout
        return placed

    def _search(self, chat: Chat, marked: MarkedChat, tools: Sequence[Any] | None) -> PlacedChat:
        """The chat in the form that loses least; raises the refusal where the template takes none."""
        refusal: TemplateError | None = None
        found: list[PlacedChat] = []
        for form in _forms(chat):
            try:
                placed = self._lay_out(form, chat, marked, tools)
            except TemplateError as error:
                refusal = refusal or error
                continue
            found += [placed] if placed else []
            if placed and not placed.rank[0] and not any(map(_calls_without_text, chat)):
                break
        if found:
            return min(found, key=lambda placed: placed.rank)
        raise refusal or RenderError("TEMPLATE-REFUSES", "it changes the words of messages: no answer can be found")

    def _lay_out(
        self, form: ChatForm, chat: Chat, marked: MarkedChat, tools: Sequence[Any] | None
    ) -> PlacedChat | None:
        """The chat in a layout of its own; None where the marked chat is not rendered as the chat itself is."""
        text, messages = self._template.write(form.of(chat), tools), form.of(marked.messages)
        written = _written(self._template, messages, tools)
        if written is None or (form.content_as_parts and "'type': 'text'" in text):  # it prints the list
            return None
        skeleton = skeleton_of(written)
        places = align(skeleton, marked.placeholders, text)
        if places is None:
            return None
        turns = _TurnFinder(self._template, self.plain(tools), messages, tools, marked.placeholders, skeleton).turns()
        lost = frozenset(range(len(marked.placeholders))) - set(skeleton.places)
        tools_lost = bool(tools) and _written(self._template, form.of(chat), None) == text
        return PlacedChat(
            TemplateLayout(form, skeleton, turns, lost, tools_lost), marked.placeholders, text, tuple(places)
        )


def _written(template: ChatTemplate, chat: Chat, tools: Sequence[Any] | None, *, prompt: bool = False) -> str | None:
    """The chat as text; None where the template refuses it."""
    try:
        return template.write(chat, tools, prompt=prompt)
    except TemplateError:
        return None


def _hint(row: Row, said: str) -> str:
    """What of a row is most often behind a refusal, where the template's own words do not name it."""
    if not row.tools and "'NoneType'" in said:
        return " (perhaps because the row has no list of tools)"
    roles = {"tool" if message.calls_tools else message.role for message in row.messages}
    cause = "tool calls" if "tool" in roles else "system message" if roles & {"system", "developer"} else ""
    return f" (perhaps because of its {cause})" if cause else ""


def _forms(chat: Chat) -> Iterator[ChatForm]:
    """The ways to say this chat, the usual one first."""
    developer = any(message["role"] == "developer" for message in chat)
    calls = any(message.get("tool_calls") for message in chat)
    null = any(map(_calls_without_text, chat))
    choices = [(False, True)[: 1 + possible] for possible in (True, developer, calls, null)]
    return itertools.starmap(ChatForm, itertools.product(*choices))


def _calls_without_text(message: dict[str, Any]) -> bool:
    """Whether null and an empty text would say the same."""
    return bool(message["role"] == "assistant" and not message["content"] and message.get("tool_calls"))


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return {**call, "function": {**function, "arguments": text}}


class _TurnFinder:
    """Finds the turns of one marked chat in its skeleton."""

    def __init__(
        self, template: ChatTemplate, plain: PlainAnswers, messages: Chat, tools: Sequence[Any] | None,
        placeholders: Sequence[Placeholder], skeleton: Skeleton,
    ) -> None:  # fmt: skip
        self._template, self._plain, self._messages, self._tools = template, plain, messages, tools
        self._placeholders, self._skeleton = placeholders, skeleton
        self._openings: dict[str, tuple[int, str, str]] = {}  # by the literal text before a turn

    def turns(self) -> tuple[Turn, ...]:
        """Every assistant turn that has a placeholder in the skeleton, in the order of the text."""
        owners = [self._placeholders[number].message for number in self._skeleton.places]
        found, seen = [], set[int]()
        for message, group in itertools.groupby(range(len(owners)), key=lambda place: owners[place]):
            places = list(group)
            numbers = [self._skeleton.places[place] for place in places]
            if self._messages[message]["role"] == "assistant" and not seen.issuperset(numbers):
                if len(set(numbers)) < len(numbers):  # a tool's header may repeat the name of its call
                    alone = self._prefix(message + 1)
                    places = places[: sum(number in numbers for number in alone.places) if alone else None]
                found.append(self._turn(message, places[0], places[-1]))
            seen.update(numbers)
        return tuple(found)

    def _turn(self, message: int, first: int, last: int) -> Turn:
        before, after = self._skeleton.literals[first], self._skeleton.literals[last + 1]
        start, prompt_opening, own_opening = self._opening(message, first)
        if self._placeholders[self._skeleton.places[last]].kind == "call":
            end, closing = self._end_of_call(message, last)
        else:
            end, closing = self._plain.closing(after)
        empty = EMPTY_THINKING.match(before, start)
        thinking_end = empty.end() if empty else start
        return Turn(message, first, last, start, thinking_end, end, closing, prompt_opening, own_opening)

    def _opening(self, message: int, first: int) -> tuple[int, str, str]:
        """Where in the literal text before a turn its header ends; how prompt and turn go on from there, if unlike."""
        before = self._skeleton.literals[first]
        is_last = not any(later["role"] == "assistant" for later in self._messages[message + 1 :])
        if is_last or before not in self._openings:  # what is asked for the last answer may depend on all before it
            self._openings[before] = self._compared_with_prompt(message, first, before)
        return self._openings[before]

    def _compared_with_prompt(self, message: int, first: int, before: str) -> tuple[int, str, str]:
        """The same by comparison with a prompt for this answer; by the usual header where that is another chat."""
        prompt, shared, opened = self._prefix(message, prompt=True), 0, ""
        if prompt is not None and prompt.places[-1:] == self._skeleton.places[:first][-1:]:
            opened = prompt.literals[-1]
            shared = common_prefix(before, opened)
        if not before[:shared].strip():
            return _header_end(before, self._plain.header, thinking=True) or len(before), "", ""
        start = shared + _header_end(before[shared:], opened[shared:], thinking=False)  # a prompt may add a reminder
        own = self._plain.own_header  # a prompt may have none after a tool's result, where the whole chat has one
        if own and own in before[start:]:
            start = before.rindex(own) + len(own)
        return start, opened[shared:], before[shared:start]

    def _end_of_call(self, message: int, last: int) -> tuple[int, str]:
        """The end of a call: a token that ends plain answers, else where the text begins to depend on what follows.

        A call has control strings of its own after its arguments, which end nothing.
        """
        after, plain = self._skeleton.literals[last + 1], self._plain
        ends = plain.controls.stops | plain.closings()
        for place, token in plain.controls.found_in(after):
            if token in ends:
                return place + len(token), token
        shared = len(after)
        if last + 1 < len(self._skeleton.places):
            alone, number = self._prefix(message + 1), self._skeleton.places[last]
            if alone is None or number not in alone.places:
                return 0, ""
            shared = common_prefix(after, alone.literals[len(alone.places) - alone.places[::-1].index(number)])
        written = after[:shared]
        header = (place for place, token in plain.controls.found_in(written) if token in plain.openers)
        written = written[: next(header, shared)].rstrip()
        closing = next((token for _, token in plain.controls.found_in(written)[::-1] if written.endswith(token)), "")
        return len(written), closing

    def _prefix(self, count: int, *, prompt: bool = False) -> Skeleton | None:
        """The first messages of the chat alone; None where the template refuses that."""
        written = _written(self._template, self._messages[:count], self._tools, prompt=prompt) if count else None
        return None if written is None else skeleton_of(written)


def _header_end(before: str, header: str, *, thinking: bool) -> int:
    """After the longest end of a known ``header`` that stands in ``before``; 0 where none does.

    Without ``thinking`` what opens or ends thinking is not a header: a turn may have it as its own.
    """
    for border in borders(header, len(header)):
        part = header[border:]
        if part.strip() and part in before and (thinking or not THINKING.search(part)):
            return before.rindex(part) + len(part)
    return 0
