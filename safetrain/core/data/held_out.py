"""What an evaluation reads: the test rows, their questions, and a general text on which forgetting is measured.

Neither training nor the choice of the adapter uses the test rows. The general text is included with safetrain: 60 short
pieces, written for this project and under its licence: 24 paragraphs in English, 24 in Portuguese (everyday knowledge,
stories, instructions), 12 pieces of code in as many languages.
"""

import dataclasses
import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Store
from safetrain.core.data.token_rows import MOST_VALID_TOKENS, Question, TokenRow, TokenRows, TokenWindows, token_row
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.formatting import counted
from safetrain.core.records.schema import PRETRAIN

FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer the part is not measured
MOST_TOKENS, SHORT_TOKENS = 256, 32  # of a piece: usually none has as many; the limit in a short measurement


@dataclass(frozen=True)
class HeldOut:
    """The test rows and questions on which the tuned model is compared with its base."""

    rows: TokenRows  # truncated as in training; the pieces of windows after pretraining on documents
    questions: tuple[Question, ...]
    stop_ids: frozenset[int]
    where: Callable[[int], str]  # file:line of a row
    rows_available: int  # ``rows`` may be an evenly spaced sample of them
    questions_available: int

    def remarks(self, max_seq_length: int, max_new_tokens: int) -> list[str]:
        """Remarks about truncated rows and expected answers."""
        texts = []
        if self.rows.cut_rows:
            texts.append(
                f"{counted(self.rows.cut_rows, 'test row')} truncated to {max_seq_length} tokens as in training"
            )
        longest = max((len(question.answer) for question in self.questions), default=0)
        if longest > max_new_tokens:
            texts.append(f"warning: expected answers have up to {longest} tokens; evaluate.max_new_tokens cuts them")
        return texts


def held_out_in(
    store: Store,
    max_examples: int | None,
    max_seq_length: int,
    method: str = "lora",
    most_tokens: int | None = None,
) -> HeldOut:
    """The first ``max_examples`` rows of a store, truncated, with their questions, for a model trained by ``method``.

    ``max_examples`` None: all rows, or evenly spaced ones with ``most_tokens`` tokens in all.
    """
    most_tokens = most_tokens if max_examples is None else None
    first, ends = store.rows[:max_examples], frozenset(store.made.stop_ids)
    if method == PRETRAIN and not len(store.questions):
        windows = TokenWindows(first, max_seq_length, ends)
        rows = windows.some(min(MOST_VALID_TOKENS, most_tokens or MOST_VALID_TOKENS))
        return HeldOut(rows, (), ends, store.where, len(rows), 0)
    cut = first.cut(max_seq_length)
    sample = np.arange(len(cut)) if most_tokens is None else cut.sample(most_tokens)
    rows = cut.take(sample)
    rows.cut_rows = int(np.count_nonzero(first.lengths[sample] > max_seq_length))
    place = {int(row): index for index, row in enumerate(sample)}
    chosen = (store.questions[number] for number in np.flatnonzero(np.isin(store.questions.rows, sample)).tolist())
    questions = tuple(dataclasses.replace(question, row=place[question.row]) for question in chosen)
    available = int(np.count_nonzero(store.questions.rows < len(cut)))
    return HeldOut(rows, questions, ends, lambda row: store.where(int(sample[row])), len(cut), available)


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
