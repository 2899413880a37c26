"""The rows that training and evaluation read from the token stores of data/validated, and their order.

The order is a function of seed and epoch. Within an update, rows are sorted, the longest first, and divided into
micro-batches with a limit on tokens. So a micro-batch has at most as many tokens as ``batch_size`` of the longest rows,
and at most the rows of its update.

Evaluation reads the test rows, which neither training nor the choice of the adapter uses.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Store, open_split
from safetrain.core.data.token_rows import (
    MOST_VALID_TOKENS,
    Question,
    TokenRows,
    TokenWindows,
    TrainRows,
    UpdateRows,
)
from safetrain.core.formatting import counted
from safetrain.core.memory.terms import padded
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.records.schema import PRETRAIN
from safetrain.core.records.settings import LargestUpdate, total_updates, updates_per_epoch

SEEDS = (42, *range(7))  # params.yaml's and seven more: other seeds hardly ever give a larger update
MOST_EPOCHS = 20  # epochs to search: later ones hardly ever have a larger update


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
    made, rows = train.made, train.rows[:max_examples]
    documents = method == PRETRAIN and bool(np.all(rows.label_counts >= rows.lengths - 1))  # labels alone, no chats
    form = PromptFormat(made.stop_ids, made.opening, made.asked, made.system, documents)
    result = TrainingRows(rows, valid.rows, train.digest, valid.digest, form, len(valid.rows), valid.label_bytes)
    if max_seq_length is None:
        return result
    return result.in_windows(max_seq_length) if method == PRETRAIN else result.cut(max_seq_length, beat)


def load_valid_rows(base: Path, max_seq_length: int) -> TokenRows:
    """Load the validation rows of a training of ``base``, truncated as there; raises ConfigError, DataError."""
    rows = open_split("valid", base).rows.cut(max_seq_length)
    return rows.take(rows.sample(MOST_VALID_TOKENS))


# Their order


@dataclass(frozen=True)
class Cursor:
    """The position in the data: the next update is number ``window`` of ``epoch``, both from 0."""

    epoch: int
    window: int


def largest_update(
    data: TrainRows,
    valid: TokenRows,
    rows_per_update: int,
    num_epochs: int,
    max_steps: int | None,
    seeds: Sequence[int] = SEEDS,
    *,
    rectangles: bool = False,
) -> LargestUpdate:
    """The most rows, tokens and labels in any update of a run, over the orders of several ``seeds``.

    ``longest`` includes the validation rows. ``rectangles``: rows are padded to the longest of them.
    """
    if isinstance(data, TokenWindows):  # all updates are equal
        tokens = min(rows_per_update, len(data)) * int(data.inputs().max())
        longest = max(int(data.inputs().max()), int(valid.lengths.max(initial=1)) - 1)
        return LargestUpdate(rows_per_update, longest, tokens, tokens)
    windows = _windows(data, rows_per_update, num_epochs, max_steps, seeds)
    longest = max(int(rows.lengths[rows.longest]) - 1 for rows in (data, valid) if len(rows))
    return LargestUpdate(
        rows_per_update,
        longest,
        rows_per_update * padded(longest) if rectangles else max(tokens for _, tokens, _ in windows),
        max(labels for _, _, labels in windows),
    )


def largest_windows(
    data: TrainRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int] = SEEDS
) -> list[UpdateRows]:
    """The rows of the update with most tokens, and of the update with most labels if it is a different one.

    Empty for TokenWindows, whose updates are all equally large.
    """
    if isinstance(data, TokenWindows):
        return []
    windows = _windows(data, rows_per_update, num_epochs, max_steps, seeds)
    most = [max(windows, key=lambda window: window[place])[0] for place in (1, 2)]
    return [data.of_update(rows) for rows in (most if most[0] != most[1] else most[:1])]


def _windows(
    data: TokenRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int]
) -> list[tuple[list[int], int, int]]:
    """The updates with most tokens and most labels, for each order and epoch: their rows, tokens and labels."""
    tokens, labels = data.inputs(), data.label_counts
    remaining, windows = total_updates(len(data), rows_per_update, num_epochs, max_steps), []
    for epoch in range(min(num_epochs, MOST_EPOCHS)):
        updates = min(remaining - epoch * updates_per_epoch(len(data), rows_per_update), len(data))
        for seed in seeds if updates > 0 else ():
            order = row_order(seed, epoch, len(data), data.longest)[: updates * rows_per_update]
            starts = range(0, len(order), rows_per_update)
            sums = [np.add.reduceat(sizes[order], starts) for sizes in (tokens, labels)]
            for place in {int(each.argmax()) for each in sums}:
                rows = order[place * rows_per_update : (place + 1) * rows_per_update].tolist()
                windows.append((rows, int(sums[0][place]), int(sums[1][place])))
    return windows


def rows_at(data: TrainRows, cursor: Cursor, seed: int, rows_per_update: int) -> UpdateRows:
    """The rows of an update, or the pieces of its windows, the longest first.

    The first update of an epoch has the longest row of all, so a shape that does not fit fails at once.
    """
    order, first = row_order(seed, cursor.epoch, len(data), data.longest), cursor.window * rows_per_update
    return data.of_update(order[first : first + rows_per_update])


@functools.lru_cache(maxsize=1)  # only the current epoch's: 4 bytes a row
def row_order(seed: int, epoch: int, rows: int, longest: int) -> np.ndarray:
    """A random order of the rows for an epoch, except that the longest row is first."""
    order = np.random.default_rng([seed, epoch]).permutation(rows).astype(np.uint32)
    place = int(np.flatnonzero(order == longest)[0])
    order[[0, place]] = order[[place, 0]]
    return order


def order_fingerprint() -> str:
    """A fingerprint of numpy's shuffling: versions of numpy with the same one can resume each other's runs."""
    return hashlib.blake2b(row_order(1, 2, 4096, 0).tobytes(), digest_size=8).hexdigest()


def advance(cursor: Cursor, rows: int, rows_per_update: int) -> Cursor:
    """The cursor after one update."""
    if cursor.window + 1 < updates_per_epoch(rows, rows_per_update):
        return Cursor(cursor.epoch, cursor.window + 1)
    return Cursor(cursor.epoch + 1, 0)


# Rows of an evaluation


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
        cut, longest = self.rows.cut_rows, max((len(question.answer) for question in self.questions), default=0)
        texts = [f"{counted(cut, 'test row')} truncated to {max_seq_length} tokens as in training"] if cut else []
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
