"""Rows wait on the disk, in the order they were read, until it is known which split each belongs to."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from safetrain.core.data.jsonl import parse_line
from safetrain.core.data.rendering import question_text
from safetrain.core.data.store import Columns
from safetrain.core.data.token_rows import Question
from safetrain.plan.row_columns import RowColumns
from safetrain.plan.tokenizing import ReadRow, canonical

NOTHING_ASKED = 2**32 - 1
PART_SIZE = 4 * 2**20  # tokens and bytes of text that are handed on together, or one row


@dataclass(frozen=True)
class SplitRows:
    """Some rows of one split: their lines of JSON and their tokens; and of what is asked where that is in them.

    ``asked_at`` (rows,): the token at which the last answer begins. ``prompts``: where a prompt is tokenized otherwise
    than in its row; else nothing.
    """

    text: bytes
    columns: Columns
    asked_at: np.ndarray
    prompts: list[np.ndarray]
    label_bytes: int


class Spool(contextlib.AbstractContextManager["Spool"]):
    """Rows of all files, one after the other, with nothing of them in memory."""

    def __init__(self, folder: Path) -> None:
        self._streams = tuple(tempfile.TemporaryFile(dir=folder) for _ in range(4))  # noqa: SIM115
        self._ids, self._trained, self._text, self._prompts = self._streams
        self.columns = RowColumns(
            folder,
            files="u4",
            lines="u4",  # from 1; in a binary table the row
            lengths="u4",
            labels="u4",
            asked_at="u4",
            text_bytes="u4",
            prompt_lengths="u4",
            label_bytes="u4",
        )
        self.labels = 0  # of all rows

    def __exit__(self, *_ended: object) -> None:
        for file in self._streams:
            file.close()
        self.columns.__exit__()

    def __len__(self) -> int:
        return len(self.columns)

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Those that can be trained; the others have been counted as errors."""
        kept = [(read, read.row, read.tokens) for read in reads if read.tokens is not None and read.row is not None]
        if not kept:
            return
        self._ids.write(np.concatenate([tokens.ids for _, _, tokens in kept]).astype("<u4").tobytes())
        self._trained.write(np.concatenate([tokens.trained for _, _, tokens in kept]).tobytes())
        texts = [canonical(row).encode("utf-8") for _, row, _ in kept]
        self._text.writelines(texts)
        prompts = [np.array(read.prompt or (), dtype="<u4") for read, _, _ in kept]
        self._prompts.writelines(prompt.tobytes() for prompt in prompts)
        labels = [tokens.trained_tokens for _, _, tokens in kept]
        self.labels += sum(labels)
        self.columns.add(
            files=[file] * len(kept),
            lines=[read.place.number for read, _, _ in kept],
            lengths=[len(tokens) for _, _, tokens in kept],
            labels=labels,
            asked_at=[NOTHING_ASKED if read.asked_at is None else read.asked_at for read, _, _ in kept],
            text_bytes=[len(text) for text in texts],
            prompt_lengths=[len(prompt) for prompt in prompts],
            label_bytes=[read.label_bytes for read, _, _ in kept],
        )

    def parts(self, chosen: np.ndarray) -> Iterator[SplitRows]:
        """The rows for which ``chosen`` (rows,) is true, some MiB at a time, in their order."""
        for file in self._streams:
            file.flush()
            file.seek(0)
        names = ("lengths", "text_bytes", "prompt_lengths", "labels", "files", "lines", "asked_at", "label_bytes")
        begin = 0
        for numbers in self.columns.chunks(*names):
            sizes = sum(numbers[:3], start=np.zeros(len(numbers[0]), dtype=np.int64))
            before, start = np.concatenate([[0], np.cumsum(sizes)]), 0
            while start < len(sizes):
                stop = max(start + 1, int(np.searchsorted(before, before[start] + PART_SIZE, "right")) - 1)
                found = self._part(chosen[begin + start : begin + stop], *(each[start:stop] for each in numbers))
                if len(found.asked_at):
                    yield found
                start = stop
            begin += len(sizes)

    def _part(
        self,
        here: np.ndarray,
        lengths: np.ndarray,
        text_bytes: np.ndarray,
        prompt_lengths: np.ndarray,
        *others: np.ndarray,
    ) -> SplitRows:
        """The next rows, those that are ``here`` (rows,)."""
        ids = _next(self._ids, "<u4", lengths, here)
        trained = _next(self._trained, "?", lengths, here)
        text = _next(self._text, "u1", text_bytes, here).tobytes()
        prompts = _next(self._prompts, "<u4", prompt_lengths, here)
        labels, files, lines, asked_at, label_bytes = (each[here] for each in others)
        columns = Columns(ids, trained, lengths[here], labels, files, lines)
        apart = np.split(prompts, np.cumsum(prompt_lengths[here])[:-1])
        return SplitRows(text, columns, asked_at, apart, int(label_bytes.sum(dtype=np.int64)))

    def asked(self, part: SplitRows) -> Iterator[Question]:
        """The questions in some rows: those whose last answer can be asked for; ``row`` counts within the part."""
        ends, lines = np.cumsum(part.columns.lengths), part.text.decode("utf-8").split("\n")
        for place, (begin, own) in enumerate(zip(part.asked_at.tolist(), part.prompts, strict=True)):
            if begin == NOTHING_ASKED:
                continue
            tokens = slice(int(ends[place] - part.columns.lengths[place]), int(ends[place]))
            ids, trained = part.columns.ids[tokens], part.columns.trained[tokens]
            answer = ids[begin : begin + int(np.flatnonzero(trained[begin:])[-1]) + 1]
            prompt = own if len(own) else ids[:begin]
            said = parse_line(lines[place])
            yield Question(place, tuple(prompt.tolist()), tuple(answer.tolist()), question_text(said), said.group)


def _next(file: IO[bytes], kind: str, sizes: np.ndarray, here: np.ndarray) -> np.ndarray:
    """The next numbers of a file, ``sizes`` (rows,) of them for each row; those of the rows that are ``here``."""
    count = int(sizes.sum())
    values = np.frombuffer(file.read(count * np.dtype(kind).itemsize), dtype=kind)
    return values if here.all() else values[np.repeat(here, sizes)]
