"""What a template writes for a conversation, in each of the forms that a row may be given to it."""

import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.templates.conversations import Conversation, Message

FAILURES = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
ABSENT = object()


@dataclass(frozen=True)
class ChatForm:
    """One way to give a row to a template: the same data."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    asked: bool = True  # False: a form that helps if it is tried, and need not be


@dataclass(frozen=True)
class Written:
    """A form, and what became of it: a text, or the template's complaint."""

    form: ChatForm
    text: str = ""
    complaint: str = ""
    sandbox: bool = False

    @property
    def refused(self) -> bool:
        """Whether the template raised an error."""
        return bool(self.complaint)


class Template:
    """The template in a model's folder, as transformers applies it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def write(self, form: ChatForm) -> Written:
        """Render the whole conversation."""
        try:
            return Written(form, self._render(form.messages, form.tools, False))
        except FAILURES as error:
            forbidden = isinstance(error, SecurityError) or "No filter named" in str(error)
            return Written(form, complaint=f"{type(error).__name__}: {error}", sandbox=forbidden)

    def ask(self, form: ChatForm, count: int) -> str | None:
        """The prompt that a model gets after ``count`` messages, or None if the template has none."""
        try:
            return self._render(form.messages[:count], form.tools, True)
        except FAILURES:
            return None

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        texts, _ = render_jinja_template(
            [copy.deepcopy(messages)],
            tools=tools,
            chat_template=self.tokenizer.chat_template,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        text: str = texts[0]
        return text


def forms(conversation: Conversation) -> Iterator[ChatForm]:
    """Every form of a row: arguments as text or object, no content as "", null or no key, content whole or in parts."""
    calls = any("tool_calls" in message for message in conversation.messages)
    ways = itertools.product((False, True), ("", None, ABSENT)) if calls else [(False, "")]
    given = isinstance(conversation.messages[0]["content"], list)
    for as_text, nothing in ways:
        messages = [_formed(message, as_text, nothing) for message in conversation.messages]
        yield ChatForm(messages, conversation.tools)
        yield ChatForm([_in_parts(message) for message in messages], conversation.tools, asked=given)
        if conversation.tools is None:
            yield ChatForm(messages, [], asked=False)


def _formed(message: Message, as_text: bool, nothing: object) -> Message:
    """A message with its arguments and its missing content in the wanted form, and its content in one piece."""
    formed = copy.deepcopy(message)
    if isinstance(formed["content"], list):
        formed["content"] = "".join(part["text"] for part in formed["content"])
    for call in formed.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        plain = json.loads(arguments) if isinstance(arguments, str) else arguments
        call["function"]["arguments"] = json.dumps(plain) if as_text else plain
    if "tool_calls" in formed and not formed["content"]:
        formed["content"] = nothing
        if nothing is ABSENT:
            del formed["content"]
    return formed


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
