"""The base model's own tokenizer, without mlx. Reads local folders only; never runs code that came with a model."""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from safetrain.core.data.rows import Message
from safetrain.core.errors import ModelError


class ChatTokenizer:
    """Token ids of texts and of chats. Wraps the Hugging Face tokenizer in ``folder``."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it reports the absence of PyTorch otherwise
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"The model's tokenizer cannot be loaded: {str(error).splitlines()[0]}",
                where=str(folder),
                do="fetch the model again: safetrain fetch HUB_ID",
            ) from error
        self.folder = folder

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether chat rows can be rendered."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a bare text, with the special tokens that the model wants around it."""
        return list(self._tokenizer.encode(text))

    def encode_end(self) -> int | None:
        """The id of the token that ends a text, None when the tokenizer has none."""
        return self._tokenizer.eos_token_id

    def chat(self, messages: tuple[Message, ...], tools: str = "", *, prompt: bool = False) -> list[int]:
        """Ids of a chat by the model's template; ``prompt`` adds the opening of the answer."""
        import jinja2

        if not messages:
            return []
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    [message.for_template() for message in messages],
                    tools=json.loads(tools) if tools else None,
                    add_generation_prompt=prompt,
                    tokenize=True,
                    return_dict=False,
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise TemplateError(str(error)) from error

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the end of a text, and the special tokens with which the template closes a turn."""
        ends = {self.encode_end()}
        if self.has_chat_template:
            asked = (Message("user", "a"),)
            opened = self.chat(asked, prompt=True)
            closing = self.chat((*asked, Message("assistant", "b")))[len(opened) :]
            ends |= set(closing) & set(self._tokenizer.all_special_ids)
        return frozenset(end for end in ends if end is not None)

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class TemplateError(ValueError):
    """The model's chat template refuses these messages."""
