"""A chat as the model was trained to read it, and its answer as text while it is made."""

from collections.abc import Mapping, Sequence
from typing import Any

from safetrain.core.data.template import TemplateError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat

Messages = Sequence[Mapping[str, Any]]  # role, content, and what else a template reads
HALF = "\ufffd"  # written by a tokenizer for bytes that do not make a whole character yet


class Prompts:
    """Writes chats for one model. ``system`` is the prompt that all training rows had, empty where they had none."""

    def __init__(self, tokenizer: ChatTokenizer, form: PromptFormat | None) -> None:
        form = form or PromptFormat((), "")
        self._tokenizer, self._format = tokenizer, form
        self.system = form.system
        self.stop_ids = tokenizer.stop_ids | frozenset(form.stop_ids)
        self.continues = form.documents or not tokenizer.template  # a text, instead of answering

    def with_system(self, messages: Messages, system: str) -> list[Mapping[str, Any]]:
        """The chat after a system prompt, unless that is empty or the chat has one."""
        has_one = any(message.get("role") in ("system", "developer") for message in messages)
        return list(messages) if has_one or not system else [{"role": "system", "content": system}, *messages]

    def ids(
        self, messages: Messages, tools: Sequence[Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a chat, opened for its answer as in training; where texts are continued, ids of its last text.

        ``settings`` are a template's own, as enable_thinking. Raises ModelError where the template refuses the chat.
        """
        if self.continues:  # the end token of a document opens the next one, as in training
            end = self._tokenizer.end_id if self._format.documents else None
            return [*([] if end is None else [end]), *self._tokenizer.encode(str(messages[-1]["content"]))]
        try:
            prompt = self._tokenizer.template.write(messages, tools, prompt=True, settings=settings)
        except TemplateError as error:
            raise ModelError(f"The model's chat template refuses this: {error}") from None
        asked = self._format.asked  # what the template asks with, where training did not show it
        return self._tokenizer.encode_chat((prompt.removesuffix(asked) if asked else prompt) + self._format.opening)

    def writes_system(self, system: str) -> bool:
        """Whether the template puts a system prompt into the chat; raises ModelError where it refuses."""
        question = [{"role": "user", "content": "?"}]
        return not self.continues and self.ids(self.with_system(question, system)) != self.ids(question)


class AnswerText:
    """An answer as text, token by token: never half a character, and without the white space around it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # from where the tokenizer joins words
        self._shown = 0  # of them, how many are text already
        self._white, self.text = "", ""

    def add(self, token: int) -> str:
        """What the next token adds to the text; empty until a character is whole."""
        self._ids.append(token)
        return self._grow(at_end=False)

    def rest(self) -> str:
        """What was held back, at the answer's end."""
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
