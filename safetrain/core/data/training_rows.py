"""Loads training and validation rows from the token stores of data/validated, without a tokenizer."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import open_split
from safetrain.core.data.token_rows import MOST_VALID_TOKENS, TokenRows, TokenWindows, TrainRows
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.records.schema import PRETRAIN

SAMPLED_ROWS = 2**16  # rows to search for chats among documents


@dataclass(frozen=True)
class TrainingRows:
    """The training and validation rows, their hashes, and the prompt format that training teaches."""

    train: TrainRows
    valid: TokenRows
    train_digest: str = ""  # of all rows of the store, before truncation
    valid_digest: str = ""
    prompt_format: PromptFormat | None = None
    valid_rows_available: int = 0
    valid_label_bytes: float = 0.0  # mean UTF-8 bytes of a validation label; 0: unknown

    @property
    def bits_per_byte_of_nat(self) -> float:
        """Bits per byte for 1 nat per validation label; 0: unknown."""
        return 1 / (math.log(2) * self.valid_label_bytes) if self.valid_label_bytes else 0.0

    def in_windows(self, tokens: int) -> "TrainingRows":
        """The rows as windows of ``tokens``, for pretraining, with a sample of the validation rows."""
        ends = frozenset(self.prompt_format.stop_ids if self.prompt_format else ())
        train, valid = (TokenWindows(rows, tokens, ends) for rows in (self.train.documents, self.valid))
        return dataclasses.replace(self, train=train, valid=valid.some(MOST_VALID_TOKENS))

    def cut(self, tokens: int, beat: Callable[[], None] = lambda: None) -> "TrainingRows":
        """The rows truncated to ``tokens``, with at most MOST_VALID_TOKENS of the validation rows."""
        train, valid = (rows.cut(tokens, beat) for rows in (self.train.documents, self.valid))
        return dataclasses.replace(self, train=train, valid=valid.take(valid.sample(MOST_VALID_TOKENS)))


def load_training_rows(
    base: Path,
    max_examples: int | None,
    max_seq_length: int | None = None,
    beat: Callable[[], None] = lambda: None,
    *,
    method: str = "lora",
) -> TrainingRows:
    """Load the first ``max_examples`` training rows and the validation rows, truncated to ``max_seq_length`` if given.

    With ``method`` pretrain they are windows of that length instead. Raises ConfigError if they are missing or were
    made with a tokenizer other than that of ``base``, DataError if they are damaged. ``beat``: see ``TokenRows.cut``.
    """
    train, valid = open_split("train", base), open_split("valid", base)
    made = train.made
    documents = method == PRETRAIN and _documents_alone(train.rows)
    form = PromptFormat(made.stop_ids, made.opening, made.asked, made.system, documents)
    some = train.rows if max_examples is None else train.rows[:max_examples]
    result = TrainingRows(some, valid.rows, train.digest, valid.digest, form, len(valid.rows), valid.label_bytes)
    if max_seq_length is None:
        return result
    return result.in_windows(max_seq_length) if method == PRETRAIN else result.cut(max_seq_length, beat)


def load_valid_rows(base: Path, max_seq_length: int) -> TokenRows:
    """Load the validation rows of a training of ``base``, truncated as there; raises ConfigError, DataError."""
    rows = open_split("valid", base).rows.cut(max_seq_length)
    return rows.take(rows.sample(MOST_VALID_TOKENS))


def _documents_alone(rows: TokenRows) -> bool:
    """Whether a sample of rows has only labels, so that none is a chat."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).round().astype(np.int64)
    return bool(np.all(rows.label_counts[some] >= rows.lengths[some] - 1))
