"""Documents one after the other as windows of equal length, for training from scratch: no token is lost.

The tokens of a split are one stream. A window feeds a fixed number of them and predicts each one's successor; the next
window begins where it ends, so every token but the very first is predicted exactly once. Attention stays inside a
document: a window is divided into pieces, each a separate row whose positions count from 0. The end token of a
document opens the next one, so a document's first token is predicted too, from nothing but that a document begins;
where a document has no end token, nothing predicts the first token of the next one.
"""

from collections.abc import Iterator

import numpy as np

from safetrain.core.data.token_rows import TokenRows, UpdateRows
from safetrain.core.errors import DataError

MOST_VALID_TOKENS = 2**17  # that are validated on: the loss is known to a hundredth, and one pass takes no hour
SAMPLED_WINDOWS = 2**10  # whose pieces stand for all, where a GPU chooses its widths


class TokenWindows:
    """A stream of documents cut into windows. It knows where windows begin, and reads tokens when they are needed."""

    def __init__(self, documents: TokenRows, tokens: int, end_ids: frozenset[int]) -> None:
        """``documents`` lie one after the other; ``tokens``: that each window feeds; ``end_ids`` close a document.

        Raises DataError where there are fewer than two tokens.
        """
        self.documents, self.tokens, self._end_ids = documents, tokens, np.array(sorted(end_ids), dtype=np.uint32)
        self._first = int(documents.starts[0]) if len(documents) else 0
        self._stream = int(documents.lengths.sum(dtype=np.int64))
        if self._stream < 2:
            raise DataError("There is nothing to train on.", expected="at least two tokens", got=str(self._stream))
        self.longest = 0  # as long as any
        self.cut_rows, self.lost_labels = 0, 0

    def __len__(self) -> int:
        return -(-(self._stream - 1) // self.tokens)

    def inputs(self) -> np.ndarray:
        """(windows,) tokens that each feeds: all the same but the last one's."""
        sizes = np.full(len(self), self.tokens, dtype=np.int32)
        sizes[-1] = self._stream - 1 - (len(self) - 1) * self.tokens
        return sizes

    @property
    def label_counts(self) -> np.ndarray:
        """(windows,) the most labels that each has."""
        return self.inputs()

    def shapes(self) -> np.ndarray:
        """Tokens fed by each piece of some windows, evenly spread, and of a whole window: what rows are like."""
        some = np.linspace(0, len(self) - 1, min(len(self), SAMPLED_WINDOWS)).round().astype(np.int64)
        return np.append(self.pieces(some).inputs(), self.tokens)

    def of_update(self, windows: np.ndarray | list[int]) -> UpdateRows:
        """The pieces of these windows."""
        pieces = self.pieces(windows)
        return UpdateRows(pieces, pieces.by_length.tolist())

    def pieces(self, windows: np.ndarray | list[int]) -> TokenRows:
        """Rows that these windows consist of; each has the number of its document."""
        pieces = [piece for window in windows for piece in self._pieces_of(int(window))]
        starts, stops, numbers = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        return self.documents.stretches(starts, stops - starts, numbers)

    def some(self, most_tokens: int) -> TokenRows:
        """Pieces of as many windows, evenly spread, as feed at most ``most_tokens`` tokens, of one at the least."""
        count = max(1, min(len(self), most_tokens // self.tokens))
        return self.pieces(np.linspace(0, len(self) - 1, count).round().astype(np.int64))

    def _pieces_of(self, window: int) -> Iterator[tuple[int, int, int]]:
        """Where each piece begins and ends (its last token is only predicted), and its document."""
        begin = self._first + window * self.tokens
        last = min(begin + self.tokens, self._first + self._stream - 1)  # the last token that is predicted
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
