"""The base model's own tokenizer, without mlx, prompts in the format of training, and answers while they are generated.

Reads local folders only; never runs code that came with a model.
"""

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetrain.core.data.template import ChatTemplate, Controls, TemplateError, plain_answers
from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.storage.files import json_object

Messages = Sequence[Mapping[str, Any]]  # role, content, and other keys of a template
FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer the part is not measured
MOST_TOKENS, SHORT_TOKENS = 256, 32  # of a piece: usually none has as many; the limit in a short measurement
FETCH = "fetch the model again: safetrain fetch HUB_ID"


class ChatTokenizer:
    """Token ids of texts and of chats, as the Hugging Face tokenizer in ``folder`` makes them."""

    def __init__(self, folder: Path, today: date | None = None) -> None:
        """``today``: the date for templates. Raises ModelError."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns that PyTorch is missing
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            what = f"The model's tokenizer cannot be loaded: {str(error).splitlines()[0]}"
            raise ModelError(what, where=str(folder), do=FETCH) from error
        if not self._tokenizer.is_fast:
            what = "The model's tokenizer does not map characters to tokens."
            do = "use a copy of the model that has one"
            raise ModelError(what, where=str(folder), expected="a tokenizer.json", do=do)
        self.folder = folder
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some models ship their training settings
        self._backend.no_padding()
        self.template = ChatTemplate(self._sources(), self._tokenizer.special_tokens_map, today or date.today())

    @cached_property
    def controls(self) -> Controls:
        """The tokenizer's added tokens and the model's stop tokens."""
        added = sorted(
            (token.content for token in self._tokenizer.added_tokens_decoder.values()), key=len, reverse=True
        )
        pattern = re.compile("|".join(map(re.escape, added))) if added else None
        stops = {self._tokenizer.convert_ids_to_tokens(number) for number in self.model_stop_ids}
        return Controls(pattern, frozenset(text for text in stops if text))

    @cached_property
    def model_stop_ids(self) -> frozenset[int]:
        """Ids of the stop tokens in the model's files: tokenizer, generation_config.json, config.json."""
        ids = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            value = json_object(self.folder / name).get("eos_token_id")
            ids |= set(value) if isinstance(value, list) else {value}
        return frozenset(number for number in ids if isinstance(number, int) and 0 <= number < self.size)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The model's own stop tokens, and those with which its template closes plain answers."""
        if not self.template:
            return self.model_stop_ids
        closings = plain_answers(self.template, self.controls, None).closings()
        return self.model_stop_ids | {self.id_of(closing) for closing in closings}

    @property
    def end_token(self) -> str:
        """The end-of-text token, empty if the tokenizer has none."""
        return self._tokenizer.eos_token or ""

    @cached_property
    def size(self) -> int:
        """The number of ids."""
        return len(self._tokenizer)

    @property
    def end_id(self) -> int | None:
        """The id of the end-of-text token, None if the tokenizer has none."""
        return self._tokenizer.eos_token_id

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The tokenizer in use, in the form of tokenizer.json."""
        return dict(json.loads(self._backend.to_str()))

    def special_id(self, name: str) -> int | None:
        """The id of bos, eos or pad, None if the tokenizer has none."""
        number = getattr(self._tokenizer, f"{name}_token_id")
        return number if isinstance(number, int) else None

    def id_of(self, token: str) -> int:
        """The id of an added token."""
        return int(self._tokenizer.convert_tokens_to_ids(token))

    def token_of(self, number: int) -> str:
        """The token of an id, in the tokenizer's own spelling."""
        return str(self._tokenizer.convert_ids_to_tokens(number))

    def encode(self, text: str) -> list[int]:
        """Ids of a bare text with the model's special tokens around it; a bos token in the text is not repeated."""
        begins = self._tokenizer.bos_token
        special = not (begins and text.startswith(begins))
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered chat, which has its special tokens already."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chats(self, texts: Sequence[str]) -> list[Any]:
        """The tokenizer library's encodings of several rendered chats, computed in parallel."""
        return list(self._backend.encode_batch(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` with special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_stream(self) -> Callable[[int], str | None]:
        """Decode ids one by one, without special tokens: a text for each, None while a character is incomplete."""
        from tokenizers.decoders import DecodeStream

        return partial(DecodeStream(skip_special_tokens=True).step, self._backend)

    def _sources(self) -> dict[str, str]:
        """The chat templates by name, from the tokenizer or from chat_template.json."""
        template = self._tokenizer.chat_template
        if not template:  # older models with a processor have it there
            template = json_object(self.folder / "chat_template.json").get("chat_template")
        if isinstance(template, str):
            return {"default": template} if template.strip() else {}
        templates = template.items() if isinstance(template, dict) else ()
        return {str(name): str(source) for name, source in templates}


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
        self._step = tokenizer.decode_stream()
        self._white, self.text = "", ""

    def add(self, token: int) -> str:
        """The text that the next token adds; empty until a character is complete."""
        pending = self._white + (self._step(token) or "")
        words = pending.rstrip()
        self._white = pending[len(words) :] if words or self.text else ""
        words = words if self.text else words.lstrip()
        self.text += words
        return words


@dataclass(frozen=True)
class GeneralText:
    """The general text on which forgetting is measured, as tokens. Every token except a piece's first is a label.

    It is included with safetrain: 60 short pieces, written for this project and under its licence: 24 paragraphs in
    English, 24 in Portuguese (everyday knowledge, stories, instructions), 12 pieces of code in as many languages.
    """

    rows: TokenRows
    parts: tuple[str, ...]  # (rows,)
    left_out: int  # pieces that the tokenizer cannot express


def general_text(
    tokenizer: ChatTokenizer, vocabulary: int, max_positions: int | None, most_tokens: int | None = None
) -> GeneralText:
    """Tokenize the pieces for a model with these limits, leaving out those that decode to a different text.

    At most about ``most_tokens`` tokens, but at least LEAST_PIECES of each part, truncated to SHORT_TOKENS if needed.
    """
    pieces = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    most = min(MOST_TOKENS, max_positions or MOST_TOKENS)
    if most_tokens is not None:
        least = LEAST_PIECES * len({piece["part"] for piece in pieces})
        most = min(most, max(SHORT_TOKENS, most_tokens // least))
    rows, parts = list[TokenRow](), list[str]()
    for piece in pieces:
        ids = tokenizer.encode(piece["text"])
        if max(ids) < vocabulary and _letters(tokenizer.decode(ids)) == _letters(piece["text"]):
            rows.append(token_row(ids[:most], [True] * len(ids[:most])))
            parts.append(piece["part"])
    left_out, counts = len(pieces) - len(rows), Counter(parts)
    share = 1.0 if most_tokens is None else min(1.0, most_tokens / max(1, sum(map(len, rows))))
    left = {part: max(LEAST_PIECES, round(share * count)) for part, count in counts.items()}  # the same share of each
    taken = [index for index, part in enumerate(parts) if parts[:index].count(part) < left[part]]
    return GeneralText(TokenRows.of([rows[index] for index in taken]), tuple(parts[index] for index in taken), left_out)


def _letters(text: str) -> str:
    """Normalise what tokenizers change on purpose: white space, and the form and case of letters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
