"""Renders a row as text with the spans that are trained on, and remarks on what the template leaves out or changes.

All chats of one shape have the same layout: the template's literal text, with placeholders for their words. A chat of
a known shape is rendered once, and its words must be where the layout has placeholders. If any character of the text
is left over, the row is refused.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from safetrain.core.text.tokenizer import (
    ChatTemplate,
    Controls,
    PlainAnswers,
    Skeleton,
    TemplateError,
    Tools,
    plain_answers,
    skeleton_of,
)
from safetrain.data.masks import Chat, Placeholder, Turn, TurnFinder, align, chat_of, mark, written_by
from safetrain.data.rows import DEEP, Message, Row, RowError

KEPT = 4096  # layouts in the cache
NOTHING_WRITTEN = "the chat template leaves out every answer"
WORD = re.compile(r"\\u....|\\.|([a-z0-9]+)")  # words in lower-case JSON, without escapes
Remark = tuple[str, str]  # a finding's id and detail


class ChatForm(NamedTuple):
    """One of the ways to pass a chat to a template: published templates expect different ones."""

    content_as_parts: bool = False
    developer_as_system: bool = False
    arguments_as_text: bool = False
    null_content: bool = False  # content is None in a call without text, as in OpenAI's format

    def of(self, chat: Chat) -> Chat:
        return [self._message(dict(message)) for message in chat] if any(self) else chat

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


class Span(NamedTuple):
    """Characters of a rendered row that are labels: an assistant turn with the token that closes it."""

    start: int
    end: int
    closing: str  # empty if no token closes it


class PlacedChat(NamedTuple):
    """A chat as text. The fields before ``placeholders`` are its layout, which all chats of one shape share."""

    form: ChatForm
    skeleton: Skeleton
    turns: tuple[Turn, ...]
    lost: frozenset[int]  # numbers of the placeholders that the template leaves out
    tools_lost: bool
    placeholders: tuple[Placeholder, ...] = ()
    text: str = ""
    places: Sequence[tuple[int, int]] = ()  # the span of each placeholder's words in the text

    @property
    def rank(self) -> tuple[int, bool, bool, bool, int]:
        """Sort key for the forms of a chat: fewest lost parts, then the usual form, then the shortest text.

        The length matters because some templates write null content as ``None``, and others empty content as an answer.
        """
        return len(self.lost) + self.tools_lost, *self.form[:3], len(self.text)

    def span(self, turn: Turn) -> Span:
        """The span of a turn in the text; its labels begin in the literal text before its words."""
        start = self.places[turn.first][0] - len(self.skeleton.literals[turn.first]) + turn.start
        return Span(start, self.places[turn.last][1] + turn.end, turn.closing)


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row as text, the spans of its labels, and its question: the prompt of one answer."""

    text: str
    spans: tuple[Span, ...]
    remarks: tuple[Remark, ...] = ()
    is_chat: bool = True  # if not, the tokenizer adds its special tokens
    question: str | None = None  # the message before the judged answer, if that has text or calls
    judged: int = -1  # which span the question asks for, from the end: the last call of tools, else the last answer
    asked: str = ""  # the generation prompt's opening of an answer, if training has a different one
    opening: str = ""  # the opening in training, which is not a label


