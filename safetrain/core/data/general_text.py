"""The general text, included with safetrain, on which forgetting is measured.

60 short pieces, written for this project and under its licence: 24 paragraphs in English, 24 in Portuguese (everyday
knowledge, stories, instructions), 12 pieces of code in as many languages.
"""

import json
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.data.tokenizer import ChatTokenizer

FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer the part is not measured
MOST_TOKENS, SHORT_TOKENS = 256, 32  # of a piece: usually none has as many; the limit in a short measurement


@dataclass(frozen=True)
class GeneralText:
    """The pieces as tokens, and the part of each. Every token except a piece's first is a label."""

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
