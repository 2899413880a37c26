"""Rows that are tokens: on the disk until the split of each is known, then lines and a token store for each split."""

import contextlib
import itertools
import json
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Columns, Provenance, StoreWriter, store_path
from safetrain.core.data.token_rows import Question
from safetrain.core.records.reports import SplitReport
from safetrain.core.storage.files import full_disk_named
from safetrain.data.figures import SplitFigures
from safetrain.data.folders import SPLITS
from safetrain.data.tokenize import Prompt, ReadRow

_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class TokenBlock:
    """Rows that are tokens, some hundred together, with all that is written of them."""

    columns: Columns
    lines: list[bytes]  # canonical JSON
    label_bytes: np.ndarray  # (rows,) UTF-8 bytes of the text of the labels
    prompts: list[Prompt | None]  # None where the last answer cannot be asked for

    def chosen(self, here: np.ndarray) -> "TokenBlock":
        """Take the rows for which ``here`` (rows,) is true."""
        if here.all():
            return self
        old, tokens = self.columns, np.repeat(here, self.columns.lengths)
        numbers = (old.lengths[here], old.label_counts[here], old.files[here], old.lines[here])
        columns = Columns(old.ids[tokens], old.trained[tokens], *numbers)
        lines, prompts = list(itertools.compress(self.lines, here)), list(itertools.compress(self.prompts, here))
        return TokenBlock(columns, lines, self.label_bytes[here], prompts)

    def questions(self, first: int) -> Iterator[Question]:
        """Yield the questions of these rows; the first row is number ``first`` of its store."""
        ends = np.cumsum(self.columns.lengths)
        for place, prompt in enumerate(self.prompts):
            if prompt is None:
                continue
            tokens = slice(int(ends[place] - self.columns.lengths[place]), int(ends[place]))
            ids, trained = self.columns.ids[tokens], self.columns.trained[tokens]
            end = prompt.begin + int(np.flatnonzero(trained[prompt.begin :])[-1]) + 1
            asked = ids[: prompt.begin].tolist() if prompt.ids is None else prompt.ids
            answer = ids[prompt.begin : end].tolist()
            yield Question(first + place, tuple(asked), tuple(answer), prompt.text, prompt.group)


def token_block(reads: Sequence[ReadRow], file: int) -> TokenBlock:
    """Join the rows of a file that can be trained; the others have been counted as errors."""
    kept = [(read, read.row, read.tokens) for read in reads if read.row is not None and read.tokens is not None]
    columns = Columns(
        ids=np.concatenate([np.zeros(0, np.uint32), *(tokens.ids for _, _, tokens in kept)]),
        trained=np.concatenate([np.zeros(0, np.bool_), *(tokens.trained for _, _, tokens in kept)]),
        lengths=np.array([len(tokens) for _, _, tokens in kept], dtype=np.int64),
        label_counts=np.array([tokens.trained_tokens for _, _, tokens in kept], dtype=np.int64),
        files=np.full(len(kept), file),
        lines=np.array([read.place.number for read, _, _ in kept]),
    )
    lines = [(_encode(row.as_json()) + "\n").encode("utf-8") for _, row, _ in kept]
    label_bytes = np.array([read.label_bytes for read, _, _ in kept])
    return TokenBlock(columns, lines, label_bytes, [read.prompt for read, _, _ in kept])


class SplitWriter(contextlib.ExitStack):
    """Writes a split: canonical lines, and a token store with the questions of test."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self._lines = self.enter_context((folder / f"{name}.jsonl").open("wb"))
        self._store = self.enter_context(StoreWriter(store_path(folder, name)))
        self._figures, self._label_bytes, self._is_test = SplitFigures(), 0, name == "test"

    def add(self, block: TokenBlock) -> None:
        """Append rows."""
        if not block.lines:
            return
        for question in block.questions(len(self._store)) if self._is_test else ():
            self._store.add_question(question)
        self._lines.writelines(block.lines)
        self._store.add(block.columns)
        self._figures.add(block.columns)
        self._label_bytes += int(block.label_bytes.sum())

    def finish(self, made: Provenance, files: Sequence[Path]) -> SplitReport:
        """Complete the store; gives the figures of the split."""
        self._store.finish(made, [str(path) for path in files], self._label_bytes)
        return self._figures.report(self._label_bytes)


class Spool(contextlib.ExitStack):
    """Blocks of rows in a scratch file of ``folder``, in the order in which they were added."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = self.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115

    def add(self, block: TokenBlock) -> None:
        """Append a block."""
        pickle.dump(block, self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def blocks(self) -> Iterator[TokenBlock]:
        """Read all blocks."""
        self._file.seek(0)
        with contextlib.suppress(EOFError):
            while True:
                yield pickle.load(self._file)

    def write_splits(
        self, folder: Path, parts: np.ndarray, made: Provenance, files: Sequence[Path]
    ) -> dict[str, SplitReport]:
        """Write each row into its split; ``parts`` (rows,) are indices into SPLITS."""
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(SplitWriter(folder, name)) for name in SPLITS]
            first = 0
            for block in self.blocks():
                own = parts[first : first + len(block.lines)]
                first += len(own)
                for number, writer in enumerate(writers):
                    writer.add(block.chosen(own == number))
            return {name: writer.finish(made, files) for name, writer in zip(SPLITS, writers, strict=True)}


def named_when_full(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Raises DiskFullError where there is no room for what is written into ``folder``."""
    do = "free some space there: scratch files and what is written take some five times as much as the data"
    return full_disk_named("The disk is full.", folder, do)
