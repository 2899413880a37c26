"""Runs the model's chat template as transformers does, with a fixed date, and finds how it ends answers.

Rendering a chat with marks in place of its words shows the text that the template writes around them.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

MARK = re.compile(r"Zq(\d{5,})qZ")
LEXEME = re.compile(r"</?[^<>\s]+>|\[[^\[\]\s]+\]|\w+|.", re.DOTALL)
PYTHON_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
SANDBOX = ("is unsafe", "No filter named", "No test named", "not safely callable", "Encountered unknown tag")


class TemplateError(ValueError):
    """The template does not render these messages, or none at all: it is broken, or forbidden in the sandbox."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class ChatTemplate:
    """Renders chats. ``sources`` by name: default, and perhaps tool_use, as in tokenizer_config.json."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any], today: date) -> None:
        self.sources, self._special, self._today = dict(sources), dict(special_tokens), today

    def __bool__(self) -> bool:
        return bool(self.sources)

    def source(self, tools: Sequence[Any] | None) -> str:
        """The template for rows with or without tools, chosen as transformers does; raises TemplateError."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            only = ", ".join(sorted(self.sources))
            raise TemplateError(f"the model has no template named default (only {only})")
        return self.sources[name]

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat; ``prompt`` adds the generation prompt. Raises TemplateError.

        ``settings``: variables of the template, such as enable_thinking; training sets none.
        """
        import jinja2

        source = self.source(tools)
        try:
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            return str(_compiled(source, self._today).render(**{**(settings or {}), **values}, **self._special))
        except (jinja2.TemplateError, *PYTHON_ERRORS) as error:
            where = f"line {error.lineno} of the template: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            is_broken = bool(where) or isinstance(error, RecursionError) or any(each in str(error) for each in SANDBOX)
            message = where + str(error).strip() or type(error).__name__
            raise TemplateError(message, is_broken=is_broken) from error


@functools.lru_cache(maxsize=8)
def _compiled(source: str, today: date) -> Any:
    """Compile the template in transformers' sandbox; ``strftime_now`` always gives ``today``.

    If the date changed at midnight, so would the rows of an interrupted run.
    """
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template.__wrapped__(source)  # no cache: the date is set below
    compiled.globals = {**compiled.globals, "strftime_now": datetime.combine(today, time()).strftime}
    return compiled


@dataclass(frozen=True)
class Controls:
    """The tokenizer's control strings: ``tokens`` matches every added token, ``stops`` end an answer."""

    tokens: "re.Pattern[str] | None"
    stops: frozenset[str]

    def found_in(self, text: str) -> list[tuple[int, str]]:
        """Find all added tokens in ``text`` with their positions."""
        return [] if self.tokens is None else [(match.start(), match.group()) for match in self.tokens.finditer(text)]


@dataclass(frozen=True)
class Skeleton:
    """A rendered chat with marks: ``literals[k]`` is before the mark ``places[k]``, the last literal at the end."""

    literals: tuple[str, ...]
    places: tuple[int, ...]  # numbers of the marks; the template may write a mark twice, or never


def skeleton_of(text: str) -> Skeleton:
    """Divide a rendered chat with marks."""
    parts = MARK.split(text)
    return Skeleton(tuple(parts[::2]), tuple(map(int, parts[1::2])))


@dataclass(frozen=True)
class PlainAnswers:
    """The template's text around plain answers: ``header`` comes before an answer, including the end of the question.

    ``between`` and ``at_end`` follow an answer in the middle and at the end of a chat; ``tail`` is their common prefix.
    """

    controls: Controls
    header: str = ""
    own_header: str = ""  # the header without the end of the question
    between: str = ""
    at_end: str = ""
    tail: str = ""
    openers: frozenset[str] = frozenset()  # control tokens of the header

    def closing(self, after: str) -> tuple[int, str]:
        """The end of the closing token in the text after an answer, and that token; (0, "") if there is none."""
        tokens = self.controls.found_in(after)
        if not tokens:
            return 0, ""
        tail = self.tail.strip()
        own_end = len(after) - len(after.lstrip()) + len(tail)  # the answer's own white space may come first
        in_tail = bool(tail) and after.lstrip().startswith(tail)
        own = [item for item in tokens if item[0] < own_end] if in_tail else tokens[:1]
        for place, token in own:
            if token in self.controls.stops:
                return place + len(token), token
        place, token = tokens[0]
        if after[:place].strip() or not self.at_end.strip() or token in self.openers:
            return 0, ""  # no closing token: this one is in the next header
        return place + len(token), token

    def closings(self) -> frozenset[str]:
        """The tokens that close plain answers, in the middle and at the end of a chat."""
        return frozenset(token for part in (self.between, self.at_end) if (token := self.closing(part)[1]))


def plain_answers(template: ChatTemplate, controls: Controls, tools: Sequence[Any] | None) -> PlainAnswers:
    """Render two questions and answers to find the text around answers; empty if the template refuses them."""
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
    if prompt_literals == literals:  # it always writes the generation prompt
        at_end = at_end[:tail]
    header = literals[3][: common_prefix(literals[3], prompt_end) or len(literals[3])]
    closing = {tokens[0][1] for part in (between, at_end) if (tokens := controls.found_in(part))}
    in_header = controls.found_in(header)
    openers = frozenset(token for _, token in in_header) - closing
    begin = in_header[0][0] + len(in_header[0][1]) if in_header and in_header[0][1] in closing else 0
    return PlainAnswers(controls, header, header[begin:].lstrip(), between, at_end, between[:tail], openers)


def common_prefix(one: str, two: str) -> int:
    """The length of the common prefix of two texts that ends at a border of words or control strings."""
    most = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return max(set(borders(one, most)) & set(borders(two, most)), default=0)


def borders(text: str, most: int) -> Iterator[int]:
    """Yield the ends of words and control strings, from 0 up to ``most``."""
    yield 0
    for match in LEXEME.finditer(text):
        if match.end() > most:
            return
        yield match.end()
