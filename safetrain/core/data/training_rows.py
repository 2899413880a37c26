"""The rows that training and evaluation read from the token stores of data/validated, and their order.

The order is a function of seed and epoch. Within an update, rows are sorted, the longest first, and divided into
micro-batches with a limit on tokens. So a micro-batch has at most as many tokens as ``batch_size`` rows of the longest
length, and no rows from another update.

Evaluation reads the test rows, which neither training nor the choice of the adapter uses.
"""

import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Store, open_split
from safetrain.core.data.token_rows import Question, TokenRows, TokenWindows, TrainRows, UpdateRows
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted
from safetrain.core.memory.terms import width_of
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.records.schema import PAIRED, PRETRAIN
from safetrain.core.records.settings import MOST_VALID_TOKENS, Shape, total_updates, updates_per_epoch

SEEDS = (42, *range(7))  # params.yaml's and seven more: other seeds hardly ever give a larger update
LEAST_ANSWER, MOST_ANSWER = 16, 4096  # tokens
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
    bits_per_byte_of_nat: float = 0.0  # 1 nat per validation label in bits per byte of text; 0: unknown

    def at_length(self, tokens: int, method: str, valid_tokens: int = MOST_VALID_TOKENS) -> "TrainingRows":
        """The rows truncated to ``tokens``, or windows of that length for pretraining.

        The validation rows are a sample of at most ``valid_tokens``.
        """
        train, valid = self.train.documents, self.valid
        self.require_rows_for(method)
        if method != PRETRAIN:
            return dataclasses.replace(self, train=train.cut(tokens), valid=_sampled(valid.cut(tokens), valid_tokens))
        ends = frozenset(self.prompt_format.stop_ids if self.prompt_format else ())
        measured = TokenWindows(valid, tokens, ends).some(valid_tokens)
        return dataclasses.replace(self, train=TokenWindows(train, tokens, ends), valid=measured)

    def require_rows_for(self, method: str) -> None:
        """Raise ConfigError if ``method`` trains on pairs and these rows are not pairs, or the other way round."""
        if (self.train.documents.rows_per_pair == 2) != (method in PAIRED):
            expected, got = "pairs of answers (prompt, chosen, rejected)", "rows with one answer"
            expected, got = (expected, got) if method in PAIRED else (got, expected)
            do = f"set train.method to {'lora' if method in PAIRED else ' or '.join(PAIRED)}, or use other data"
            raise ConfigError(f"train.method={method} cannot use this data.", expected=expected, got=got, do=do)


def load_training_rows(base: Path, max_examples: int | None, method: str = "lora") -> TrainingRows:
    """Load the first ``max_examples`` training rows and the validation rows, in full length.

    Raises ConfigError if they are missing or were made with a tokenizer other than that of ``base``, DataError if they
    are damaged.
    """
    train, valid = open_split("train", base), open_split("valid", base)
    made, rows = train.made, train.rows.first(max_examples)
    documents = method == PRETRAIN and bool(np.all(rows.label_counts >= rows.lengths - 1))  # not chats
    form = PromptFormat(made.stop_ids, made.opening, made.asked, made.system, documents)
    bits = 1 / (math.log(2) * valid.label_bytes) if valid.label_bytes else 0.0
    return TrainingRows(rows, valid.rows, train.digest, valid.digest, form, len(valid.rows), bits)


def load_sample(split: str, base: Path, max_seq_length: int, tokens: int = MOST_VALID_TOKENS) -> TokenRows:
    """Load rows of a split for ``base``, truncated as in training: all, or evenly spaced ones of about ``tokens``.

    Raises ConfigError, DataError.
    """
    return _sampled(open_split(split, base).rows.cut(max_seq_length), tokens)


def _sampled(valid: TokenRows, tokens: int) -> TokenRows:
    return valid.take(valid.sample(tokens))


# The order of rows


@dataclass(frozen=True)
class Cursor:
    """The position in the data: the next update is number ``step_in_epoch`` of ``epoch``, both from 0."""

    epoch: int
    step_in_epoch: int


def largest_update(
    data: TrainRows, valid: TokenRows, rows_per_update: int, num_epochs: int, max_steps: int | None,
    seeds: Sequence[int] = SEEDS, *, rectangles: bool = False,
) -> Shape:  # fmt: skip
    """The most rows, tokens and labels in any update of a run, over the orders of several ``seeds``.

    ``longest`` includes the validation rows. ``rectangles``: rows are padded to the longest of them.
    """
    longest = max(int(rows.inputs().max(initial=0)) for rows in (data, valid))
    if isinstance(data, TokenWindows):  # all updates are equal
        tokens = labels = min(rows_per_update, len(data)) * int(data.inputs().max())
    else:
        (tokens, _), (labels, _) = _largest(data, rows_per_update, num_epochs, max_steps, seeds)
        tokens = rows_per_update * width_of(longest, rectangles=True) if rectangles else tokens
    return Shape(rows_per_update, longest, tokens, labels)


def largest_update_rows(
    data: TrainRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int] = SEEDS
) -> list[UpdateRows]:
    """The rows of the update with most tokens, and of the update with most labels if it is a different one.

    Empty for TokenWindows, whose updates are all equally large.
    """
    if isinstance(data, TokenWindows):
        return []
    (_, first), (_, second) = _largest(data, rows_per_update, num_epochs, max_steps, seeds)
    return [data.of_update(rows) for rows in ([first] if first == second else [first, second])]


