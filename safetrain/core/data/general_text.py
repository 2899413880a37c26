"""The general text that ships with the project: what a tuned model should not forget while it learns something else.

60 short pieces, written for this project and under its licence: 24 paragraphs in English, 24 in Portuguese (everyday
knowledge, stories, instructions), 12 pieces of code in as many languages.
"""

import json
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.token_rows import TokenRow, TokenRows
from safetrain.core.data.tokenizer import ChatTokenizer

FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer it is not measured
MOST_TOKENS = 256  # of a piece; with the usual tokenizers none has as many


@dataclass(frozen=True)
class GeneralText:
    """The pieces as tokens, and the part that each belongs to. Every token except a piece's first is a label."""

    rows: TokenRows
    parts: tuple[str, ...]  # (rows,)
    left_out: int  # pieces that the tokenizer cannot express


def general_text(
    tokenizer: ChatTokenizer, vocabulary: int, max_positions: int | None, most_tokens: int | None = None
) -> GeneralText:
    """As the tokenizer writes it for a model of these limits; without pieces that do not come back as they were.

    At most about ``most_tokens`` tokens, but of each part the first LEAST_PIECES.
    """
    with FILE.open(encoding="utf-8") as file:
        pieces = [json.loads(line) for line in file]
    most = min(MOST_TOKENS, max_positions or MOST_TOKENS)
    rows, parts = list[TokenRow](), list[str]()
    for piece in pieces:
        ids = tokenizer.encode(piece["text"])
        if max(ids) < vocabulary and _letters(tokenizer.decode(ids)) == _letters(piece["text"]):
            ids_kept = np.array(ids[:most], dtype=np.uint32)
            rows.append(TokenRow(ids_kept, np.ones(len(ids_kept), dtype=np.bool_)))
            parts.append(piece["part"])
    left_out = len(pieces) - len(rows)
    if most_tokens is not None:
        rows, parts = _first_of_each(rows, parts, most_tokens)
    return GeneralText(TokenRows.of(rows), tuple(parts), left_out)


def _first_of_each(rows: list[TokenRow], parts: list[str], most_tokens: int) -> tuple[list[TokenRow], list[str]]:
    """The same share of each part's pieces."""
    share = min(1.0, most_tokens / max(1, sum(map(len, rows))))
    counts, places = Counter[str](), list[int]()
    most = {part: max(LEAST_PIECES, round(share * count)) for part, count in Counter(parts).items()}
    for index, part in enumerate(parts):
        counts[part] += 1
        if counts[part] <= most[part]:
            places.append(index)
    return [rows[index] for index in places], [parts[index] for index in places]


def _letters(text: str) -> str:
    """Remove what tokenizers change on purpose: white space, and the form and case of letters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
