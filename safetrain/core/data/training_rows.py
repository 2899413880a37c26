"""The rows that a training sees, as the token stores of data/validated have them. No tokenizer is loaded."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import open_split
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.windows import MOST_VALID_TOKENS, TokenWindows, TrainRows
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.records.schema import PRETRAIN

SAMPLED_ROWS = 2**16  # that are looked at for chats among documents


@dataclass(frozen=True)
class TrainingRows:
    """The rows to train and to validate on, hashes of them, and what they teach about answers."""

    train: TrainRows
    valid: TokenRows
    train_digest: str = ""  # of all rows of the store, whole
    valid_digest: str = ""
    prompt_format: PromptFormat | None = None
    valid_rows_available: int = 0
    valid_label_bytes: float = 0.0  # UTF-8 bytes of a label of all that is validated on, on average; 0: not known

    @property
    def bits_per_byte_of_nat(self) -> float:
        """1 nat per label of validation, in bits per byte of its text; 0: not known."""
        return 1 / (math.log(2) * self.valid_label_bytes) if self.valid_label_bytes else 0.0

    def in_windows(self, tokens: int) -> "TrainingRows":
        """Return the rows as windows of ``tokens``, for training from scratch, with a sample to validate on."""
        ends = frozenset(self.prompt_format.stop_ids if self.prompt_format else ())
        train, valid = (TokenWindows(rows, tokens, ends) for rows in (self.train.documents, self.valid))
        return dataclasses.replace(self, train=train, valid=valid.some(MOST_VALID_TOKENS))

    def cut(self, tokens: int, beat: Callable[[], None] = lambda: None) -> "TrainingRows":
        """Return the rows, each cut to ``tokens``, with a sample of at most MOST_VALID_TOKENS to validate on."""
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
    """The first ``max_examples`` rows to train on and those to validate on, cut to ``max_seq_length`` tokens if given.

    With ``method`` pretrain they are windows of that length instead.

    Raises ConfigError where they are missing, or made with another tokenizer than that of ``base``; DataError where
    they are damaged. ``beat`` is called as ``TokenRows.cut`` does.
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
    """The rows that a training of ``base`` validates on, cut as there; raises ConfigError and DataError as above."""
    rows = open_split("valid", base).rows.cut(max_seq_length)
    return rows.take(rows.sample(MOST_VALID_TOKENS))


def _documents_alone(rows: TokenRows) -> bool:
    """Whether all tokens are labels, as of no chat, in rows from all over."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).round().astype(np.int64)
    return bool(np.all(rows.label_counts[some] >= rows.lengths[some] - 1))
