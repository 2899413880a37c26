"""Rows that are tokens: on the disk until the split of each is known, then lines and a token store for each split."""

import contextlib
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from safetrain.core.data.store import Columns, Provenance, StoreWriter, store_path
from safetrain.core.data.token_rows import Question, TokenRow
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.records.reports import SplitReport
from safetrain.data.folders import SPLITS
from safetrain.data.split import SplitFigures
from safetrain.data.tokenize import Prompt, ReadRow

_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)  # with slots it would be pickled field by field, in Python
class StoredRow:
    """A row that is tokens, with all that is written of it."""

    line: bytes  # canonical JSON
    tokens: TokenRow
    file: int
    number: int  # of its line in the file
    label_bytes: int  # UTF-8 bytes of the text of its labels
    prompt: Prompt | None


def stored_rows(reads: Iterable[ReadRow], file: int) -> list[StoredRow]:
    """The rows of a file that can be trained; the others have been counted as errors."""
    return [
        StoredRow(
            (_encode(read.row.as_json()) + "\n").encode("utf-8"), read.tokens, file, read.place.number,
            read.label_bytes, read.prompt,
        )
        for read in reads if read.row is not None and read.tokens is not None
    ]  # fmt: skip


def add_rows(spool: IO[bytes], rows: Sequence[StoredRow]) -> None:
    """Append some hundred rows to a scratch file."""
    pickle.dump(rows, spool, protocol=pickle.HIGHEST_PROTOCOL)


class SplitWriter(contextlib.ExitStack):
    """Writes a split: canonical lines, and a token store with the questions of test."""

    def __init__(self, folder: Path, name: str, tokenizer: ChatTokenizer) -> None:
        super().__init__()
        self._lines = self.enter_context((folder / f"{name}.jsonl").open("wb"))
        self._store = self.enter_context(StoreWriter(store_path(folder, name)))
        self._figures, self._label_bytes = SplitFigures(), 0
        self._tokenizer, self._has_questions = tokenizer, name == "test"

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Append some hundred rows."""
        if not rows:
            return
        if self._has_questions:
            self._add_questions(rows)
        columns = Columns(
            ids=np.concatenate([row.tokens.ids for row in rows]),
            trained=np.concatenate([row.tokens.trained for row in rows]),
            lengths=np.array([len(row.tokens) for row in rows]),
            label_counts=np.array([row.tokens.trained_tokens for row in rows]),
            files=np.array([row.file for row in rows]),
            lines=np.array([row.number for row in rows]),
        )
        self._lines.writelines(row.line for row in rows)
        self._store.add(columns)
        self._figures.add(columns)
        self._label_bytes += sum(row.label_bytes for row in rows)

    def finish(self, made: Provenance, files: Sequence[Path]) -> SplitReport:
        """Complete the store; gives the figures of the split."""
        self._store.finish(made, [str(path) for path in files], self._label_bytes)
        return self._figures.report(self._label_bytes)

    def _add_questions(self, rows: Sequence[StoredRow]) -> None:
        """What is asked is tokenized alone: in a row, its last token may be joined with the answer's first."""
        asking = [
            (number, row.tokens, row.prompt) for number, row in enumerate(rows, len(self._store))
            if row.prompt is not None
        ]  # fmt: skip
        encodings = self._tokenizer.encode_chats([prompt.rendered for _, _, prompt in asking])
        for (number, tokens, prompt), encoding in zip(asking, encodings, strict=True):
            end = prompt.begin + int(np.flatnonzero(tokens.trained[prompt.begin :])[-1]) + 1
            answer = tuple(tokens.ids[prompt.begin : end].tolist())
            self._store.add_question(Question(number, tuple(encoding.ids), answer, prompt.text, prompt.group))


def write_splits(
    spool: IO[bytes], folder: Path, parts: np.ndarray, made: Provenance, files: Sequence[Path], tokenizer: ChatTokenizer
) -> dict[str, SplitReport]:
    """Write each row of a scratch file into its split; ``parts`` (rows,) are indices into SPLITS."""
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, tokenizer)) for name in SPLITS}
        first = spool.seek(0)
        while first < len(parts):
            block: list[StoredRow] = pickle.load(spool)
            own, first = parts[first : first + len(block)], first + len(block)
            for part, writer in enumerate(writers.values()):
                writer.add([block[row] for row in np.flatnonzero(own == part).tolist()])
        return {name: writer.finish(made, files) for name, writer in writers.items()}
