"""How many bytes of text each token id stands for, by the tokenizer's own vocabulary: nothing is decoded."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer

SPACE = "▁"  # what SentencePiece writes for one
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTINUES = "##"  # WordPiece


def byte_lengths(tokenizer: ChatTokenizer) -> np.ndarray:
    """(ids,) UTF-8 bytes of each, int64; special tokens, which are no text, have none.

    Added tokens that are not special are text, as the runs of spaces of GPT-NeoX's tokenizer are. A byte-level
    vocabulary spells each byte as one character; any other has the text itself.
    """
    definition = tokenizer.definition
    is_bytes = any("ByteLevel" in _types(definition.get(part)) for part in ("pre_tokenizer", "decoder"))
    found = np.zeros(tokenizer.size, dtype=np.int64)
    for piece, number in _vocabulary(definition):
        if number < len(found):
            found[number] = len(piece) if is_bytes else _spelled(piece)
    for token in definition.get("added_tokens") or ():
        if token["id"] < len(found):
            found[token["id"]] = 0 if token.get("special", True) else len(token["content"].encode("utf-8"))
    return found


def _vocabulary(definition: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Pieces with their ids: a Unigram model lists them, others name the id of each."""
    vocabulary = definition["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        return ((str(entry[0]), number) for number, entry in enumerate(vocabulary))
    return ((str(piece), int(number)) for piece, number in vocabulary.items())


def _types(part: Any) -> set[str]:
    """The types of a component of the tokenizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inside = [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return {str(part.get("type")), *(name for each in inside for name in _types(each))}


def _spelled(piece: str) -> int:
    if BYTE.fullmatch(piece):
        return 1
    return len(piece.removeprefix(CONTINUES).replace(SPACE, " ").encode("utf-8"))
