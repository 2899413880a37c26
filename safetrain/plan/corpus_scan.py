"""Reads every token of a corpus once: are all ids known, which documents are closed, how much text is it."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from safetrain.core.data.token_files import OpenFiles, TokenFile, loss_path
from safetrain.core.errors import DataError
from safetrain.plan.corpus_files import TokenizedFile
from safetrain.plan.corpus_splits import DocumentRun

PIECE = 2**21  # tokens that are looked at together


@dataclass(frozen=True)
class Known:
    """What the model knows: how many ids, which of them end a text, and the bytes of text of each."""

    vocabulary: int
    closing: np.ndarray  # (vocabulary,) bool
    text_bytes: np.ndarray  # (vocabulary,) int64


@dataclass
class SplitTally:
    """What was found in a split."""

    tokens: int = 0
    documents: int = 0
    labels: int = 0  # tokens that are labels, the first of a document too
    label_bytes: int = 0
    open_documents: int = 0
    empty: int = 0  # without any token, or with an end alone
    last_ids: dict[int, int] = field(default_factory=dict)  # of open documents: how many end with each
    state: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))


class CorpusReader:
    """Goes through runs of documents, and says how far it is."""

    def __init__(self, files: Sequence[TokenizedFile], known: Known, said: Callable[[int], None]) -> None:
        """``said`` is told how many more tokens have been looked at."""
        self._files, self._known, self._said, self._open = files, known, said, OpenFiles()

    def read(self, run: DocumentRun, seen: SplitTally) -> tuple[np.ndarray, np.ndarray]:
        """Look at all tokens of a run; gives (documents,) lengths and labels of each. Raises DataError."""
        each = self._files[run.file]
        bounds = np.concatenate([[each.ends[run.first - 1] if run.first else 0], each.ends[run.first : run.stop]])
        lengths = np.diff(bounds)
        before = np.zeros(len(bounds), dtype=np.int64)  # labels before each border
        first = np.ones(len(lengths), dtype=np.int64)  # is the first token of each document a label
        ends_at = np.zeros(len(lengths), dtype=np.uint32)
        labels = 0
        for begin, ids, mask in self._pieces(each.file, int(bounds[0]), int(bounds[-1])):
            self._look(each.file, begin, ids, mask, seen)
            low, high = np.searchsorted(bounds, [begin + 1, begin + len(ids) + 1])  # borders behind a token of these
            ends_at[low - 1 : high - 1] = ids[bounds[low:high] - 1 - begin]
            if mask is not None:
                sums = labels + np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
                before[low:high] = sums[bounds[low:high] - begin]
                labels = int(sums[-1])
                low, high = np.searchsorted(bounds[:-1], [begin, begin + len(ids)])  # documents that begin here
                first[low:high] = mask[bounds[:-1][low:high] - begin]
        counts = np.diff(before) - first if each.file.masked else lengths - 1
        self._count(seen, lengths, ends_at)
        return lengths, np.maximum(counts, 0)

    def _count(self, seen: SplitTally, lengths: np.ndarray, ends_at: np.ndarray) -> None:
        there = lengths > 0
        is_open = there & ~self._known.closing[ends_at]
        seen.documents += int(there.sum())
        seen.open_documents += int(is_open.sum())
        seen.empty += int((~there).sum()) + int(((lengths == 1) & ~is_open & there).sum())
        numbers, counts = np.unique(ends_at[is_open], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            seen.last_ids[number] = seen.last_ids.get(number, 0) + count
        seen.state.update(lengths.astype("<u4").tobytes())

    def _look(self, file: TokenFile, begin: int, ids: np.ndarray, mask: np.ndarray | None, seen: SplitTally) -> None:
        most = int(ids.max())
        if most >= self._known.vocabulary:
            place = begin + int(np.argmax(ids >= self._known.vocabulary))
            raise DataError(
                "A file of tokens has an id that the model does not know.",
                where=f"{file.path}, token {place + 1}",
                expected=f"ids below {self._known.vocabulary}",
                got=str(int(ids[place - begin])),
                do="take the model whose tokenizer made the corpus, or tokenize it with this model's",
            )
        counts = np.bincount(ids if mask is None else ids[mask], minlength=self._known.vocabulary)
        seen.tokens += len(ids)
        seen.labels += int(counts.sum())
        seen.label_bytes += int(counts @ self._known.text_bytes)
        seen.state.update(ids.tobytes())
        if mask is not None:
            seen.state.update(mask.tobytes())
        self._said(len(ids))

    def _pieces(self, file: TokenFile, begin: int, end: int) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Where each piece begins, its ids, and which are labels; None: all."""
        path, width = Path(file.path), file.token_bytes
        for place in range(begin, end, PIECE):
            count = min(PIECE, end - place)
            ids = np.frombuffer(self._open.read(path, place * width, count * width), dtype=f"<u{width}")
            mask = None
            if file.masked:
                mask = np.frombuffer(self._open.read(loss_path(path), place, count), dtype=np.uint8) != 0
            yield place, ids, mask
