"""Chats in the format of training, and the text of an answer while it is generated."""

from collections.abc import Mapping, Sequence
from typing import Any

from safetrain.core.data.template import TemplateError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat

Messages = Sequence[Mapping[str, Any]]  # role, content, and other keys of a template
HALF = "\ufffd"  # a tokenizer's text for bytes of an incomplete character


class Prompts:
    """Writes chats for one model. ``system`` is the system prompt of all training rows, or empty."""

    def __init__(self, tokenizer: ChatTokenizer, form: PromptFormat | None) -> None:
        form = form or PromptFormat((), "")
        self._tokenizer, self._format = tokenizer, form
        self.system = form.system
        self.stop_ids = tokenizer.stop_ids | frozenset(form.stop_ids)
        self.continues = form.documents or not tokenizer.template  # continues a text instead of answering

    def with_system(self, messages: Messages, system: str) -> list[Mapping[str, Any]]:
        """Prepend a system prompt, unless it is empty or the chat has one."""
        has_one = any(message.get("role") in ("system", "developer") for message in messages)
        return list(messages) if has_one or not system else [{"role": "system", "content": system}, *messages]

    def ids(
        self, messages: Messages, tools: Sequence[Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a chat that opens its answer as in training, or of its last text if the model continues texts.

        ``settings``: of the template, such as enable_thinking. Raises ModelError if the template refuses the chat.
        """
        if self.continues:  # the end token of a document opens the next one, as in training
            end = self._tokenizer.end_id if self._format.documents else None
            return [*([] if end is None else [end]), *self._tokenizer.encode(str(messages[-1]["content"]))]
        try:
            prompt = self._tokenizer.template.write(messages, tools, prompt=True, settings=settings)
        except TemplateError as error:
            raise ModelError(f"The model's chat template refuses this: {error}") from None
        asked = self._format.asked  # the end of the generation prompt that training did not have
        return self._tokenizer.encode_chat((prompt.removesuffix(asked) if asked else prompt) + self._format.opening)

    def writes_system(self, system: str) -> bool:
        """Whether the template writes a system prompt; raises ModelError if it refuses one."""
        question = [{"role": "user", "content": "?"}]
        return not self.continues and self.ids(self.with_system(question, system)) != self.ids(question)


class AnswerText:
    """Decodes an answer token by token: only whole characters, without white space around the answer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # the tail to decode: the tokenizer may join words in it
        self._shown = 0  # how many of them are decoded already
        self._white, self.text = "", ""

    def add(self, token: int) -> str:
        """The text that the next token adds; empty until a character is complete."""
        self._ids.append(token)
        return self._grow(at_end=False)

    def rest(self) -> str:
        """The text held back so far, for the end of the answer."""
        return self._grow(at_end=True)

    def _grow(self, *, at_end: bool) -> str:
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if now.endswith(HALF) and not at_end:
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        pending = self._white + now[len(before) :]
        words = pending.rstrip()
        self._white = pending[len(words) :] if words or self.text else ""
        words = words if self.text else words.lstrip()
        self.text += words
        return words
