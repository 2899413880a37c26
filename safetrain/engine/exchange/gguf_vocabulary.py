"""A tokenizer as llama.cpp takes it: pieces, their types, merges or scores, and how texts are split before.

llama.cpp knows a fixed list of ways to split a text (src/llama-vocab.cpp). Another one would be split
differently than in training without a word, so it is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from safetrain.core.errors import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + WORDS + r"\p{N}" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
NO_PREFIX = (None, "")
NOT_STRIPPING, PHI_END = ("<unk>", "<s>", "<|endoftext|>"), "</s>"  # by name, in a model that is called Phi-3


NOT_NFC = "texts that are not in Unicode's form NFC are split otherwise: llama.cpp does not normalize"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the file's terms; ``tokens``, ``types`` and ``scores`` by id."""

    model: str  # gpt2: bytes and merges; llama: letters, and the pair of the highest score is joined first
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    unknown_id: int | None = None
    space_before: bool | None = None  # a space is put before every text that does not follow a text
    strips_behind: bool = False  # white space behind special tokens is dropped
    notes: tuple[str, ...] = ()  # what llama.cpp does otherwise, in rare texts


def vocabulary_of(definition: Mapping[str, Any], size: int, *, chats: bool, where: str) -> Vocabulary:
    """Of a tokenizer as tokenizer.json defines it, for an embedding of ``size`` rows.

    ``chats``: whether texts begin with a template's own tokens. Raises ModelError for one that llama.cpp has not.
    """
    model = definition["model"]
    if model["type"] != "BPE":
        raise _unknown(f"its model is {model['type']}", "BPE", where)
    if any(model.get(key) not in NO_PREFIX for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _unknown("its pieces have a prefix or suffix", "plain pieces", where)
    tokens, types = _pieces(definition, size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    strips, notes = _stripping(definition)
    unknown = model["vocab"].get(model.get("unk_token") or "")
    if model.get("byte_fallback"):
        before, more = _space_before(definition, chats=chats, where=where)
        types = [TokenType.BYTE if BYTE.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
        if types.count(TokenType.BYTE) != 256:
            raise _unknown("it lacks pieces for single bytes", "256 of them", where)
        scores, notes = _scores(tokens, model["merges"]), (*notes, *more)
        return Vocabulary(
            "llama", "default", tuple(tokens), tuple(map(int, types)), (), scores, unknown, before, strips, notes
        )
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _unknown(f"texts are changed before they are split ({normalizer['type']})", "NFC, or nothing", where)
    if normalizer is not None:
        notes += (NOT_NFC,)
    pre = _split_name(definition, where)
    return Vocabulary(
        "gpt2", pre, tuple(tokens), tuple(map(int, types)), tuple(merges), (), unknown, None, strips, notes
    )


def write_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Into a file's head."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)


def _pieces(definition: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Of each id of the embedding; ids that the tokenizer lacks are unused, tokens beyond it are left out."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(TokenType.UNUSED)] * size
    for token, number in definition["model"]["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, TokenType.NORMAL
    unknown = definition["model"].get("unk_token")
    for added in definition["added_tokens"]:
        if added["id"] < size:
            text = added["content"]
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            if SPACE in text and text in definition["model"]["vocab"]:
                kind = TokenType.NORMAL  # Gemma's runs of spaces: merges make them
            tokens[added["id"]] = text
            types[added["id"]] = TokenType.UNKNOWN if text == unknown else kind
    return tokens, types


def _scores(tokens: list[str], merges: list[Any]) -> tuple[float, ...]:
    """The earlier a piece is merged, the higher its score: llama.cpp then joins in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    return tuple(-float(ranks[token]) if token in ranks else UNREACHED for token in tokens)


def _space_before(definition: Mapping[str, Any], *, chats: bool, where: str) -> tuple[bool, tuple[str, ...]]:
    """Whether llama.cpp is to put a space before texts, and what it does otherwise then."""
    steps = _flat(definition.get("normalizer"), "normalizers")
    splits = _flat(definition.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    replaces = [step for step in steps if step["type"] == "Replace"]
    plain = all(step["pattern"].get("String") == " " and step["content"] == SPACE for step in replaces)
    harmless = all(split["type"] == "Split" and split["pattern"].get("String") == " " for split in splits)
    if kinds == ["Prepend", "Replace"] and steps[0]["prepend"] == SPACE and plain and harmless:
        return True, ()
    if kinds == ["Replace"] and plain and harmless:
        return False, ()
    if not steps and [split["type"] for split in splits] == ["Metaspace"] and splits[0]["replacement"] == SPACE:
        return _metaspace(splits[0], chats=chats, where=where)
    got = f"texts are changed by {kinds or 'nothing'}, split by {[split['type'] for split in splits] or 'nothing'}"
    raise _unknown(got, f"spaces that become {SPACE}", where)


def _metaspace(split: Mapping[str, Any], *, chats: bool, where: str) -> tuple[bool, tuple[str, ...]]:
    scheme = split["prepend_scheme"]
    if split.get("split", True):
        raise _unknown("it splits at every space", "whole texts", where)
    if scheme == "never":
        return False, ()
    if scheme == "always":
        return True, ("a text that begins with a space, after a special token, gets a second one in llama.cpp",)
    if chats:
        return False, ("a text outside of a chat begins without the space that the training put there",)
    return True, ("a text after a special token gets a space that the training did not put there",)


def _split_name(definition: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name for the way that texts are split."""
    pattern = _split_pattern(_flat(definition.get("pre_tokenizer"), "pretokenizers"))
    words_first = bool(definition["model"].get("ignore_merges"))
    name = SPLITS.get((pattern, words_first))
    if name is None:
        first = " taking whole words first" if words_first else ""
        raise _unknown(f"it splits texts{first} by {pattern}", "a pattern of llama.cpp's list", where)
    return name


def _split_pattern(steps: list[Mapping[str, Any]]) -> str:
    """The pattern, or what stands for it; what is not recognised is described."""
    *before, last = steps or [{"type": "nothing"}]
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if last["use_regex"] and not before:
            return GPT2
        if last["use_regex"] and [step["type"] for step in before] == ["Digits"] and before[0]["individual_digits"]:
            return DIGITS_GPT2
        isolated = [step for step in before if step.get("behavior") == "Isolated" and not step["invert"]]
        if not last["use_regex"] and len(before) == 1 and len(isolated) == 1:
            return str(before[0]["pattern"].get("Regex"))
    return ", ".join(str(step.get("pattern", step["type"])) for step in steps) or "nothing"


def _flat(step: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inside]) if step["type"] == "Sequence" else [step]


def _stripping(definition: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether special tokens drop white space as Phi-3's do, which llama.cpp knows, and those that do it otherwise."""
    added = {token["content"]: token for token in definition["added_tokens"]}
    right = {text for text, token in added.items() if token["rstrip"]}
    as_phi = set(NOT_STRIPPING) <= set(added) and right == set(added) - set(NOT_STRIPPING) and PHI_END in right
    odd = [text for text, token in added.items() if token["lstrip"] or token["single_word"]]
    odd += [] if as_phi else sorted(right)
    notes: tuple[str, ...] = ()
    if as_phi:
        notes = ("wide and other rare spaces after a special token are dropped here, and not in llama.cpp",)
    if odd:
        notes += (f"white space beside {', '.join(odd[:5])} is dropped here, and not in llama.cpp",)
    return as_phi, notes


def _unknown(what: str, expected: str, where: str) -> ModelError:
    return ModelError(
        f"llama.cpp has no tokenizer like this model's: {what}.",
        where=where,
        expected=expected,
        do="keep it as an MLX model (safetrain fuse): with another tokenizer its answers would be wrong without a word",
    )
