"""What a chat template makes of chats of one shape: found once by rendering them with marks, then only checked."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.marks import Marked, Marking, Slot, mark_messages
from safetrain.core.data.refusals import cause
from safetrain.core.data.rows import Message, Row
from safetrain.core.data.template import REASONING_KEYS, ChatTemplate, TemplateError, control_strings
from safetrain.core.data.turns import Controls, Skeleton, Turn, TurnFinder, align, skeleton_of

KEPT_LAYOUTS = 4096
MARKINGS = (Marking(), Marking(names=False), Marking(names=False, others=False))


class RenderError(ValueError):
    """A row that the template cannot render for training. ``id`` names the finding."""

    def __init__(self, identifier: str, message: str) -> None:
        super().__init__(message)
        self.id = identifier


@dataclass(frozen=True)
class ChatForm:
    """One of the ways to hand the same chat to a template. Published templates want different ones."""

    arguments_as_text: bool = False
    null_content: bool = False  # None where there is a call and no text, as OpenAI has it
    developer_as_system: bool = False
    content_as_parts: bool = False

    def of(self, message: Message) -> dict[str, Any]:
        """The mapping that a template reads."""
        value = message.for_template()
        if len(value) == 2 and self is USUAL:
            return value
        if self.developer_as_system and value["role"] == "developer":
            value["role"] = "system"
        reasoning = next((value[key] for key in REASONING_KEYS if isinstance(value.get(key), str)), None)
        if reasoning is not None:  # as transformers does: gpt-oss reads thinking, most read reasoning_content
            value = {"thinking": reasoning, **value, "reasoning_content": reasoning}
        if self.null_content and _is_null(message):
            value["content"] = None
        elif self.content_as_parts:
            value["content"] = [{"type": "text", "text": message.content}]
        if self.arguments_as_text and value.get("tool_calls"):
            value["tool_calls"] = [_with_text(call) for call in value["tool_calls"]]
        return value

    def chat(self, row: Row) -> list[dict[str, Any]]:
        """All messages of a row."""
        return [self.of(message) for message in row.messages]


USUAL = ChatForm()


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
class Placed:
    """A chat as text, its layout, and where in the text each place of the skeleton stands."""

    layout: TemplateLayout
    slots: tuple[Slot, ...]
    text: str
    places: tuple[tuple[int, int], ...]


class Layouts:
    """Places chats. Those of one shape share a layout, so that each costs one rendering and a comparison."""

    def __init__(self, template: ChatTemplate, controls: Controls) -> None:
        self._template, self._controls = template, controls
        self._found: dict[str, TemplateLayout | RenderError] = {}
        self._finders: dict[str, TurnFinder] = {}

    def place(self, row: Row, tools: Sequence[Any] | None) -> Placed:
        """The chat as text, and where everything in it stands; raises RenderError."""
        try:
            source = self._template.source(tools)
            chat = USUAL.chat(row)
            plain = mark_messages(chat, control_pattern(source), source, MARKINGS[0])
            key = plain.key + row.tools
            known = self._found.get(key)
            if isinstance(known, TemplateLayout):
                placed = self._check(row, known, plain, tools, source, chat)
                if placed is not None:
                    return placed
            elif known is not None and self._is_refused(chat, tools, known):
                raise RenderError(known.id, str(known))
            return self._search(row, tools, source, key)
        except TemplateError as error:
            raise RenderError(f"TEMPLATE-{error.kind.upper()}", error.message) from error

    def finder(self, tools: Sequence[Any] | None) -> TurnFinder:
        """What is known of the template for rows with or without tools."""
        source = self._template.source(tools)
        if source not in self._finders:
            self._finders[source] = TurnFinder(self._template, self._controls)
        return self._finders[source]

    def _check(
        self, row: Row, layout: TemplateLayout, plain: Marked, tools: Sequence[Any] | None, source: str, chat: list[Any]
    ) -> Placed | None:
        """The row in a known layout, None if it is not written so; ``plain`` and ``chat`` are it in the usual form."""
        usual = layout.form == USUAL and layout.marking == MARKINGS[0]
        marked = plain if usual else self._marked(row, layout.form, layout.marking, source)
        text = self._template.write(chat if layout.form == USUAL else layout.form.chat(row), tools)
        places = align(layout.skeleton, marked.slots, text)
        return None if places is None else Placed(layout, marked.slots, text, tuple(places))

    def _search(self, row: Row, tools: Sequence[Any] | None, source: str, key: str) -> Placed:
        """By trying forms; what loses least is taken, and remembered for chats of this shape."""
        refusals: dict[bool, TemplateError] = {}  # the first one as text, and as parts
        best: Placed | None = None
        for form in _forms(row):
            try:
                placed = self._laid_out(row, form, tools, source)
            except TemplateError as error:
                refusals.setdefault(form.content_as_parts, error)
                continue
            if placed is not None and (best is None or _rank(placed) < _rank(best)):
                best = placed
            if best is not None and not best.layout.losses and not form.null_content and not _has_null(row):
                break
        if len(self._found) >= KEPT_LAYOUTS:
            self._found.clear()
        if best is None:
            refusal = self._refusal(row, tools, refusals)
            self._found[key] = refusal
            raise refusal
        self._found[key] = best.layout
        return best

    def _laid_out(self, row: Row, form: ChatForm, tools: Sequence[Any] | None, source: str) -> Placed | None:
        """The row in a layout of its own; None where the marked chat is not rendered as the real one is."""
        for marking in MARKINGS:
            marked = self._marked(row, form, marking, source)
            try:
                written = self._template.write(marked.messages, tools)
            except TemplateError:
                continue
            if form.content_as_parts and "'type': 'text'" in written:
                return None  # it prints the list
            skeleton = skeleton_of(written)
            lost = set(range(len(marked.slots))) - set(skeleton.places)
            if _prints_python(marked, written):  # {'city': …} is no JSON: nobody can read such a call
                lost |= {number for number, slot in enumerate(marked.slots) if slot.kind == "argument"}
            turns = self.finder(tools).turns(marked, skeleton, tools)
            layout = TemplateLayout(form, marking, skeleton, turns, frozenset(lost), _lost_tools(tools, skeleton))
            placed = self._check(row, layout, marked, tools, source, form.chat(row))
            if placed is not None:
                return placed
        self._template.write(form.chat(row), tools)  # says why, if it is the template that does not want it
        return None

    def _is_refused(self, chat: list[Any], tools: Sequence[Any] | None, known: RenderError) -> bool:
        """Whether this chat is refused like the earlier one of its shape: that may have been refused for its words."""
        try:
            self._template.write(chat, tools)
        except TemplateError:
            return True
        return known.id == "TEMPLATE-CHANGES"

    def _refusal(self, row: Row, tools: Sequence[Any] | None, refusals: Mapping[bool, TemplateError]) -> RenderError:
        """What to say of a chat that is rendered in no form."""
        form = self._usual_form(tools)
        said = refusals.get(form.content_as_parts) or next(iter(refusals.values()), None)
        if said is None:
            return RenderError("TEMPLATE-CHANGES", "the chat template changes the words of its messages")
        why = cause(self._template, form.chat(row), tools, said.message) if said.kind == "refuses" else ""
        return RenderError(f"TEMPLATE-{said.kind.upper()}", f'{why} ("{said.message}")' if why else said.message)

    def _usual_form(self, tools: Sequence[Any] | None) -> ChatForm:
        """As text, or as parts where the template takes a plain chat only so."""
        chat = (Message("user", "q"), Message("assistant", "a"))
        for form in (ChatForm(), ChatForm(content_as_parts=True)):
            with contextlib.suppress(TemplateError):
                self._template.write([form.of(message) for message in chat], tools)
                return form
        return ChatForm()

    def _marked(self, row: Row, form: ChatForm, marking: Marking, source: str) -> Marked:
        return mark_messages(form.chat(row), control_pattern(source), source, marking)


def _forms(row: Row) -> Iterator[ChatForm]:
    """The ways to say this row, the usual one first."""
    calls = any('"tool_calls"' in message.details for message in row.messages)
    developer = any(message.role == "developer" for message in row.messages)
    axes = [
        (False, True),
        (False, True)[: 1 + developer],
        (False, True)[: 1 + _has_null(row)],
        (False, True)[: 1 + calls],
    ]
    for parts, as_system, null, text in itertools.product(*axes):
        yield ChatForm(text, null, as_system, parts)


def _has_null(row: Row) -> bool:
    return any(_is_null(message) for message in row.messages)


def _is_null(message: Message) -> bool:
    """Whether there is a call and no text: null and an empty text say the same."""
    return message.role == "assistant" and not message.content and '"tool_calls"' in message.details


def _rank(placed: Placed) -> tuple[int, bool, bool, bool, int]:
    """Fewest losses first, then the usual form.

    Null or an empty text: the shorter result, because some templates write ``None``, or an empty answer behind a call.
    """
    form = placed.layout.form
    return (
        placed.layout.losses, form.content_as_parts, form.developer_as_system, form.arguments_as_text, len(placed.text)
    )  # fmt: skip


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _prints_python(marked: Marked, written: str) -> bool:
    """Whether arguments are written as a Python dictionary would print."""
    calls = [call for message in marked.messages for call in message.get("tool_calls") or ()]
    arguments = [call["function"].get("arguments") for call in calls]
    return any(isinstance(value, dict) and value and str(value) in written for value in arguments)


def _lost_tools(tools: Sequence[Any] | None, skeleton: Skeleton) -> bool:
    """Whether a tool that is offered is not named in what the template writes."""
    if not tools:
        return False
    written = "\0".join(skeleton.literals)
    return any(tool["function"]["name"] not in written for tool in tools)


@functools.lru_cache(maxsize=8)
def control_pattern(source: str) -> "re.Pattern[str] | None":
    """Finds the control strings that a template spells; None where it spells none."""
    strings = control_strings(source)
    return re.compile("|".join(map(re.escape, strings))) if strings else None
