"""A row as text with the spans that are trained, and a remark on everything that the template loses or changes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.template import ChatTemplate, Controls
from safetrain.data.marks import spellings
from safetrain.data.masks import Layouts, PlacedChat, RenderError, Turn
from safetrain.data.rows import Row

NOTHING_WRITTEN = "the chat template writes nothing of its answers"
THINKING_TAGS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "◁think▷": "◁/think▷"}


@dataclass(frozen=True)
class Labelling:
    """The keys of params.yaml that decide what is a label (section data)."""

    append_end: bool  # the model's end token, to a last answer that no token closes that stops the model
    train_empty_thinking: bool
    opening: str  # trained: prompts open answers as training shows them; prompt: train as the template asks


USUAL_LABELLING = Labelling(append_end=True, train_empty_thinking=True, opening="trained")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of a rendered row that are labels: an assistant turn with the token that closes it."""

    start: int
    end: int
    closing: str  # empty if nothing closes it


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row as text with its labels, and how its last answer is asked for. A remark is a finding's id and detail."""

    text: str
    spans: tuple[Span, ...]
    remarks: tuple[tuple[str, str], ...] = ()
    is_chat: bool = True  # the template has written the special tokens; a text row wants the tokenizer's
    can_be_asked: bool = False  # whether the last answer is a text that answers something
    asked: str = ""  # what the generation prompt opens an answer with, that training does not show
    opening: str = ""  # what training shows in its place, and does not teach


class Renderer:
    """Renders rows for one model."""

    def __init__(self, template: ChatTemplate, controls: Controls, labelling: Labelling, end: str) -> None:
        """``end``: the model's end-of-text token, empty if it has none."""
        self._template, self._controls, self._labelling, self._end = template, controls, labelling, end
        self._layouts = Layouts(template, controls)

    def render(self, row: Row) -> RenderedRow:
        """The row as text with its labels; raises RenderError where it cannot be trained."""
        if row.format == "text":
            return RenderedRow(row.text, (Span(0, len(row.text), ""),), is_chat=False)
        if not self._template:
            raise RenderError("TEMPLATE-REFUSES", "the model's tokenizer has no chat template, and chats need one")
        tools = json.loads(row.tools) if row.tools else None
        placed = self._layouts.place(row, tools)
        draft = _Draft(row, placed, self._controls, self._labelling)
        remarks = [*_losses(row, placed, draft), *_spelled_stops(row, self._controls)]
        if not draft.turns:
            lost = [remark for remark in remarks if remark[0] == "ANSWER-LOST"]
            raise RenderError(*(lost[0] if lost else ("NO-LABELS", NOTHING_WRITTEN)))
        remarks += draft.openings()
        if not draft.is_closed():
            plain = self._layouts.plain(tools)
            end = plain.closing(plain.between)[1]
            remarks += draft.close(end if end in self._controls.stops else self._end)
        return draft.finished(tuple(dict.fromkeys(remarks)))


