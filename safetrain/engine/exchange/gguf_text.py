"""Tokenizer and chat template in a GGUF file.

llama.cpp has a fixed list of ways to split a text (src/llama-vocab.cpp). A tokenizer with another one is refused,
because llama.cpp would silently split texts differently than in training.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from safetrain.core.data.template import TemplateError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ModelError
from safetrain.core.records.adapter_files import PromptFormat

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST, SLASHES = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}", rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
LLAMA3 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}{{1,3}}" + REST
QWEN2 = CONTRACTIONS + rf"|{START}\p{{L}}+|\p{{N}}" + REST
TEKKEN = f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*" + r"|\p{N}" + SLASHES
GPT4O = f"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?" + r"|\p{N}{1,3}" + SLASHES
GPT2 = "as GPT-2"
DIGITS_GPT2 = "single digits, then as GPT-2"
SPLITS = {  # by the pattern, and whether whole words come before merges
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
    (GPT2, False): "gpt-2",
    (DIGITS_GPT2, False): "smollm",
}
SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
UNREACHED = -1e6  # the score of a piece that no merge makes


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a GGUF file stores it; ``tokens``, ``types`` and ``scores`` by id."""

    model: str  # gpt2: bytes and merges; llama: letters, and the pair of the highest score is joined first
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    unknown_id: int | None = None
    space_before: bool | None = None  # a space is put before every text that does not follow a text


def write_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write the tokens into a file's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.unknown_id is not None:
        writer.add_unk_token_id(vocabulary.unknown_id)
    if vocabulary.space_before is not None:
        writer.add_add_space_prefix(vocabulary.space_before)


def write_chat(writer: GGUFWriter, tokenizer: ChatTokenizer, form: PromptFormat | None, size: int, where: Path) -> None:
    """Write the chat template and its special tokens into the metadata. ``size``: rows of the embedding."""
    templates = templates_of(tokenizer, form)
    writer.add_chat_template([{"name": name, "template": source} for name, source in templates.items()])
    end, *others = stop_ids_of(tokenizer, form, where)
    begin, pad = tokenizer.special_id("bos"), tokenizer.special_id("pad")
    writer.add_bos_token_id(end if begin is None else begin)  # without one, llama.cpp uses token 11
    writer.add_eos_token_id(end)
    others = [number for number in others if number < size]
    for add, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(number)
    if pad is not None and pad < size:
        writer.add_pad_token_id(pad)
    writer.add_add_bos_token(adds_begin(tokenizer))
    writer.add_add_eos_token(tokenizer.encode("a")[-1:] == [end] and tokenizer.encode_chat("a")[-1:] != [end])


def stop_ids_of(tokenizer: ChatTokenizer, form: PromptFormat | None, where: Path) -> tuple[int, ...]:
    """Every token that ends an answer, the tokenizer's own first.

    Raises ModelError without one: llama.cpp would use an arbitrary token.
    """
    trained_ids = form.stop_ids if form else ()
    stops = tokenizer.stop_ids | frozenset(trained_ids)
    if not stops:
        raise ModelError(
            "This model has no stop token.", where=str(where), do="set its eos_token in tokenizer_config.json"
        )
    end = tokenizer.end_id if tokenizer.end_id in stops else min(stops)
    return tuple(dict.fromkeys([end, *trained_ids, *sorted(stops)]))


def adds_begin(tokenizer: ChatTokenizer) -> bool:
    """Whether llama.cpp should put the first token before texts: where the tokenizer does, and the template too."""
    begin = tokenizer.special_id("bos")
    if begin is None or tokenizer.encode("a")[:1] != [begin] or tokenizer.encode_chat("a")[:1] == [begin]:
        return False
    if not tokenizer.template:
        return True
    with suppress(TemplateError):
        prompt = tokenizer.template.write([{"role": "user", "content": "a"}], prompt=True)
        return prompt.startswith(tokenizer.token_of(begin))
    return False


def templates_of(tokenizer: ChatTokenizer, form: PromptFormat | None) -> dict[str, str]:
    """Jinja templates by name, default and perhaps tool_use, that begin answers as in training."""
    absent = [f"{name}_token" for name in ("bos", "eos") if tokenizer.special_id(name) is None]
    templates = dict[str, str]()
    for name, source in tokenizer.template.sources.items():
        opened = opened_as_trained(source, form)
        empty = (f"{{% set {token} = '' %}}" for token in absent if token in opened)  # programs may insert another
        templates[name] = "".join(empty) + opened
    return templates


def opened_as_trained(source: str, form: PromptFormat | None) -> str:
    """A Jinja template that begins answers as in training."""
    if form is None or not (form.asked or form.opening):
        return source
    text = source.removesuffix("\n")  # which Jinja drops at the end of a template, but not in the middle
    cut = f"(chat[:-{len(form.asked)}] if chat.endswith({form.asked!r}) else chat)" if form.asked else "chat"
    return (
        f"{{% set chat %}}{text}{{% endset %}}{{{{ ({cut} + {form.opening!r}) if add_generation_prompt else chat }}}}"
    )


