"""The general text on which forgetting is measured: included with safetrain, tokenized for a model."""

import json
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.text.tokenizer import ChatTokenizer

FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer the part is not measured
MOST_TOKENS, SHORT_TOKENS = 256, 32  # of a piece: hardly any has so many; the limit in a short measurement


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
    tokenizer: ChatTokenizer, vocabulary: int, max_positions: int | None, most_tokens: int = sys.maxsize
) -> GeneralText:
    """Tokenize the pieces for a model with these limits, leaving out those that decode to a different text.

    They have about ``most_tokens`` tokens in all, or more: each part has LEAST_PIECES, cut to SHORT_TOKENS if needed.
    """
    pieces = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    least = LEAST_PIECES * len({piece["part"] for piece in pieces})
    most = min(MOST_TOKENS, max_positions or MOST_TOKENS, max(SHORT_TOKENS, most_tokens // least))
    rows = dict[str, list[TokenRow]]()  # of each part
    for piece in pieces:
        ids = tokenizer.encode(piece["text"])
        if max(ids) < vocabulary and _letters(tokenizer.decode(ids)) == _letters(piece["text"]):
            rows.setdefault(piece["part"], []).append(token_row(ids[:most], [True] * len(ids[:most])))
    share = min(1.0, most_tokens / max(1, sum(len(row) for part in rows.values() for row in part)))
    taken = [(row, part) for part, own in rows.items() for row in own[: max(LEAST_PIECES, round(share * len(own)))]]
    left_out = len(pieces) - sum(map(len, rows.values()))
    return GeneralText(TokenRows.of([row for row, _ in taken]), tuple(part for _, part in taken), left_out)


def _letters(text: str) -> str:
    """Normalise what tokenizers change on purpose: white space, and the form and case of letters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