class _Draft:
    """A row's text and spans while they are put together."""

    def __init__(self, row: Row, placed: PlacedChat, controls: Controls, labelling: Labelling) -> None:
        self.row, self._placed, self._controls, self._labelling = row, placed, controls, labelling
        self._text = placed.text
        self.turns = [turn for turn in placed.layout.turns if row.messages[turn.message].trained]
        self._spans = [self._span(turn) for turn in self.turns]
        self._opening = ""

    def _span(self, turn: Turn) -> Span:
        placed = self._placed
        first, last = placed.places[turn.first], placed.places[turn.last]
        begin = turn.start if self._labelling.train_empty_thinking else turn.thinking_end
        start = first[0] - len(placed.layout.skeleton.literals[turn.first]) + begin
        return Span(start, last[1] + turn.end, turn.closing)

    def turn_text(self, message: int) -> str:
        """What is written of an assistant message, its header aside."""
        spans = (self._span(turn) for turn in self._placed.layout.turns if turn.message == message)
        return "".join(self._placed.text[span.start : span.end] for span in spans)

    def openings(self) -> Iterator[tuple[str, str]]:
        """Remarks on empty thinking that is trained, and on answers that a prompt opens differently than training."""
        literals, last = self._placed.layout.skeleton.literals, self.turns[-1]
        if self._labelling.train_empty_thinking and any(turn.thinking_end > turn.start for turn in self.turns):
            yield "THINKING-EMPTY", ""
        if self._labelling.opening == "trained":
            self._opening = last.shown
        if not self._labelling.train_empty_thinking:
            self._opening += literals[last.first][last.start : last.thinking_end]
        differs = next((turn for turn in self.turns[::-1] if turn.asked or turn.shown), None)
        if differs is not None:
            if self._labelling.opening == "prompt":
                self._insert_openings()
            else:
                yield "OPENING-DIFFERS", f"{differs.asked!r}, and trains it with {differs.shown!r}"

    def _insert_openings(self) -> None:
        """Give each turn the opening that the template asks with, in place of its own: as context, not as labels.

        Thinking that it opens is closed at once where the turn has none: that is trained.
        """
        shift = 0
        for number, turn in enumerate(self.turns):
            span = self._spans[number]
            start, end = span.start + shift, span.end + shift
            closing_tag = THINKING_TAGS.get(turn.asked.strip(), "")
            closed = "" if closing_tag in self._text[start:end] else f"{closing_tag}\n\n"
            opened = self._text[: start - len(turn.shown)] + turn.asked
            self._text = opened + closed + self._text[start:]
            longer = len(turn.asked) - len(turn.shown) + len(closed)
            self._spans[number] = Span(len(opened), end + longer, span.closing)
            shift += longer

    def is_closed(self) -> bool:
        """Whether every turn ends with a token that stops the model."""
        return all(span.closing in self._controls.stops for span in self._spans)

    def close(self, end: str) -> Iterator[tuple[str, str]]:
        """See that the last turn ends with a token that stops the model; ``end`` is one that may be appended."""
        span, stops = self._spans[-1], self._controls.stops
        unknown = next((each.closing for each in self._spans[::-1] if each.closing and each.closing not in stops), "")
        if unknown:
            yield "STOP-MISSING", f"{unknown}, which is not a stop token of the model"
        if not all(each.closing for each in self._spans):
            yield "STOP-MISSING", "nothing"
        if span.closing in stops or not self._labelling.append_end or not end:
            return
        rest = self._text[span.end :]
        self._text = self._text[: span.end] + end + ("" if not rest.strip() else rest)
        self._spans[-1] = Span(span.start, span.end + len(end), end)

    def finished(self, remarks: tuple[tuple[str, str], ...]) -> RenderedRow:
        """The row."""
        last = self.turns[-1]
        can_be_asked = bool(self.row.messages[last.message].content.strip() and last.message)
        asked = last.asked if self._labelling.opening == "trained" else ""
        return RenderedRow(self._text, tuple(self._spans), remarks, True, can_be_asked, asked, self._opening)


def _losses(row: Row, placed: PlacedChat, draft: _Draft) -> Iterator[tuple[str, str]]:
    """What of the row is not in its text."""
    layout = placed.layout
    for number in sorted(layout.lost):
        yield _lost(row, placed.slots[number].message, placed.slots[number].kind)
    if layout.tools_lost:
        yield "TEXT-LOST", "the tools that are offered"
    if not layout.marking.others:
        for index, message in enumerate(row.messages):
            words = message.content.strip()
            if message.role != "assistant" and not any(spelling in placed.text for spelling in spellings(words)):
                yield _lost(row, index, "content")
    written = {turn.message for turn in layout.turns}
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        if message.calls_tools:
            text = draft.turn_text(index)
            for call in json.loads(message.details)["tool_calls"]:
                if not all(any(form in text for form in forms) for forms in _leaves(call["function"])):
                    yield _lost(row, index, "name")
        if index not in written and message.trained and message.content.strip():
            yield _lost(row, index, "content")


def _lost(row: Row, index: int, kind: str) -> tuple[str, str]:
    message = row.messages[index]
    if kind == "thinking":
        is_last = not any(later.role == "assistant" for later in row.messages[index + 1 :])
        return "TEXT-LOST", "the thinking of the last answer" if is_last else "the thinking of an earlier answer"
    if kind in ("name", "argument"):
        return "ANSWER-LOST", "a tool call"
    if message.role == "assistant" and message.trained:
        return "ANSWER-LOST", "an answer"
    role = "system" if message.role == "developer" else message.role
    return "TEXT-LOST", f"the {role} message"


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """The spellings, one of which must be there, of every key and value of a call."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("name", "arguments"):
                yield tuple(spellings(str(key)))
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield tuple(spellings(value.strip()))
    else:
        yield json.dumps(value), str(value)


def _spelled_stops(row: Row, controls: Controls) -> Iterator[tuple[str, str]]:
    """A token that ends an answer, written as words inside a message: the tokenizer makes it the token."""
    for message in row.messages:
        found = next((stop for stop in controls.stops if stop in message.content), None)
        if found is not None:
            yield "STOP-IN-TEXT", found
