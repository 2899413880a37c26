"""Tokenized rows: views into arrays that may be on the disk, without a Python object for each row.

In pretraining, TokenWindows cut documents into rows of equal length.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safetrain.core.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row: ``ids`` (uint32) and ``trained`` (bool: whether each token is a label) have shape (tokens,)."""

    ids: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> int:
        """The number of labels. A row's first token is never a label, because no token before it predicts it."""
        return int(np.count_nonzero(self.trained[1:]))


def token_row(ids: Sequence[int], trained: Sequence[bool]) -> TokenRow:
    return TokenRow(np.array(ids, dtype=np.uint32), np.array(trained, dtype=np.bool_))


@dataclass(frozen=True)
class Question:
    """A prompt and the expected answer as ids, the index of their row, and the question as text."""

    row: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # with its stop token
    text: str


class TokenRows:
    """The rows of a split. Lengths and label counts are in memory; tokens are read when they are needed."""

    def __init__(
        self, ids: Any, trained: Any, starts: np.ndarray, lengths: np.ndarray, label_counts: np.ndarray,
        numbers: np.ndarray | None = None, rows_per_pair: int = 1,
    ) -> None:  # fmt: skip
        """``ids`` and ``trained`` have shape (tokens,): arrays, or numbers that slicing reads from a file.

        The others have shape (rows,): each row's start, length and label count.

        ``numbers``: row numbers to show in messages; None: the indices. ``rows_per_pair`` is 2 for preference data: two
        rows in sequence, prompt with chosen and prompt with rejected answer, are a pair, stay together and have one
        number.
        """
        self.ids, self.trained, self._numbers, self.rows_per_pair = ids, trained, numbers, rows_per_pair
        self.starts = starts.astype(np.int64, copy=False)
        self.lengths = lengths.astype(np.int32, copy=False)
        self.label_counts = label_counts.astype(np.int32, copy=False)
        self.cut_rows, self.lost_labels = 0, 0  # by ``cut``
        self.references: np.ndarray | None = None  # (rows,) log-probabilities by DPO's reference model, float32

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> "TokenRows":
        """Join single rows that are in memory."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, dtype=np.uint32), *(row.ids for row in rows)])
        trained = np.concatenate([np.zeros(0, dtype=np.bool_), *(row.trained for row in rows)])
        labels = np.array([row.labels for row in rows], dtype=np.int64)
        return cls(ids, trained, np.cumsum(lengths) - lengths, lengths, labels)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> TokenRow:
        start, length = int(self.starts[row]), int(self.lengths[row])
        return TokenRow(self.ids[start : start + length], self.trained[start : start + length])

    def __iter__(self) -> Iterator[TokenRow]:
        return map(self.__getitem__, range(len(self)))

    @property
    def documents(self) -> "TokenRows":
        """The rows themselves; TokenWindows are cut from them."""
        return self

    def numbers(self, rows: Sequence[int] | np.ndarray) -> list[int]:
        """The numbers that messages show for these rows."""
        places = np.asarray(rows, dtype=np.int64)
        return (places // self.rows_per_pair if self._numbers is None else self._numbers[places]).tolist()

    def of_update(self, rows: Sequence[int] | np.ndarray) -> "UpdateRows":
        """The rows of an update, the longest first; equally long rows by index."""
        places = np.asarray(rows, dtype=np.int64)
        return UpdateRows(self, places[np.lexsort((places, -self.lengths[places]))].tolist())

    def take(self, rows: Sequence[int] | np.ndarray | slice) -> "TokenRows":
        """A selection of rows, in this order."""
        places = rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
        chosen = self.starts[places], self.lengths[places], self.label_counts[places]
        taken = TokenRows(self.ids, self.trained, *chosen, rows_per_pair=self.rows_per_pair)
        taken.references = None if self.references is None else self.references[places]
        return taken

    def sample(self, most_tokens: int) -> np.ndarray:
        """Indices of all rows, or of evenly spaced rows (or pairs) with about ``most_tokens`` tokens in all."""
        units = len(self) // self.rows_per_pair
        return self.rows_of(evenly_spaced(max(1, units * most_tokens // max(1, self.tokens)), units))

    def rows_of(self, units: np.ndarray) -> np.ndarray:
        """Indices of the rows of these pairs, (pairs x 2,); rows that are not pairs stay as they are."""
        return (units[:, None] * self.rows_per_pair + np.arange(self.rows_per_pair, dtype=units.dtype)).reshape(-1)

    def first(self, count: int | None) -> "TokenRows":
        """The first ``count`` rows or pairs; None: all."""
        return self.take(slice(None if count is None else count * self.rows_per_pair))

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """The reference's log-probabilities of these rows, (rows,) float32; zeros if there are none."""
        return np.zeros(len(rows), dtype=np.float32) if self.references is None else self.references[rows]

    def cut(self, max_seq_length: int) -> "TokenRows":
        """Truncate rows to the first ``max_seq_length`` tokens, or to those around the first label if more are labels
        (in pairs, whose rows keep the same prompt, only if the first ones have no label).
        """
        starts, lengths, labels = self.starts.copy(), self.lengths.copy(), self.label_counts.copy()
        long = np.flatnonzero(lengths > max_seq_length)
        for row in long.tolist():
            trained = self.trained[starts[row] + 1 : starts[row] + lengths[row]]
            later = max(0, 1 + int(trained.argmax()) - max_seq_length // 2)
            first, moved = (int(np.count_nonzero(trained[at : at + max_seq_length - 1])) for at in (0, later))
            begin = later if moved > first and not (first and self.rows_per_pair > 1) else 0
            starts[row] += begin
            lengths[row] = min(lengths[row] - begin, max_seq_length)
            labels[row] = moved if begin else first
        shorter = TokenRows(self.ids, self.trained, starts, lengths, labels, rows_per_pair=self.rows_per_pair)
        shorter.cut_rows = len(long)
        shorter.lost_labels = int(self.label_counts.sum(dtype=np.int64) - labels.sum(dtype=np.int64))
        return shorter

    @functools.cached_property
    def longest(self) -> int:
        """Index of the longest row; the first one if several are equally long."""
        return int(self.lengths.argmax())

    @functools.cached_property
    def by_length(self) -> np.ndarray:
        """Indices of the rows, the longest first; equally long rows stay in order. Shape (rows,)."""
        return np.argsort(-self.lengths, kind="stable").astype(np.uint32)

    @property
    def tokens(self) -> int:
        """The number of tokens that the model reads from all rows."""
        return int(self.inputs().sum(dtype=np.int64))

    def inputs(self, rows: Sequence[int] | np.ndarray | slice = slice(None)) -> np.ndarray:
        """Number of tokens that the model reads in each row, (rows,): all except the last, which is only predicted."""
        return self.lengths[rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)] - 1