def strips_spaces(definition: Mapping[str, Any]) -> bool:
    """Whether special tokens drop the white space after them, as in Phi-3."""
    return any(token["rstrip"] for token in definition["added_tokens"])


def vocabulary_of(definition: Mapping[str, Any], size: int, *, chats: bool, where: str) -> Vocabulary:
    """Convert the tokenizer that tokenizer.json defines, for an embedding of ``size`` rows.

    ``chats``: whether texts begin with a template's own tokens. Raises ModelError if llama.cpp has no such tokenizer.
    """
    model = definition["model"]
    if model["type"] != "BPE":
        raise _unknown(f"its model is {model['type']}", where)
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unknown("its pieces have a prefix or suffix", where)
    tokens, types = _pieces(definition, size)
    merges = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    unknown = model["vocab"].get(model.get("unk_token") or "")
    if not model.get("byte_fallback"):
        pre, joined = _split_name(definition, where), tuple(" ".join(pair) for pair in merges)
        return Vocabulary("gpt2", pre, tokens, types, joined, unknown_id=unknown)
    types = tuple(TokenType.BYTE if BYTE.fullmatch(token) else types[place] for place, token in enumerate(tokens))
    if types.count(TokenType.BYTE) != 256:
        raise _unknown("it lacks pieces for single bytes", where)
    ranks: dict[str, int] = {}  # the earlier a piece is merged, the higher its score: llama.cpp joins in their order
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = tuple(-float(ranks[token]) if token in ranks else UNREACHED for token in tokens)
    space = _space_before(definition, chats=chats, where=where)
    return Vocabulary("llama", "default", tokens, types, scores=scores, unknown_id=unknown, space_before=space)


def _pieces(definition: Mapping[str, Any], size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Text and type of each id of the embedding: ids without a token are unused, tokens beyond it are left out."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(TokenType.UNUSED)] * size
    model = definition["model"]
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, TokenType.NORMAL
    for added in definition["added_tokens"]:
        text, number = added["content"], added["id"]
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if SPACE in text and text in model["vocab"]:
            kind = TokenType.NORMAL  # Gemma's runs of spaces: merges make them
        if number < size:
            tokens[number], types[number] = text, TokenType.UNKNOWN if text == model.get("unk_token") else kind
    return tuple(tokens), tuple(map(int, types))


def _space_before(definition: Mapping[str, Any], *, chats: bool, where: str) -> bool:
    """Whether llama.cpp should put a space before texts."""
    steps = _flat(definition.get("normalizer"), "normalizers")
    splits = _flat(definition.get("pre_tokenizer"), "pretokenizers")
    kinds, split_kinds = [step["type"] for step in steps], [split["type"] for split in splits]
    replaces = all(step["pattern"].get("String") == " " and step["content"] == SPACE for step in steps[-1:])
    if replaces and all(split["type"] == "Split" and split["pattern"].get("String") == " " for split in splits):
        if kinds == ["Replace"]:  # as in Gemma
            return False
        if kinds == ["Prepend", "Replace"] and steps[0]["prepend"] == SPACE:  # as in Llama 2
            return True
    if steps or split_kinds != ["Metaspace"] or splits[0]["replacement"] != SPACE or splits[0].get("split", True):
        got = f"texts are changed by {kinds or 'nothing'}, split by {split_kinds or 'nothing'}"
        raise _unknown(got, where)
    scheme = splits[0]["prepend_scheme"]  # as in Mistral
    return scheme == "always" or (scheme == "first" and not chats)


def _split_name(definition: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name for how texts are split."""
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unknown(f"texts are changed before they are split ({normalizer['type']})", where)
    pattern = _split_pattern(_flat(definition.get("pre_tokenizer"), "pretokenizers"))
    words_first = bool(definition["model"].get("ignore_merges"))
    name = SPLITS.get((pattern, words_first))
    if name is None:
        raise _unknown(f"it splits texts{' taking whole words first' if words_first else ''} by {pattern}", where)
    return name


def _split_pattern(steps: list[Mapping[str, Any]]) -> str:
    """The pattern that splits texts, its name, or a description if it is not recognised."""
    *before, last = steps or [{"type": "nothing"}]
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if last["use_regex"] and not before:
            return GPT2
        if last["use_regex"] and [step["type"] for step in before] == ["Digits"] and before[0]["individual_digits"]:
            return DIGITS_GPT2
        isolated = [step for step in before if step.get("behavior") == "Isolated" and not step["invert"]]
        if not last["use_regex"] and len(before) == 1 and isolated:
            return str(before[0]["pattern"].get("Regex"))
    return ", ".join(str(step.get("pattern", step["type"])) for step in steps) or "nothing"


def _flat(step: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inside]) if step["type"] == "Sequence" else [step]


def _unknown(what: str, where: str) -> ModelError:
    return ModelError(
        f"llama.cpp does not support this model's tokenizer: {what}.",
        where=where,
        do="keep it as an MLX model (safetrain fuse OUT): with another tokenizer it would silently answer wrongly",
    )
