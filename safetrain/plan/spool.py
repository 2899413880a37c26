"""Rows wait on the disk, in the order they were read, until it is known which split each belongs to."""

import contextlib
import hashlib
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.jsonl import parse_line
from safetrain.core.data.rendering import question_text
from safetrain.core.data.rows import Row
from safetrain.core.data.store import Columns
from safetrain.core.data.token_rows import Question
from safetrain.plan.tokenizing import ReadRow, canonical

DIGEST_BYTES = 16
NOTHING_ASKED = 2**32 - 1
PART_SIZE = 4 * 2**20  # tokens and bytes of text that are handed on together, or one row


@dataclass(frozen=True)
class SplitRows:
    """Some rows of one split: their lines of JSON, their tokens, and which rows of the spool they are."""

    text: bytes
    columns: Columns
    rows: np.ndarray


class Spool(contextlib.AbstractContextManager["Spool"]):
    """Rows of all files, one after the other. In memory it keeps some 60 bytes a row, and unusual prompts."""

    def __init__(self, folder: Path) -> None:
        self._ids, self._trained, self._text = (tempfile.TemporaryFile(dir=folder) for _ in range(3))  # noqa: SIM115
        self._lengths, self._labels, self._text_bytes = array("I"), array("I"), array("I")
        self._files, self._lines, self._asked_at = array("I"), array("I"), array("I")
        self._identities = bytearray()
        self._prompts: dict[int, np.ndarray] = {}  # where the prompt is tokenized otherwise than in its row

    def __exit__(self, *_ended: object) -> None:
        for file in (self._ids, self._trained, self._text):
            file.close()

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Those that can be trained; the others have been counted as errors."""
        kept = [read for read in reads if read.tokens is not None and read.row is not None]
        tokens = [read.tokens for read in kept if read.tokens is not None]
        if not tokens:
            return
        self._ids.write(np.concatenate([row.ids for row in tokens]).astype("<u4").tobytes())
        self._trained.write(np.concatenate([row.trained for row in tokens]).tobytes())
        for read, row in zip(kept, tokens, strict=True):
            if read.row is None:
                continue
            text = canonical(read.row).encode("utf-8")
            self._text.write(text)
            self._text_bytes.append(len(text))
            self._identities += _digest(_identity(read.row))
            if read.prompt is not None:
                self._prompts[len(self._lines)] = np.array(read.prompt, dtype=np.uint32)
            self._lengths.append(len(row))
            self._labels.append(row.trained_tokens)
            self._lines.append(read.line)
            self._files.append(file)
            self._asked_at.append(NOTHING_ASKED if read.asked_at is None else read.asked_at)

    @property
    def labels(self) -> int:
        """Of all rows."""
        return sum(self._labels)

    def files(self) -> np.ndarray:
        """(rows,) the file of each."""
        return np.array(self._files)

    def lines(self) -> np.ndarray:
        """(rows,) its line there, from 1."""
        return np.array(self._lines)

    def identities(self) -> np.ndarray:
        """(rows,) digests of all that each says."""
        return np.frombuffer(bytes(self._identities), dtype=f"S{DIGEST_BYTES}")

    def parts(self, chosen: np.ndarray) -> Iterator[SplitRows]:
        """The rows for which ``chosen`` (rows,) is true, some MiB at a time, in their order."""
        for file in (self._ids, self._trained, self._text):
            file.flush()
            file.seek(0)
        lengths, sizes = np.array(self._lengths, dtype=np.int64), np.array(self._text_bytes, dtype=np.int64)
        labels, files, lines = np.array(self._labels), self.files(), self.lines()
        before, start = np.concatenate([[0], np.cumsum(lengths + sizes)]), 0
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(before, before[start] + PART_SIZE, "right")) - 1)
            part = slice(start, stop)
            tokens, size = int(lengths[part].sum()), int(sizes[part].sum())
            ids = np.frombuffer(self._ids.read(4 * tokens), dtype="<u4")
            trained = np.frombuffer(self._trained.read(tokens), dtype=np.bool_)
            text = np.frombuffer(self._text.read(size), dtype=np.uint8)
            here = chosen[part]
            rows = start + np.flatnonzero(here)
            start = stop
            if not len(rows):
                continue
            if not here.all():
                of_token = np.repeat(here, lengths[part])
                ids, trained, text = ids[of_token], trained[of_token], text[np.repeat(here, sizes[part])]
            columns = Columns(ids, trained, lengths[rows], labels[rows], files[rows], lines[rows])
            yield SplitRows(text.tobytes(), columns, rows)

    def asked(self, part: SplitRows) -> Iterator[Question]:
        """The questions in some rows: those whose last answer can be asked for; ``row`` counts within the part."""
        ends, lines = np.cumsum(part.columns.lengths), part.text.decode("utf-8").split("\n")
        for place, row in enumerate(part.rows.tolist()):
            begin = self._asked_at[row]
            if begin == NOTHING_ASKED:
                continue
            tokens = slice(int(ends[place] - part.columns.lengths[place]), int(ends[place]))
            ids, trained = part.columns.ids[tokens], part.columns.trained[tokens]
            answer = ids[begin : begin + int(np.flatnonzero(trained[begin:])[-1]) + 1]
            prompt = self._prompts.get(row, ids[:begin])
            said = parse_line(lines[place])
            yield Question(place, tuple(prompt.tolist()), tuple(answer.tolist()), question_text(said), said.group)


def _identity(row: Row) -> str:
    """Equal for rows that say the same. Most are plain chats, for which no JSON is needed."""
    if row.tools or any(message.details or not message.trained for message in row.messages):
        return row.identity()
    return "\0".join([row.format, row.text, *(f"{message.role}\1{message.content}" for message in row.messages)])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest()
