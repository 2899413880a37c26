"""The base model's tokenizer and chat template, without mlx.

A template is run as in transformers, but with a fixed date. Rendering a chat with marks in place of its words shows the
text that the template writes around them. Reads local folders only; never runs code that came with a model.
"""

import bisect
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

from safetrain.core.errors import ModelError
from safetrain.core.foreign import MOST_BYTES, MOST_SECONDS, limited, told
from safetrain.core.formatting import size_text
from safetrain.core.storage.files import json_object

Messages = Sequence[Mapping[str, Any]]  # role, content, and other keys of a template
Tools = Sequence[Any] | None
MARK = re.compile(r"Zq(\d{5,})qZ")
LEXEME = re.compile(r"</?[^<>\s]+>|\[[^\[\]\s]+\]|\w+|.", re.DOTALL)
END_OF_THINKING = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|<\|channel\|>final<\|message\|>|</seed:think>|◁/think▷"
)
BEGIN_OF_THINKING = re.compile(
    r"\s*(?:<think(?:ing)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>|<\|channel\|>analysis|<seed:think>|◁think▷)"
)
PYTHON_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
SANDBOX = ("is unsafe", "No filter named", "No test named", "not safely callable", "Encountered unknown tag")
REGEX = "fix_mistral_regex"  # set to False by transformers if a tokenizer of Mistral may be wrong
FETCH = "fetch the model again: safetrain fetch HUB_ID"
MOST_ADDED = 2**17  # characters that a template adds to a chat, of which it may write everything twice
MOST_TEXT = 6 * 2**20  # characters of a row: over a million tokens, for which the tokenizer needs 1.2 GiB