class Renderer:
    """Renders rows for one model. A chat of a known shape costs one rendering and a comparison."""

    def __init__(self, template: ChatTemplate, controls: Controls, end: str) -> None:
        """``end``: the model's end-of-text token, empty if it has none."""
        self._template, self._controls, self._end = template, controls, end
        self._known: dict[str, PlacedChat] = {}  # for each shape, without its words
        self._plain: dict[str, PlainAnswers] = {}  # for each template source

    def render(self, row: Row) -> RenderedRow:
        """Render a row and find its labels; raises RowError if the row cannot be trained on."""
        if row.format == "text":
            return RenderedRow(row.text, (Span(0, len(row.text), ""),), is_chat=False)
        if not self._template:
            raise RowError("the model's tokenizer has no chat template, and chats need one", id="TEMPLATE-REFUSES")
        tools = json.loads(row.tools) if row.tools else None
        try:
            placed = self._place(row, tools)
        except RecursionError:
            raise RowError(DEEP) from None
        except TemplateError as error:
            hint = " (the data is not at fault)" if error.is_broken else _hint(row, str(error))
            raise RowError(f"{error}{hint}", id="TEMPLATE-REFUSES") from error
        turns = [turn for turn in placed.turns if row.messages[turn.message].trained]
        remarks = list(_losses(row, placed))
        if not turns:
            losses = [detail for identifier, detail in remarks if identifier == "ANSWER-LOST"]
            raise RowError(losses[0], id="ANSWER-LOST") if losses else RowError(NOTHING_WRITTEN, id="NO-LABELS")
        text, last = placed.text, turns[-1]
        spans = [placed.span(turn) for turn in turns]
        remarks += _remarks(row, turns, self._controls)
        if spans[-1].closing not in self._controls.stops:  # append a stop token to the text and its last span
            plain, (start, end, _) = self._plain_of(tools), spans[-1]
            closing = plain.closing(plain.between)[1]
            stop = closing if closing in self._controls.stops else self._end
            if stop:
                rest = text[end:] if text[end:].strip() else ""
                text, spans[-1] = text[:end] + stop + rest, Span(start, end + len(stop), stop)
        judged = max((n for n, turn in enumerate(turns) if row.messages[turn.message].calls_tools), default=-1)
        judged -= len(turns) if judged >= 0 else 0
        place = turns[judged].message
        is_asked = place and (row.messages[place].content.strip() or row.messages[place].calls_tools)
        question, openings = (
            row.messages[place - 1].content if is_asked else None,
            (last.prompt_opening, last.own_opening),
        )
        return RenderedRow(text, tuple(spans), tuple(dict.fromkeys(remarks)), True, question, judged, *openings)

    def _plain_of(self, tools: Tools) -> PlainAnswers:
        """The template's text around plain answers; it may depend on whether a row has tools."""
        source = self._template.source(tools)
        if source not in self._plain:
            self._plain[source] = plain_answers(self._template, self._controls, tools)
        return self._plain[source]

    def _place(self, row: Row, tools: Tools) -> PlacedChat:
        """Render a chat and locate its words in the text; raises RowError, TemplateError."""
        source, chat = self._template.source(tools), chat_of(row.messages)
        marked, placeholders = mark(chat, source)
        shape = json.dumps(marked, ensure_ascii=False) + row.tools
        known = self._known.get(shape)
        if known is not None:
            text = self._template.write(known.form.of(chat), tools)
            places = align(known.skeleton, placeholders, text)
            if places is not None:
                return known._replace(placeholders=placeholders, text=text, places=places)
        if len(self._known) >= KEPT:
            self._known.clear()
        placed = self._search(chat, marked, placeholders, tools)
        self._known[shape] = placed._replace(placeholders=(), text="", places=())
        return placed

    def _search(self, chat: Chat, marked: Chat, placeholders: tuple[Placeholder, ...], tools: Tools) -> PlacedChat:
        """Render the chat in the form that loses least; raises the template's first refusal if it accepts none."""
        refusal: TemplateError | None = None
        found: list[PlacedChat] = []
        for form in _forms(chat):
            try:
                placed = self._lay_out(form, chat, marked, placeholders, tools)
            except TemplateError as error:
                refusal = refusal or error
                continue
            found += [placed] if placed else []
            if placed and not placed.rank[0] and not any(map(_calls_without_text, chat)):
                break
        if found:
            return min(found, key=lambda placed: placed.rank)
        what = "it changes messages' words, so answers cannot be located"
        raise refusal or RowError(what, id="TEMPLATE-REFUSES")

    def _lay_out(
        self, form: ChatForm, chat: Chat, marked: Chat, placeholders: tuple[Placeholder, ...], tools: Tools
    ) -> PlacedChat | None:
        """Make a layout for the chat; None if its text and the text with placeholders do not align."""
        text, messages = self._template.write(form.of(chat), tools), form.of(marked)
        text_with_placeholders = written_by(self._template, messages, tools)
        if text_with_placeholders is None or (form.content_as_parts and "'type': 'text'" in text):  # it prints the list
            return None
        skeleton = skeleton_of(text_with_placeholders)
        places = align(skeleton, placeholders, text)
        if places is None:
            return None
        finder = TurnFinder(self._template, self._plain_of(tools), messages, tools, placeholders, skeleton)
        unwritten = frozenset(range(len(placeholders))) - set(skeleton.places)
        tools_lost = bool(tools) and written_by(self._template, form.of(chat), None) == text
        return PlacedChat(form, skeleton, finder.turns(), unwritten, tools_lost, placeholders, text, places)


