"""Rows as tokens: views into arrays that may lie on the disk, never Python objects for each row."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row. ``trained[i]`` says whether token ``ids[i]`` is a label; (tokens,) uint32 and bool."""

    ids: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """How many labels the row gives. The first token of a row has nothing before it and is never one."""
        return int(np.count_nonzero(self.trained[1:]))


def token_row(ids: Sequence[int], trained: Sequence[bool]) -> TokenRow:
    """A row from plain lists."""
    return TokenRow(np.array(ids, dtype=np.uint32), np.array(trained, dtype=np.bool_))


@dataclass(frozen=True)
class Question:
    """A prompt to continue and the expected answer as ids, the row they are of, and what was asked, as text."""

    row: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # its closing token too
    text: str


class TokenRows(Sequence[TokenRow]):
    """The rows of a split. Lengths and label counts are arrays, computed once; tokens are read where they are asked."""

    def __init__(self, ids: np.ndarray, trained: np.ndarray, row_ends: np.ndarray, label_counts: np.ndarray) -> None:
        """``ids`` and ``trained`` (tokens,), ``row_ends`` and ``label_counts`` (rows,)."""
        self._ids, self._trained = ids, trained
        ends = row_ends.astype(np.int64)
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]) if len(ends) else ends
        self.lengths = (ends - self._starts).astype(np.int64)  # (rows,) tokens of each
        self.label_counts = label_counts.astype(np.int64)  # (rows,) labels of each
        self.cut_rows, self.lost_labels = 0, 0  # by ``cut``

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> "TokenRows":
        """Rows that are in memory already."""
        ids = np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, dtype=np.uint32)
        trained = np.concatenate([row.trained for row in rows]) if rows else np.zeros(0, dtype=np.bool_)
        ends, labels = np.cumsum([len(row) for row in rows]), np.array([row.trained_tokens for row in rows])
        return cls(ids, trained, ends.astype(np.int64), labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenRows": ...
    def __getitem__(self, index: int | slice) -> "TokenRow | TokenRows":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        place = range(len(self))[index]
        part = slice(int(self._starts[place]), int(self._starts[place] + self.lengths[place]))
        return TokenRow(self._ids[part], self._trained[part])

    def take(self, rows: Sequence[int] | np.ndarray) -> "TokenRows":
        """These rows, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return self._with(self._starts[chosen], self.lengths[chosen], self.label_counts[chosen])

    def cut(self, max_seq_length: int) -> "TokenRows":
        """Each row's first ``max_seq_length`` tokens; where these hold no label, that many around the first label."""
        starts, lengths, labels = self._starts.copy(), self.lengths.copy(), self.label_counts.copy()
        long = np.flatnonzero(lengths > max_seq_length)
        for row in long.tolist():
            trained = self._trained[starts[row] : starts[row] + lengths[row]]
            begin = 0
            if not trained[1:max_seq_length].any():
                begin = 1 + int(np.argmax(trained[1:])) - max_seq_length // 2
            part = trained[begin : begin + max_seq_length]
            starts[row] += begin
            lengths[row], labels[row] = len(part), np.count_nonzero(part[1:])
        found = self._with(starts, lengths, labels)
        found.cut_rows, found.lost_labels = len(long), int(self.label_counts.sum() - labels.sum())
        return found

    @functools.cached_property
    def longest(self) -> int:
        """Index of the longest row, the first of equals."""
        return int(self.lengths.argmax())

    @property
    def inputs(self) -> np.ndarray:
        """(rows,) tokens of each row that the model reads: all but the last, which is only predicted."""
        return self.lengths - 1

    def _with(self, starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> "TokenRows":
        found = TokenRows(self._ids, self._trained, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        found._starts, found.lengths, found.label_counts = starts, lengths, labels
        return found
