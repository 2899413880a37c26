"""The base model's own tokenizer, without mlx. Reads local folders only; never runs code that came with a model."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.rendering import Labelling, RenderedRow, Renderer
from safetrain.core.data.template import ChatTemplate, TemplateError
from safetrain.core.data.token_rows import TokenRow
from safetrain.core.data.turns import Controls
from safetrain.core.errors import ModelError

HEADER_CHARACTERS, KEPT_HEADERS = 80, 1024
FETCH = "fetch the model again: safetrain fetch HUB_ID"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A row as tokens. ``runs`` are the first and last token of each trained span."""

    tokens: TokenRow
    runs: tuple[tuple[int, int], ...]


class ChatTokenizer:
    """Token ids of texts and of chats, as the Hugging Face tokenizer in ``folder`` makes them."""

    def __init__(self, folder: Path, today: date | None = None) -> None:
        """``today``: the date that templates are told. Raises ModelError."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it reports the absence of PyTorch otherwise
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"The model's tokenizer cannot be loaded: {str(error).splitlines()[0]}", where=str(folder), do=FETCH
            ) from error
        if not self._tokenizer.is_fast:
            raise ModelError(
                "The model's tokenizer cannot say which token stands for which character.",
                where=str(folder),
                expected="a tokenizer.json",
                do="use a copy of the model that has one",
            )
        self.folder = folder
        self._headers: dict[str, list[int]] = {}
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some models ship what they were trained with
        self._backend.no_padding()
        self.template = ChatTemplate(self._sources(), self._tokenizer.special_tokens_map, today or date.today())

    def renderer(self, labelling: Labelling) -> Renderer:
        """What turns rows into texts with labels for this model."""
        return Renderer(self.template, self.controls, labelling, self._tokenizer.eos_token or "")

    @cached_property
    def controls(self) -> Controls:
        """The tokenizer's added tokens, and those that end an answer."""
        added = sorted(
            (token.content for token in self._tokenizer.added_tokens_decoder.values()), key=len, reverse=True
        )
        pattern = re.compile("|".join(map(re.escape, added))) if added else None
        stops = {self._tokenizer.convert_ids_to_tokens(number) for number in self.model_stop_ids}
        return Controls(pattern, frozenset(text for text in stops if text))

    @cached_property
    def model_stop_ids(self) -> frozenset[int]:
        """Ids that end an answer by the model's own files: tokenizer, generation_config.json, config.json."""
        found = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            value = _json_object(self.folder / name).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
        return frozenset(number for number in found if isinstance(number, int) and 0 <= number < self.size)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The model's own, and the tokens with which its template closes plain answers."""
        if not self.template:
            return self.model_stop_ids
        closings = self.renderer(Labelling(True, True, "trained")).plain_closings()
        return self.model_stop_ids | {self.id_of(closing) for closing in closings}

    @cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        return tuple(self.token_of(number) for number in self.stop_ids)

    @cached_property
    def size(self) -> int:
        """Ids are below this number."""
        return len(self._tokenizer)

    @property
    def end_id(self) -> int | None:
        """The id of the token that ends a text, None when the tokenizer has none."""
        return self._tokenizer.eos_token_id

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The tokenizer as it is used here, as tokenizer.json says it."""
        return dict(json.loads(self._backend.to_str()))

    def special_id(self, name: str) -> int | None:
        """The id of bos, eos or pad, None where the tokenizer has none."""
        number = getattr(self._tokenizer, f"{name}_token_id")
        return number if isinstance(number, int) else None

    def id_of(self, token: str) -> int:
        """The id of an added token."""
        return int(self._tokenizer.convert_tokens_to_ids(token))

    def token_of(self, number: int) -> str:
        """The token with an id, as the tokenizer spells it."""
        return str(self._tokenizer.convert_ids_to_tokens(number))

    def encode(self, text: str) -> list[int]:
        """Ids of a bare text, with the special tokens that the model wants around it, a beginning never twice."""
        begins = self._tokenizer.bos_token
        special = not (begins and text.startswith(begins))
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a text in which a template has written the special tokens."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def header_ids(self, text: str) -> list[int] | None:
        """Ids of what stands in ``text`` behind its last added token, if that is near; None if it is not.

        Nothing is joined across an added token, so that what stands before it does not matter.
        """
        window = text[-HEADER_CHARACTERS:]
        found = self.controls.found_in(window)
        return self._ids_behind(window[found[-1][0] :], found[-1][1]) if found else None

    def _ids_behind(self, text: str, token: str) -> list[int]:
        if text not in self._headers:
            if len(self._headers) >= KEPT_HEADERS:
                self._headers.clear()
            self._headers[text] = self.encode_chat(text)[len(self.encode_chat(token)) :]
        return self._headers[text]

    def tokenize(self, rows: Sequence[RenderedRow]) -> list[Tokenized]:
        """Ids and labels of rendered rows, in one batch on as many cores as the tokenizer library takes."""
        encodings = iter(
            self._backend.encode_batch([row.text for row in rows if row.is_chat], add_special_tokens=False)
        )
        return [self._labelled(row, next(encodings)) if row.is_chat else self._text_row(row) for row in rows]

    def _labelled(self, row: RenderedRow, encoding: Any) -> Tokenized:
        ids = np.array(encoding.ids, dtype=np.uint32)
        trained = np.zeros(len(ids), dtype=np.bool_)
        runs = []
        for span in row.spans:
            first = encoding.char_to_token(span.start)
            last = encoding.char_to_token(span.end - 1)
            if first is None or last is None:  # some tokenizers drop white space
                first = _token_at(encoding, range(span.start, span.end))
                last = _token_at(encoding, range(span.end - 1, span.start - 1, -1))
            if first is not None and last is not None:
                trained[first : last + 1] = True
                runs.append((first, last))
        return Tokenized(TokenRow(ids, trained), tuple(runs))

    def _text_row(self, row: RenderedRow) -> Tokenized:
        """Every token is a label, and one that ends a text is the last, unless the text has it already."""
        ids = self.encode(row.text)
        end = self.end_id
        ended = ids and (ids[-1] in self.stop_ids or row.text.rstrip().endswith(self._stop_texts))
        if end is not None and not ended:
            ids.append(end)
        tokens = TokenRow(np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.bool_))
        return Tokenized(tokens, ((0, len(ids) - 1),))

    def question(self, text: str, asked: str = "", opening: str = "") -> list[int]:
        """Ids of a single question, opened for its answer, as of a chat; raises ModelError."""
        return self.chat([{"role": "user", "content": text}], asked, opening)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        asked: str = "",
        opening: str = "",
        tools: Sequence[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat, opened for its next answer; without a template those of its last text. Raises ModelError.

        Where training did not show what the template asks with (``asked``), it is opened as training did. ``settings``
        are a template's own, as enable_thinking.
        """
        if not self.template:
            return self.encode(str(messages[-1]["content"]))
        try:
            prompt = self.template.write(messages, tools, prompt=True, settings=settings)
        except TemplateError as error:
            raise ModelError(f"The model's chat template refuses this: {error}") from None
        return self.encode_chat((prompt.removesuffix(asked) if asked else prompt) + opening)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` with special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _sources(self) -> dict[str, str]:
        """The chat templates by name, from wherever a model has them."""
        found = self._tokenizer.chat_template
        if not found:  # beside a processor, older models have it there
            found = _json_object(self.folder / "chat_template.json").get("chat_template")
        if isinstance(found, str):
            return {"default": found} if found.strip() else {}
        named = found.items() if isinstance(found, dict) else ()
        return {str(name): str(source) for name, source in named}


def _token_at(encoding: Any, characters: range) -> int | None:
    """The token of the first of ``characters`` that has one."""
    return next((token for place in characters if (token := encoding.char_to_token(place)) is not None), None)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