def _largest(
    data: TokenRows, rows_per_update: int, num_epochs: int, max_steps: int | None, seeds: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """The most tokens and the most labels in any update, over all orders and epochs, each with the update's rows."""
    most, sizes = [(-1, list[int]()), (-1, list[int]())], (data.inputs(), data.label_counts)
    remaining = total_updates(len(data), rows_per_update, num_epochs, max_steps)
    for epoch in range(min(num_epochs, MOST_EPOCHS)):
        updates = min(remaining - epoch * updates_per_epoch(len(data), rows_per_update), len(data))
        for seed in seeds if updates > 0 else ():
            order = row_order(seed, epoch, len(data), data.longest, data.rows_per_pair)[: updates * rows_per_update]
            for kind, each in enumerate(sizes):
                sums = np.add.reduceat(each[order], range(0, len(order), rows_per_update))
                place = int(sums.argmax())
                if sums[place] > most[kind][0]:
                    rows = order[place * rows_per_update : (place + 1) * rows_per_update]
                    most[kind] = int(sums[place]), rows.tolist()
    return most


def rows_at(data: TrainRows, cursor: Cursor, seed: int, rows_per_update: int) -> UpdateRows:
    """The rows of an update, or the pieces of its windows, the longest first.

    The first update of an epoch has the longest row of all, so a shape that does not fit in memory fails at once.
    """
    order = row_order(seed, cursor.epoch, len(data), data.longest, data.documents.rows_per_pair)
    first = cursor.step_in_epoch * rows_per_update
    return data.of_update(order[first : first + rows_per_update])


@functools.lru_cache(maxsize=1)  # only the current epoch's: 4 bytes a row
def row_order(seed: int, epoch: int, rows: int, longest: int, rows_per_pair: int = 1) -> np.ndarray:
    """A random order of the rows for an epoch, the longest row first. The rows of a pair stay together."""
    order = np.random.default_rng([seed, epoch]).permutation(rows // rows_per_pair).astype(np.uint32)
    place = int(np.flatnonzero(order == longest // rows_per_pair)[0])
    order[[0, place]] = order[[place, 0]]
    return (order[:, None] * rows_per_pair + np.arange(rows_per_pair, dtype=np.uint32)).reshape(-1)


def order_fingerprint() -> str:
    """A fingerprint of numpy's shuffling: numpy versions with equal fingerprints can resume each other's runs."""
    return hashlib.blake2b(row_order(1, 2, 4096, 0).tobytes(), digest_size=8).hexdigest()


def advance(cursor: Cursor, rows: int, rows_per_update: int) -> Cursor:
    if cursor.step_in_epoch + 1 < updates_per_epoch(rows, rows_per_update):
        return Cursor(cursor.epoch, cursor.step_in_epoch + 1)
    return Cursor(cursor.epoch + 1, 0)


# Rows of an evaluation


@dataclass(frozen=True)
class HeldOut:
    """The test rows and questions on which the tuned model is compared with its base."""

    rows: TokenRows  # truncated as in training; after pretraining on documents, the pieces of windows
    questions: tuple[Question, ...]
    stop_ids: frozenset[int]
    where: Callable[[int], str]  # file:line of a row
    line: Callable[[int], int]  # the line of data/validated that has a row, from 0
    rows_available: int  # ``rows`` may be an evenly spaced sample of them
    questions_available: int

    @property
    def answer_room(self) -> int:
        """Tokens for an answer: a quarter more than the longest expected one, in steps of 8."""
        longest = max((len(question.answer) for question in self.questions), default=0)
        return min(MOST_ANSWER, max(LEAST_ANSWER, -(-longest * 5 // 32) * 8))

    def remarks(self, max_seq_length: int, max_new_tokens: int) -> list[str]:
        """Remarks about truncated rows and expected answers."""
        cut, longest = self.rows.cut_rows, max((len(question.answer) for question in self.questions), default=0)
        texts = [f"{counted(cut, 'test row')} truncated to {max_seq_length} tokens as in training"] if cut else []
        if longest > max_new_tokens:
            texts.append(f"warning: expected answers have up to {longest} tokens; max_new_tokens is {max_new_tokens}")
        return texts


def held_out_in(
    store: Store, max_examples: int | None, max_seq_length: int, method: str = "lora", most_tokens: int = sys.maxsize
) -> HeldOut:
    """The first ``max_examples`` rows of a store, truncated, with their questions, for a model trained by ``method``.

    If ``max_examples`` is None: all rows, or evenly spaced ones with about ``most_tokens`` tokens in all.
    """
    first, ends = store.rows.first(max_examples), frozenset(store.made.stop_ids)
    most_tokens = sys.maxsize if max_examples is not None else most_tokens
    if method == PRETRAIN and not len(store.question_rows):
        rows = TokenWindows(first, max_seq_length, ends).some(min(MOST_VALID_TOKENS, most_tokens))
        return HeldOut(rows, (), ends, store.where, int, len(rows), 0)
    cut = first.cut(max_seq_length)
    sample = cut.sample(most_tokens)
    rows = cut.take(sample)
    rows.cut_rows = int(np.count_nonzero(first.lengths[sample] > max_seq_length))
    place = {int(row): index for index, row in enumerate(sample)}
    chosen = map(store.question, np.flatnonzero(np.isin(store.question_rows, sample)).tolist())
    questions = tuple(dataclasses.replace(question, row=place[question.row]) for question in chosen)
    available = int(np.count_nonzero(store.question_rows < len(first)))
    where, line = (lambda row: store.where(int(sample[row]))), (lambda row: store.line(int(sample[row])))
    return HeldOut(rows, questions, ends, where, line, len(first), available)