def _hint(row: Row, fault: str) -> str:
    """Guess the cause of a refusal, for templates whose own message does not name it."""
    if not row.tools and "'NoneType'" in fault:
        return " (perhaps because the row has no list of tools)"
    roles = {"tool" if message.calls_tools else message.role for message in row.messages}
    cause = "tool calls" if "tool" in roles else "system message" if roles & {"system", "developer"} else ""
    return f" (perhaps because of its {cause})" if cause else ""


def _forms(chat: Chat) -> Iterator[ChatForm]:
    """Yield the forms that are possible for this chat, the usual one first."""
    developer = any(message["role"] == "developer" for message in chat)
    calls = any(message.get("tool_calls") for message in chat)
    null = any(map(_calls_without_text, chat))
    choices = [(False, True)[: 1 + possible] for possible in (True, developer, calls, null)]
    return itertools.starmap(ChatForm, itertools.product(*choices))


def _calls_without_text(message: dict[str, Any]) -> bool:
    """Whether the message is a tool call without text, so that its content could be null."""
    return bool(message["role"] == "assistant" and not message["content"] and message.get("tool_calls"))


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return {**call, "function": {**function, "arguments": text}}


# Remarks


def _remarks(row: Row, turns: Sequence[Turn], controls: Controls) -> Iterator[Remark]:
    """Yield remarks on stop tokens in messages, on empty thinking, and on how turns close."""
    for message in row.messages:  # the tokenizer would turn the text into the token
        token = next((stop for stop in controls.stops if stop in message.content), None)
        if token is not None:
            yield "STOP-IN-TEXT", token
    if any(turn.is_thinking_empty for turn in turns):
        yield "THINKING-EMPTY", ""
    closings = [turn.closing for turn in turns[::-1]]
    unknown = next((closing for closing in closings if closing and closing not in controls.stops), "")
    if unknown:
        yield "STOP-MISSING", f"{unknown}, which is not a stop token of the model"
    if not all(closings):
        yield "STOP-MISSING", "nothing"


def _losses(row: Row, placed: PlacedChat) -> Iterator[Remark]:
    """Yield remarks on parts of the row that are missing from the rendered text."""
    for number in sorted(placed.lost):
        yield _lost(row, placed.placeholders[number].message, placed.placeholders[number].kind)
    if placed.tools_lost:
        yield "TEXT-LOST", "the tools that are offered"
    turns = {turn.message for turn in placed.turns}
    for index, message in enumerate(row.messages):
        if message.calls_tools and not _has_calls(message, placed, index):
            yield _lost(row, index, "call")
        if message.role == "assistant" and message.trained and message.content.strip() and index not in turns:
            yield _lost(row, index, "content")


def _has_calls(message: Message, placed: PlacedChat, index: int) -> bool:
    """Whether the message's turn contains every word of its calls: keys, strings and numbers."""
    spans = [placed.span(turn) for turn in placed.turns if turn.message == index]
    text = "".join(placed.text[span.start : span.end] for span in spans).lower()
    calls = [call["function"] for call in json.loads(message.details)["tool_calls"]]
    words = set(WORD.findall(json.dumps(calls, ensure_ascii=False).lower())) - {"name", "arguments", "null"}
    return all(word in text for word in words)


def _lost(row: Row, index: int, kind: str) -> Remark:
    message = row.messages[index]
    if kind == "thinking":
        is_last = not any(later.role == "assistant" for later in row.messages[index + 1 :])
        return "TEXT-LOST", "the thinking of the last answer" if is_last else "the thinking of an earlier answer"
    if kind == "call":
        return "ANSWER-LOST", "a tool call"
    if message.role == "assistant" and message.trained:
        return "ANSWER-LOST", "an answer"
    return "TEXT-LOST", f"the {'system' if message.role == 'developer' else message.role} message"
