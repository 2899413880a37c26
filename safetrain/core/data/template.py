"""The model's chat template: how transformers runs it, with one date for a whole validation, and how it ends answers.

A chat is also rendered with marks in place of its words, which shows what the template itself writes around them.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

MARK = re.compile(r"Zq(\d{5,})qZ")
LEXEME = re.compile(r"</?[^<>\s]+>|\[[^\[\]\s]+\]|\w+|.", re.DOTALL)
PYTHON_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # that a template can raise
SANDBOX = ("is unsafe", "No filter named", "No test named", "not safely callable", "Encountered unknown tag")


class TemplateError(ValueError):
    """The template does not render these messages. ``kind``: refuses, sandbox (it needs what is forbidden), broken."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class ChatTemplate:
    """Renders chats. ``sources`` by name: default, and perhaps tool_use, as tokenizer_config.json has them."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any], today: date) -> None:
        self._sources, self._special, self._today = dict(sources), dict(special_tokens), today

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def sources(self) -> Mapping[str, str]:
        """The templates by name."""
        return self._sources

    def source(self, tools: Sequence[Any] | None) -> str:
        """The template for rows with or without tools, chosen as transformers does; raises TemplateError."""
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            only = ", ".join(sorted(self._sources))
            raise TemplateError("refuses", f"the model has no template named default (only {only})")
        return self._sources[name]

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text; ``prompt`` adds the opening of an answer. Raises TemplateError.

        ``settings`` are a template's own, as enable_thinking: training gives none.
        """
        import jinja2

        source = self.source(tools)
        try:
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            return str(_compiled(source, self._today).render(**{**(settings or {}), **values}, **self._special))
        except RecursionError as error:
            raise TemplateError("broken", "it calls itself without end") from error
        except jinja2.TemplateSyntaxError as error:
            kind = "sandbox" if any(words in str(error) for words in SANDBOX) else "broken"
            raise TemplateError(kind, f"line {error.lineno} of the template: {error}") from error
        except (jinja2.TemplateError, *PYTHON_ERRORS) as error:
            kind = "sandbox" if any(words in str(error) for words in SANDBOX) else "refuses"
            raise TemplateError(kind, str(error).strip() or type(error).__name__) from error


@functools.lru_cache(maxsize=8)
def _compiled(source: str, today: date) -> Any:
    """The template in transformers' own sandbox; ``strftime_now`` always says ``today``.

    A date that moved on at midnight would change the rows of an interrupted run.
    """
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template.__wrapped__(source)  # not its cache: the date is set below
    compiled.globals = {**compiled.globals, "strftime_now": datetime.combine(today, time()).strftime}
    return compiled


@dataclass(frozen=True)
class Controls:
    """The tokenizer's own strings: ``tokens`` finds every added token, ``stops`` end an answer."""

    tokens: "re.Pattern[str] | None"
    stops: frozenset[str]

    def found_in(self, text: str) -> list[tuple[int, str]]:
        """Each added token in ``text`` with its place."""
        return [] if self.tokens is None else [(match.start(), match.group()) for match in self.tokens.finditer(text)]


@dataclass(frozen=True)
class Skeleton:
    """A marked chat as rendered: ``literals[k]`` stands before the mark ``places[k]``, the last one at the end."""

    literals: tuple[str, ...]
    places: tuple[int, ...]  # numbers of marks; one may be written twice, or never


def skeleton_of(text: str) -> Skeleton:
    """Take a rendered chat with marks apart."""
    parts = MARK.split(text)
    return Skeleton(tuple(parts[::2]), tuple(map(int, parts[1::2])))


@dataclass(frozen=True)
class PlainAnswers:
    """The template's text around plain answers: ``header`` stands before one, from what closes the question on.

    ``between`` and ``at_end`` stand after one in the middle and at the end of a chat; ``tail`` is how both begin.
    """

    controls: Controls
    header: str = ""
    own_header: str = ""  # without what closes the question
    between: str = ""
    at_end: str = ""
    tail: str = ""
    openers: frozenset[str] = frozenset()  # control tokens of the header

    def closing(self, after: str) -> tuple[int, str]:
        """Where in the text after an answer its closing token ends, and that token; (0, "") if nothing closes it."""
        tokens = self.controls.found_in(after)
        if not tokens:
            return 0, ""
        tail = self.tail.strip()
        own_end = len(after) - len(after.lstrip()) + len(tail)  # white space of the answer itself may stand before it
        in_tail = bool(tail) and after.lstrip().startswith(tail)
        own = [item for item in tokens if item[0] < own_end] if in_tail else tokens[:1]
        for place, token in own:
            if token in self.controls.stops:
                return place + len(token), token
        place, token = tokens[0]
        if after[:place].strip() or not self.at_end.strip() or token in self.openers:
            return 0, ""  # where nothing closes an answer, this is the next header
        return place + len(token), token

    def closings(self) -> frozenset[str]:
        """The tokens that close plain answers, in the middle and at the end of a chat."""
        return frozenset(token for part in (self.between, self.at_end) if (token := self.closing(part)[1]))


def plain_answers(template: ChatTemplate, controls: Controls, tools: Sequence[Any] | None) -> PlainAnswers:
    """See what the template writes around plain answers; empty where it refuses two questions and answers."""
    chat = [{"role": ("user", "assistant")[n % 2], "content": f"Zq{n:05d}qZ"} for n in range(4)]
    try:
        literals = skeleton_of(template.write(chat, tools)).literals
        prompt_end = skeleton_of(template.write(chat[:3], tools, prompt=True)).literals[-1]
        prompt_literals = skeleton_of(template.write(chat, tools, prompt=True)).literals
    except TemplateError:
        return PlainAnswers(controls)
    if len(literals) != 5:
        return PlainAnswers(controls)
    between, at_end = literals[2], literals[4]
    tail = common_prefix(between, at_end)
    if prompt_literals == literals:  # the generation prompt always stands there
        at_end = at_end[:tail]
    header = literals[3][: common_prefix(literals[3], prompt_end) or len(literals[3])]
    closing = {tokens[0][1] for part in (between, at_end) if (tokens := controls.found_in(part))}
    in_header = controls.found_in(header)
    openers = frozenset(token for _, token in in_header) - closing
    begin = in_header[0][0] + len(in_header[0][1]) if in_header and in_header[0][1] in closing else 0
    return PlainAnswers(controls, header, header[begin:].lstrip(), between, at_end, between[:tail], openers)


def common_prefix(one: str, two: str) -> int:
    """Count the characters that two texts share from their beginning, up to a border of words and control strings."""
    most = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return max(set(borders(one, most)) & set(borders(two, most)), default=0)


def borders(text: str, most: int) -> Iterator[int]:
    """Where words and control strings end, from 0 up to ``most``."""
    yield 0
    for match in LEXEME.finditer(text):
        if match.end() > most:
            return
        yield match.end()
