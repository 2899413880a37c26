"""Rows that are tokens: on the disk until the split of each is known, then lines and a token store for each split."""

import contextlib
import json
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Columns, Provenance, StoreWriter, store_path
from safetrain.core.data.token_rows import Question, TokenRow
from safetrain.core.records.reports import SplitReport
from safetrain.core.storage.files import full_disk_named
from safetrain.data.folders import SPLITS
from safetrain.data.split import SplitFigures
from safetrain.data.tokenize import Prompt, ReadRow

PART_TOKENS = 2**20  # that are handed on to a store together, or one row
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

    def question(self, row: int) -> Question | None:
        """What it asks as row number ``row`` of its store; None where its last answer cannot be asked for."""
        if self.prompt is None:
            return None
        ids, begin = self.tokens.ids, self.prompt.begin
        end = begin + int(np.flatnonzero(self.tokens.trained[begin:])[-1]) + 1
        asked = ids[:begin].tolist() if self.prompt.ids is None else self.prompt.ids
        return Question(row, tuple(asked), tuple(ids[begin:end].tolist()), self.prompt.text, self.prompt.group)


def stored_rows(reads: Iterable[ReadRow], file: int) -> list[StoredRow]:
    """The rows of a file that can be trained; the others have been counted as errors."""
    return [
        StoredRow(
            (_encode(read.row.as_json()) + "\n").encode("utf-8"), read.tokens, file, read.place.number,
            read.label_bytes, read.prompt,
        )
        for read in reads if read.row is not None and read.tokens is not None
    ]  # fmt: skip


class Spool(contextlib.ExitStack):
    """Rows in a scratch file of ``folder``, in the order in which they were added."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = self.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Append some hundred rows."""
        pickle.dump(rows, self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def write_splits(
        self, folder: Path, parts: np.ndarray, made: Provenance, files: Sequence[Path]
    ) -> dict[str, SplitReport]:
        """Write each row into its split; ``parts`` (rows,) are indices into SPLITS."""
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(SplitWriter(folder, name)) for name in SPLITS]
            for part, row in zip(parts.tolist(), self._rows(), strict=True):
                writers[part].add(row)
            return {name: writer.finish(made, files) for name, writer in zip(SPLITS, writers, strict=True)}

    def _rows(self) -> Iterator[StoredRow]:
        self._file.seek(0)
        with contextlib.suppress(EOFError):
            while True:
                yield from pickle.load(self._file)


class SplitWriter(contextlib.ExitStack):
    """Writes a split: canonical lines, and a token store with the questions of test."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self._lines = self.enter_context((folder / f"{name}.jsonl").open("wb"))
        self._store = self.enter_context(StoreWriter(store_path(folder, name)))
        self._figures, self._label_bytes, self._has_questions = SplitFigures(), 0, name == "test"
        self._waiting, self._tokens = list[StoredRow](), 0

    def add(self, row: StoredRow) -> None:
        """Append a row."""
        self._waiting.append(row)
        self._tokens += len(row.tokens)
        if self._tokens >= PART_TOKENS:
            self._write()

    def finish(self, made: Provenance, files: Sequence[Path]) -> SplitReport:
        """Complete the store; gives the figures of the split."""
        if self._waiting:
            self._write()
        self._store.finish(made, [str(path) for path in files], self._label_bytes)
        return self._figures.report(self._label_bytes)

    def _write(self) -> None:
        rows, self._waiting, self._tokens = self._waiting, [], 0
        for place, row in enumerate(rows, len(self._store)) if self._has_questions else ():
            question = row.question(place)
            if question is not None:
                self._store.add_question(question)
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


def named_when_full(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Raises DiskFullError where there is no room for what is written into ``folder``."""
    do = "free some space there: scratch files and what is written take some five times as much as the data"
    return full_disk_named("The disk is full.", folder, do)