def evenly_spaced(count: int, size: int) -> np.ndarray:
    """At most ``count`` evenly spaced indices from 0 to ``size`` - 1; shape (indices,)."""
    return np.linspace(0, size - 1, min(count, size)).round().astype(np.int64)


@dataclass(frozen=True)
class UpdateRows:
    """The rows of an update, the longest first, as indices into ``data``."""

    data: TokenRows
    rows: list[int]


class TokenWindows:
    """A stream of documents cut into windows of equal length, for pretraining: no token is lost.

    The model reads a fixed number of tokens from a window, and predicts the one after each. Windows are adjacent, so
    every token except the very first is predicted exactly once. Attention stays inside a document: a window is divided
    into pieces, each a separate row whose positions count from 0. A document's first token is predicted from the end
    token of the previous document; if there is none, the first token is not predicted.
    """

    longest = 0  # index of the longest window: all are equally long
    cut_rows = lost_labels = 0

    def __init__(self, documents: TokenRows, tokens: int, end_ids: frozenset[int]) -> None:
        """``documents`` are consecutive; ``tokens``: model inputs per window; ``end_ids``: ids that end a document.

        Raises DataError if they have fewer than two tokens in all.
        """
        self.documents, self.tokens, self._end_ids = documents, tokens, np.array(sorted(end_ids), dtype=np.uint32)
        self._first = int(documents.starts[0]) if len(documents) else 0
        self._last = self._first + int(documents.lengths.sum(dtype=np.int64)) - 1
        if self._last <= self._first:
            got = str(self._last + 1 - self._first)
            raise DataError("There is nothing to train on.", expected="at least two tokens", got=got)

    def __len__(self) -> int:
        return -(-(self._last - self._first) // self.tokens)

    def inputs(self) -> np.ndarray:
        """Number of tokens that the model reads from each window, (windows,): equal for all except the last."""
        sizes = np.full(len(self), self.tokens, dtype=np.int32)
        sizes[-1] = self._last - self._first - (len(self) - 1) * self.tokens
        return sizes

    @property
    def label_counts(self) -> np.ndarray:
        """The most labels that each window can have; (windows,)."""
        return self.inputs()

    def of_update(self, windows: Sequence[int] | np.ndarray) -> UpdateRows:
        """The pieces of an update's windows, the longest first."""
        pieces = self.pieces(windows)
        return UpdateRows(pieces, pieces.by_length.tolist())

    def pieces(self, windows: Sequence[int] | np.ndarray) -> TokenRows:
        """Divide windows into rows, each with the number of its document. Each window is read once."""
        places, read, size = list[np.ndarray](), list[tuple[np.ndarray, np.ndarray]](), 0
        for window in windows:
            begin = self._first + int(window) * self.tokens
            some = slice(begin, min(begin + self.tokens, self._last) + 1)
            read.append((self.documents.ids[some], self.documents.trained[some]))
            places.append(self._pieces_of(begin, read[-1][0]) + np.array([[size], [size], [0]]))
            size += len(read[-1][0])
        begins, ends, numbers = np.concatenate(places, axis=1)
        ids, trained = map(np.concatenate, zip(*read, strict=True))
        labels = [np.count_nonzero(trained[begin + 1 : end]) for begin, end in zip(begins, ends, strict=True)]
        return TokenRows(ids, trained, begins, ends - begins, np.array(labels, dtype=np.int32), numbers)

    def some(self, most_tokens: int) -> TokenRows:
        """The pieces of evenly spaced windows with at most ``most_tokens`` tokens in all; at least one window."""
        return self.pieces(evenly_spaced(max(1, most_tokens // self.tokens), len(self)))

    def _pieces_of(self, begin: int, ids: np.ndarray) -> np.ndarray:
        """Begin and end in ``ids`` of each piece of a window, and its document's number; (3, pieces).

        ``begin``: the window's first token. The last token of a piece is only predicted.
        """
        first, last = np.searchsorted(self.documents.starts, (begin, begin + len(ids) - 1), side="right")
        borders = self.documents.starts[first:last] - begin  # between documents
        are_closed = np.isin(ids[borders - 1], self._end_ids)
        begins, ends = np.append(0, borders - are_closed), np.append(borders, len(ids))
        return np.stack([begins, ends, np.arange(first - 1, last)])[:, ends - begins > 1]


TrainRows = TokenRows | TokenWindows
