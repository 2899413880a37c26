"""The model's chat template: how transformers runs it, told one date for a whole validation. No mlx."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
CONTROL = re.compile(r"</?[^<>\s{}%]{1,60}>|\[/?[A-Z][A-Z_]+\]|◁/?\w+▷")  # what may be a template's control string
ASKED_FOR = re.compile(  # texts that a template looks for in a message: '/no_think' in content, content.startswith('…')
    r"""['"]([^'"\n]{2,60})['"]\s*(?:not\s+)?in\b|\.(?:(?:starts|ends)with|r?split|replace|r?find|r?index|r?partition)"""
    r"""\(\s*['"]([^'"\n]{2,60})['"]"""
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PYTHON_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # that a template can raise
SANDBOX = ("is unsafe", "No filter named", "No test named", "not safely callable", "Encountered unknown tag")


class TemplateError(ValueError):
    """The template does not render these messages. ``kind``: refuses, sandbox (it needs what none is given), broken."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass(frozen=True)
class Written:
    """A rendered chat, and the character ranges that the template itself names as the assistant's."""

    text: str
    generation: tuple[tuple[int, int], ...] = ()


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

    def names_answers(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template itself says what the assistant writes (``{% generation %}``)."""
        return _names_answers(self.source(tools))

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
        return self._run(self.source(tools), messages, tools, prompt=prompt, track=False, settings=settings).text

    def write_tracked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Written:
        """The same with the ranges of the template's own ``{% generation %}`` blocks, none where it has none."""
        return self._run(self.source(tools), messages, tools, prompt=False, track=self.names_answers(tools))

    def _run(
        self,
        source: str,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
        track: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> Written:
        import jinja2

        ranges: list[tuple[int, int]] = []
        try:
            compiled = _compiled(source, self._today)
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            values = {**(settings or {}), **values}
            if not track:
                return Written(compiled.render(**values, **self._special))
            blocks: list[str] = []
            with compiled.environment.activate_tracker(blocks, ranges):
                for block in compiled.generate(**values, **self._special):
                    blocks.append(block)  # the tracker reads the list while it grows
            return Written("".join(blocks), tuple(ranges))
        except RecursionError as error:
            raise TemplateError("broken", "it calls itself without end") from error
        except jinja2.TemplateSyntaxError as error:
            kind = "sandbox" if any(words in str(error) for words in SANDBOX) else "broken"
            raise TemplateError(kind, f"line {error.lineno} of the template: {error}") from error
        except (jinja2.TemplateError, *PYTHON_ERRORS) as error:
            kind = "sandbox" if any(words in str(error) for words in SANDBOX) else "refuses"
            raise TemplateError(kind, str(error).strip() or type(error).__name__) from error


@functools.lru_cache(maxsize=8)
def _names_answers(source: str) -> bool:
    return bool(GENERATION.search(source))


@functools.lru_cache(maxsize=8)
def _compiled(source: str, today: date) -> Any:
    """The template in transformers' own sandbox; ``strftime_now`` always says ``today``.

    A date that moved on at midnight would change the rows of an interrupted run.
    """
    from transformers.utils import chat_template_utils

    compile_fresh = chat_template_utils._compile_jinja_template.__wrapped__  # not its cache: the date is set below
    compiled = compile_fresh(source)
    compiled.globals = {**compiled.globals, "strftime_now": functools.partial(_formatted, today)}
    return compiled


def _formatted(today: date, form: str) -> str:
    return datetime.combine(today, time()).strftime(form)


def control_strings(source: str) -> tuple[str, ...]:
    """Every text that the template can react to inside a message, longest first: what it spells or looks for."""
    looked_for = {one or two for one, two in ASKED_FOR.findall(source)}
    found = set(CONTROL.findall(source)) | {text for text in looked_for if not re.fullmatch(r"\w+|(?:\s|\\n)+", text)}
    return tuple(sorted(found, key=lambda text: (-len(text), text)))