class TemplateError(ValueError):
    """The template cannot render these messages. ``is_broken``: it cannot render any, or the sandbox forbids it."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class ChatTemplate:
    """Renders chats. ``sources``: templates by name (default, and perhaps tool_use), as in tokenizer_config.json."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any], today: date) -> None:
        self.sources, self._special, self._today = dict(sources), dict(special_tokens), today

    def __bool__(self) -> bool:
        return bool(self.sources)

    def source(self, tools: Tools) -> str:
        """The template for rows with or without tools, chosen as transformers does; raises TemplateError."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TemplateError(f"the model has no template named default (only {', '.join(sorted(self.sources))})")
        return self.sources[name]

    def write(self, messages: Messages, tools: Tools = None, *, prompt: bool = False) -> str:
        """Render a chat; ``prompt`` adds the generation prompt. Raises TemplateError or ModelError (too much)."""
        import jinja2

        source = self.source(tools)
        try:
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            with limited():
                text = str(_compiled(source, self._today).render(**values, **self._special))
            if len(text) > MOST_ADDED and len(text) - MOST_ADDED > 2 * len(str((messages, tools))):
                raise MemoryError
            text.encode()
            return text
        except (MemoryError, TimeoutError) as error:
            limits = f"at most {MOST_SECONDS:.0f} s and {size_text(MOST_BYTES)} for a chat"
            what, do = "The model's chat template needs too much time or memory.", "use another model"
            raise ModelError(what, where=source[:60], expected=limits, do=do) from error
        except (jinja2.TemplateError, *PYTHON_ERRORS) as error:
            where = f"line {error.lineno} of the template: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            is_broken = bool(where) or isinstance(error, RecursionError) or any(each in str(error) for each in SANDBOX)
            raise TemplateError(where + str(error).strip() or type(error).__name__, is_broken=is_broken) from error


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


class Skeleton(NamedTuple):
    """A rendered chat with marks: ``literals[k]`` is before the mark ``places[k]``, the last literal at the end."""

    literals: tuple[str, ...]
    places: tuple[int, ...]  # numbers of the marks; the template may write a mark twice, or never


def skeleton_of(text: str) -> Skeleton:
    """Divide a rendered chat at its marks."""
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
        tokens, tail = self.controls.found_in(after), self.tail.strip()
        if not tokens:
            return 0, ""
        own_end = tokens[0][0]
        if tail and after.lstrip().startswith(tail):  # the answer's own white space may come first
            own_end = len(after) - len(after.lstrip()) + len(tail) - 1
        stop = next((item for item in tokens if item[0] <= own_end and item[1] in self.controls.stops), None)
        place, token = stop or tokens[0]
        if stop is None and (after[:place].strip() or not self.at_end.strip() or token in self.openers):
            return 0, ""  # no closing token: this one is in the next header
        return place + len(token), token

    def closings(self) -> frozenset[str]:
        """The tokens that close plain answers, in the middle and at the end of a chat."""
        return frozenset(token for part in (self.between, self.at_end) if (token := self.closing(part)[1]))


def plain_answers(template: ChatTemplate, controls: Controls, tools: Tools) -> PlainAnswers:
    """Render two questions and answers to find the text around answers; empty if the template refuses them."""
    chat = [{"role": ("user", "assistant")[n % 2], "content": f"Zq{n:05d}qZ"} for n in range(4)]
    try:
        literals = skeleton_of(template.write(chat, tools)).literals
        prompt_end = skeleton_of(template.write(chat[:3], tools, prompt=True)).literals[-1]
        prompt_literals = skeleton_of(template.write(chat, tools, prompt=True)).literals
    except TemplateError:
        literals = ()
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
    """The length of the longest common prefix of two texts that ends at a border of words or control strings."""
    most = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return max(set(borders(one, most)) & set(borders(two, most)), default=0)


def borders(text: str, most: int) -> Iterator[int]:
    """Yield the ends of words and control strings, from 0 up to ``most``."""
    yield 0
    for match in LEXEME.finditer(text):
        if match.end() > most:
            return
        yield match.end()


# The tokenizer


class ChatTokenizer:
    """Token ids of texts and of chats, as the Hugging Face tokenizer in ``folder`` makes them.

    It has ``size`` ids; ``end_token`` and ``end_id`` are its end-of-text token, "" and None if there is none.
    """

    def __init__(self, folder: Path, today: date | None = None) -> None:
        """``today``: the date for templates. Raises ModelError if the tokenizer cannot be loaded or used."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns that PyTorch is missing
        from transformers import AutoTokenizer

        load = functools.partial(AutoTokenizer.from_pretrained, str(folder), trust_remote_code=False)
        with told("The model's tokenizer cannot be loaded", folder, FETCH):
            own: Any = load(local_files_only=True)
            if getattr(own.backend_tokenizer, REGEX, None) is False:  # it warns, for some models without a reason
                _require_same_splits(folder, own, load(local_files_only=True, **{REGEX: True}))
        if not own.is_fast:
            what, do = "The model has no fast tokenizer.", "use a copy of the model that has one"
            raise ModelError(what, where=folder, expected="a tokenizer.json", do=do)
        self.folder, self.size, self._tokenizer, self.backend = folder, len(own), own, own.backend_tokenizer
        self.end_token, self.end_id = own.eos_token or "", self.special_id("eos")
        self.backend.no_truncation()  # some models ship the settings of their training
        self.backend.no_padding()
        self.template = ChatTemplate(self._sources(), own.special_tokens_map, today or date.today())

    @functools.cached_property
    def controls(self) -> Controls:
        """The tokenizer's added tokens and the model's stop tokens."""
        added = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        stops = filter(None, map(self._tokenizer.convert_ids_to_tokens, self.model_stop_ids))
        return Controls(re.compile(pattern) if pattern else None, frozenset(stops))

    @functools.cached_property
    def model_stop_ids(self) -> frozenset[int]:
        """Ids of the stop tokens in the model's files: tokenizer, generation_config.json, config.json."""
        ids = [self.end_id]
        for name in ("generation_config.json", "config.json"):
            value = json_object(self.folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value]
        return frozenset(number for number in ids if isinstance(number, int) and 0 <= number < self.size)

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids of the model's own stop tokens, and of the tokens with which its template closes plain answers."""
        closings = plain_answers(self.template, self.controls, None).closings() if self.template else ()
        return self.model_stop_ids.union(map(self.id_of, closings))

    @functools.cached_property
    def definition(self) -> dict[str, Any]:
        """The tokenizer in use, as the content of tokenizer.json."""
        return dict(json.loads(self.backend.to_str()))

    def special_id(self, name: str) -> int | None:
        """The id of the token ``name`` (bos, eos or pad); None if the tokenizer does not have it."""
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
        return list(self.backend.encode(text, add_special_tokens=not (begins and text.startswith(begins))).ids)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered chat, which has its special tokens already."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_chats(self, texts: Sequence[str]) -> list[Any]:
        """The tokenizer library's encodings of several rendered chats, computed in parallel."""
        return list(self.backend.encode_batch(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, with or without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def after_thinking(self, ids: Sequence[int], expected: Sequence[int] = ()) -> Sequence[int] | None:
        """The part of an answer after its thinking; None if it thinks to its end.

        ``expected``: another answer to the same prompt, which shows whether the prompt begins the thinking.
        """
        text, other = self.decode(ids, special=True), self.decode(expected, special=True)
        ends = self._thoughts(ids)
        if not ends:
            is_begun = END_OF_THINKING.search(other) and not BEGIN_OF_THINKING.match(other)
            return None if is_begun or BEGIN_OF_THINKING.match(text) else ids
        return ids[bisect.bisect_left(range(len(ids)), ends, key=lambda most: self._thoughts(ids[:most])) :]

    def _thoughts(self, ids: Sequence[int]) -> int:
        return len(END_OF_THINKING.findall(self.decode(ids, special=True)))

    def continuation(self, prompt: Sequence[int], text: str) -> list[int]:
        """The ids of ``text`` after a prompt; a token that would span both is divided.

        The prompt is encoded again, because some tokenizers add a space to a text that they decode.
        """
        before = self.decode(prompt, special=True)
        whole, begun = self.encode_chat(before + text), self.encode_chat(before)
        return whole[len(begun) :] if whole[: len(begun)] == begun else self.encode_chat(text)

    def _sources(self) -> dict[str, str]:
        """The chat templates by name, from the tokenizer or from chat_template.json."""
        older = json_object(self.folder / "chat_template.json")  # where older models with a processor have it
        template = self._tokenizer.chat_template or older.get("chat_template")
        if isinstance(template, str):
            return {"default": template} if template.strip() else {}
        named = template if isinstance(template, dict) else {}
        return {str(name): str(source) for name, source in named.items()}


def _require_same_splits(folder: Path, own: Any, repaired: Any) -> None:
    """Raise ModelError if repairing the tokenizer changes tokens and its settings do not say whether to."""
    settings = folder / "tokenizer_config.json"
    one, two = (json.loads(each.backend_tokenizer.to_str())["pre_tokenizer"] for each in (own, repaired))
    if one != two and json_object(settings).get(REGEX) is None:
        what = "The tokenizer splits words by a rule that Mistral has corrected."
        raise ModelError(what, where=settings, do=f'add "{REGEX}": true to this file (false keeps the rule)')
