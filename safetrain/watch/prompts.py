"""Prompts as in training, and answers token by token."""

from collections.abc import Mapping
from typing import Any

from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.text.tokenizer import ChatTokenizer, Messages, Settings, TemplateError, Tools


class Prompts:
    """Writes prompts for one model. ``system`` is the system prompt of all training rows, or empty."""

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

    def ids(self, messages: Messages, tools: Tools = None, settings: Settings = None) -> list[int]:
        """Ids of a prompt: a chat whose answer opens as in training, or its last text if the model continues texts.

        ``settings``: template variables, such as enable_thinking. Raises ModelError if the template refuses the chat.
        """
        if self.continues:  # the end token of a document opens the next one, as in training
            end = self._tokenizer.end_id if self._format.documents else None
            return [*([] if end is None else [end]), *self._tokenizer.encode(str(messages[-1]["content"]))]
        try:
            prompt = self._tokenizer.template.write(messages, tools, prompt=True, settings=settings)
        except TemplateError as error:
            raise ModelError(f"The model's chat template refuses this chat: {error}") from None
        as_trained = prompt.removesuffix(self._format.asked) + self._format.opening
        return self._tokenizer.encode_chat(as_trained)

    def writes_system(self, system: str) -> bool:
        """Whether the template writes a system prompt; raises ModelError if it refuses one."""
        question = [{"role": "user", "content": "?"}]
        return not self.continues and self.ids(self.with_system(question, system)) != self.ids(question)


class AnswerText:
    """Decodes an answer token by token: only whole characters, without white space around the answer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream, self._backend = DecodeStream(skip_special_tokens=True), tokenizer.backend
        self._white, self.text = "", ""

    def add(self, token: int) -> str:
        """The text that the next token adds; empty until a character is complete."""
        pending = self._white + (self._stream.step(self._backend, token) or "")
        words = pending.rstrip()
        self._white = pending[len(words) :] if words or self.text else ""
        words = words if self.text else words.lstrip()
        self.text += words
        return words
