"""Rows wait on the disk, in the order they were read, until it is known which split each belongs to."""

import contextlib
import json
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Columns, Provenance, StoreWriter, store_path
from safetrain.core.data.token_rows import Question
from safetrain.core.records.reports import SplitReport
from safetrain.core.storage.files import full_disk_named
from safetrain.data.forms import parse_row
from safetrain.data.rows import Row
from safetrain.data.split import SplitFigures
from safetrain.data.tokenize import ReadRow

NOTHING_ASKED = 2**32 - 1
PART_SIZE = 4 * 2**20  # tokens and bytes of text that are handed on together, or one row
VALUES = {"ids": ("<u4", "lengths"), "trained": ("?", "lengths"), "text": ("u1", "text_bytes"),
          "prompts": ("<u4", "prompt_lengths")}  # fmt: skip
NUMBERS = ("files", "lines", "lengths", "labels", "asked_at", "text_bytes", "prompt_lengths", "label_bytes")
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class SplitRows:
    """Some rows of one split: their lines of JSON and their tokens; and what they ask.

    ``asked_at`` (rows,): the token at which the last answer begins. ``prompts``: where a prompt is tokenized otherwise
    than in its row; else nothing.
    """

    text: bytes
    columns: Columns
    asked_at: np.ndarray
    prompts: list[np.ndarray]
    label_bytes: int

    def questions(self) -> Iterator[Question]:
        """Those whose last answer can be asked for; ``row`` counts within the part."""
        ends, lines = np.cumsum(self.columns.lengths), self.text.decode("utf-8").split("\n")
        for place, (begin, own) in enumerate(zip(self.asked_at.tolist(), self.prompts, strict=True)):
            if begin == NOTHING_ASKED:
                continue
            tokens = slice(int(ends[place] - self.columns.lengths[place]), int(ends[place]))
            ids, trained = self.columns.ids[tokens], self.columns.trained[tokens]
            answer = ids[begin : begin + int(np.flatnonzero(trained[begin:])[-1]) + 1]
            prompt = own if len(own) else ids[:begin]
            row = parse_row(json.loads(lines[place]))
            yield Question(place, tuple(prompt.tolist()), tuple(answer.tolist()), question_text(row), row.group)


class Spool(contextlib.AbstractContextManager["Spool"]):
    """Rows of all files, one after the other: their numbers in memory, their tokens and texts in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._streams = {name: tempfile.TemporaryFile(dir=folder) for name in VALUES}  # noqa: SIM115
        self._numbers = {name: array("I") for name in NUMBERS}
        self.labels = 0  # of all rows

    def __exit__(self, *_ended: object) -> None:
        for file in self._streams.values():
            file.close()

    def __len__(self) -> int:
        return len(self._numbers["files"])

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Add those rows that can be trained; the others have been counted as errors."""
        for read in reads:
            if read.tokens is None or read.row is None:
                continue
            text = (_encode(read.row.as_json()) + "\n").encode("utf-8")
            prompt = np.array(read.prompt or (), dtype="<u4")
            labels = read.tokens.trained_tokens
            for name, raw in (
                ("ids", read.tokens.ids.astype("<u4").tobytes()), ("trained", read.tokens.trained.tobytes()),
                ("text", text), ("prompts", prompt.tobytes()),
            ):  # fmt: skip
                self._streams[name].write(raw)
            asked_at = NOTHING_ASKED if read.asked_at is None else read.asked_at
            numbers = (file, read.place.number, len(read.tokens), labels, asked_at, len(text), len(prompt))
            for name, number in zip(NUMBERS, (*numbers, read.label_bytes), strict=True):
                self._numbers[name].append(number)
            self.labels += labels

    def parts(self, chosen: np.ndarray) -> Iterator[SplitRows]:
        """The rows for which ``chosen`` (rows,) is true, some MiB at a time, in their order."""
        for file in self._streams.values():
            file.flush()
            file.seek(0)
        numbers = {name: np.frombuffer(values, dtype=np.uint32) for name, values in self._numbers.items()}
        sizes = sum((numbers[name].astype(np.int64) for _, name in VALUES.values()), np.zeros(len(self), np.int64))
        before, start = np.concatenate([[0], np.cumsum(sizes)]), 0
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(before, before[start] + PART_SIZE, "right")) - 1)
            found = self._part({name: each[start:stop] for name, each in numbers.items()}, chosen[start:stop])
            if len(found.asked_at):
                yield found
            start = stop

    def write_split(
        self, folder: Path, name: str, chosen: np.ndarray, made: Provenance, files: Sequence[Path]
    ) -> SplitReport:
        """Write the ``chosen`` rows (rows,) and their token store as a split; its figures."""
        figures, label_bytes = SplitFigures(), 0
        with (folder / f"{name}.jsonl").open("wb") as text, StoreWriter(store_path(folder, name)) as store:
            for part in self.parts(chosen):
                text.write(part.text)
                first = len(store)
                store.add(part.columns)
                figures.add(part.columns)
                label_bytes += part.label_bytes
                for question in part.questions() if name == "test" else ():
                    store.add_question(replace(question, row=first + question.row))
            store.finish(made, [str(path) for path in files], label_bytes)
        return figures.report(label_bytes)

    def _part(self, numbers: dict[str, np.ndarray], here: np.ndarray) -> SplitRows:
        """The next rows, those that are ``here`` (rows,)."""
        values = {}
        for name, (kind, count) in VALUES.items():
            sizes = numbers[count]
            raw = self._streams[name].read(int(sizes.sum(dtype=np.int64)) * np.dtype(kind).itemsize)
            read = np.frombuffer(raw, dtype=kind)
            values[name] = read if here.all() else read[np.repeat(here, sizes)]
        chosen = {name: each[here] for name, each in numbers.items()}
        columns = Columns(
            values["ids"], values["trained"], chosen["lengths"], chosen["labels"], chosen["files"], chosen["lines"]
        )
        prompts = np.split(values["prompts"], np.cumsum(chosen["prompt_lengths"])[:-1])
        label_bytes = int(chosen["label_bytes"].sum(dtype=np.int64))
        return SplitRows(values["text"].tobytes(), columns, chosen["asked_at"], prompts, label_bytes)


def question_text(row: Row) -> str:
    """What the last trained answer of a chat answers."""
    trained = (index for index, message in enumerate(row.messages) if message.role == "assistant" and message.trained)
    last = max(trained, default=0)
    return row.messages[last - 1].content if last else ""


def named_when_full(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Raises DiskFullError where there is no room for what is written into ``folder``."""
    do = "free some space there: scratch files and what is written take some five times as much as the data"
    return full_disk_named("The disk is full.", folder, do)
