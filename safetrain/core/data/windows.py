"""Cuts documents into windows of equal length, for pretraining: no token is lost.

The tokens of a split are one stream. A window feeds a fixed number of them and predicts the successor of each. The next
window begins where it ends, so every token except the very first is predicted exactly once. Attention stays inside a
document: a window is divided into pieces, each a separate row whose positions count from 0. A document's first token
is predicted from the end token of the document before; if that has none, the first token is not predicted.
"""

from collections.abc import Iterator

import numpy as np

from safetrain.core.data.token_rows import TokenRows, UpdateRows
from safetrain.core.errors import DataError

MOST_VALID_TOKENS = 2**17  # for validation: gives the loss to a hundredth in less than an hour
SAMPLED_WINDOWS = 2**10  # whose pieces are a sample of all, to choose row widths on a GPU


class TokenWindows:
    """A stream of documents cut into windows, which reads tokens when they are needed."""

    def __init__(self, documents: TokenRows, tokens: int, end_ids: frozenset[int]) -> None:
        """``documents`` are consecutive; ``tokens``: number that a window feeds; ``end_ids``: ids that end a document.

        Raises DataError for fewer than two tokens.
        """
        self.documents, self.tokens, self._end_ids = documents, tokens, np.array(sorted(end_ids), dtype=np.uint32)
        self._first = int(documents.starts[0]) if len(documents) else 0
        self._stream = int(documents.lengths.sum(dtype=np.int64))
        if self._stream < 2:
            raise DataError("There is nothing to train on.", expected="at least two tokens", got=str(self._stream))
        self.longest = 0  # index of the longest window: all are equally long
        self.cut_rows, self.lost_labels = 0, 0

    def __len__(self) -> int:
        return -(-(self._stream - 1) // self.tokens)

    def inputs(self) -> np.ndarray:
        """The number of tokens that each window feeds, (windows,): all are equal except the last."""
        sizes = np.full(len(self), self.tokens, dtype=np.int32)
        sizes[-1] = self._stream - 1 - (len(self) - 1) * self.tokens
        return sizes

    @property
    def label_counts(self) -> np.ndarray:
        """The most labels that each window can have; (windows,)."""
        return self.inputs()

    def shapes(self) -> np.ndarray:
        """A sample of row lengths: the pieces of evenly spaced windows, and one whole window."""
        some = np.linspace(0, len(self) - 1, min(len(self), SAMPLED_WINDOWS)).round().astype(np.int64)
        return np.append(self.pieces(some).inputs(), self.tokens)

    def of_update(self, windows: np.ndarray | list[int]) -> UpdateRows:
        """The pieces of an update's windows, the longest first."""
        pieces = self.pieces(windows)
        return UpdateRows(pieces, pieces.by_length.tolist())

    def pieces(self, windows: np.ndarray | list[int]) -> TokenRows:
        """Divide windows into rows; each has the number of its document."""
        pieces = [piece for window in windows for piece in self._pieces_of(int(window))]
        starts, stops, numbers = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        return self.documents.stretches(starts, stops - starts, numbers)

    def some(self, most_tokens: int) -> TokenRows:
        """The pieces of evenly spaced windows with at most ``most_tokens`` tokens in all; at least one window."""
        count = max(1, min(len(self), most_tokens // self.tokens))
        return self.pieces(np.linspace(0, len(self) - 1, count).round().astype(np.int64))

    def _pieces_of(self, window: int) -> Iterator[tuple[int, int, int]]:
        """Yield begin and end of each piece (its last token is only predicted), and its document."""
        begin = self._first + window * self.tokens
        last = min(begin + self.tokens, self._first + self._stream - 1)  # index of the last predicted token
        starts = self.documents.starts
        document = int(np.searchsorted(starts, begin, side="right")) - 1
        piece = begin
        for following in range(document + 1, int(np.searchsorted(starts, last, side="right"))):
            border = int(starts[following])
            opens = bool(np.isin(self.documents.token_at(border - 1), self._end_ids))
            if border - piece > 1:
                yield piece, border, following - 1
            piece = border - 1 if opens else border
        if last + 1 - piece > 1:
            yield piece, last + 1, int(np.searchsorted(starts, last, side="right")) - 1


TrainRows = TokenRows | TokenWindows
