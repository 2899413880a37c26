"""Tokens made once: rows as ids and labels in one memory-mapped file for each split, written by validate_data.

The file is a safetensors file (8 bytes of header length, JSON, little-endian arrays), so other tools open it too:
``ids`` of all rows one after the other, ``trained`` (is this token a label), ``row_ends``, ``label_counts``, the source
``files`` and ``lines`` of each row, and of the questions that can be asked: ``question_rows``, the ids of their
prompts and the text asked. The metadata says what made it.
"""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.data.token_rows import Question, TokenRow, TokenRows
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.files import write_atomic

VERSION = 1
MAX_HEADER_BYTES = 16 * 2**20
DTYPES = {"U8": np.uint8, "BOOL": np.bool_, "U32": np.uint32, "U64": np.uint64}
KINDS = {"ids": "U32", "trained": "BOOL", "prompt_ids": "U32", "answer_ids": "U32", "question_texts": "U8"}  # spooled
COPY_BYTES = 2**20


@dataclass(frozen=True)
class Made:
    """What a store was made with and from; train refuses a store that another model's tokenizer made."""

    tokenizer: str  # hash of the tokenizer's and the template's files
    settings: str  # the keys of params.yaml that decide what is a label, as text
    source: str  # hash of the data files
    made_on: str  # ISO date: what the templates were told is today
    stop_ids: tuple[int, ...]  # that training teaches to end an answer with, and the model's own
    opening: str  # how a trained answer is opened, where that is not what the template asks with; else empty


@dataclass(frozen=True)
class Store:
    """An open store. ``rows`` stays on the disk; what is read of it are pages of the file."""

    made: Made
    digest: str  # of ids, labels and row boundaries
    rows: TokenRows
    questions: tuple[Question, ...]
    files: tuple[str, ...]
    file_of_row: np.ndarray  # (rows,) index into files
    line_of_row: np.ndarray  # (rows,) from 1

    def where(self, row: int) -> str:
        """``file:line`` of a row in the data that was validated."""
        return f"{self.files[self.file_of_row[row]]}:{self.line_of_row[row]}"


def store_path(folder: Path, split: str) -> Path:
    """The token store of a split, beside its canonical rows."""
    return folder / f"{split}.tokens.safetensors"


class StoreWriter:
    """Writes a store row by row in memory that does not grow with the tokens; it is there whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._closing = contextlib.ExitStack()
        self._spooled: dict[str, BinaryIO] = {}
        for name in KINDS:
            file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 closed with the writer
            self._spooled[name] = self._closing.enter_context(file)
        wide = ("row_ends", "question_rows", "prompt_ends", "answer_ends", "text_ends")
        narrow = ("label_counts", "files", "lines")
        self._columns = {name: array("Q") for name in wide} | {name: array("I") for name in narrow}
        self._digest = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def __len__(self) -> int:
        return len(self._columns["row_ends"])

    def add(self, ids: np.ndarray, trained: np.ndarray, file: int, line: int) -> None:
        """One row: ``ids`` (tokens,) uint32 and ``trained`` (tokens,) bool."""
        raw, labels = ids.astype("<u4").tobytes(), trained.astype(np.bool_).tobytes()
        self._spooled["ids"].write(raw)
        self._spooled["trained"].write(labels)
        self._digest.update(struct.pack("<Q", len(ids)))
        self._digest.update(raw)
        self._digest.update(labels)
        columns = self._columns
        columns["row_ends"].append(_last(columns["row_ends"]) + len(ids))
        columns["label_counts"].append(int(np.count_nonzero(trained[1:])))
        columns["files"].append(file)
        columns["lines"].append(line)

    def add_question(self, prompt: np.ndarray, answer: np.ndarray, text: str) -> None:
        """What the row that was added last asks: the ids to continue, those expected, and the question as text."""
        columns, raw = self._columns, text.encode("utf-8")
        self._spooled["prompt_ids"].write(prompt.astype("<u4").tobytes())
        self._spooled["answer_ids"].write(answer.astype("<u4").tobytes())
        self._spooled["question_texts"].write(raw)
        columns["question_rows"].append(len(columns["row_ends"]) - 1)
        columns["prompt_ends"].append(_last(columns["prompt_ends"]) + len(prompt))
        columns["answer_ends"].append(_last(columns["answer_ends"]) + len(answer))
        columns["text_ends"].append(_last(columns["text_ends"]) + len(raw))

    def finish(self, made: Made, files: Sequence[str]) -> None:
        """Write the file: to a temporary name, flushed, renamed."""
        metadata = {
            "version": str(VERSION),
            "digest": self._digest.hexdigest(),
            "made": json.dumps(dataclasses.asdict(made), ensure_ascii=False),
            "files": json.dumps(list(files), ensure_ascii=False),
        }
        write_atomic(self._path, lambda temporary: self._write(temporary, metadata))

    def _write(self, path: Path, metadata: dict[str, str]) -> None:
        sizes = {name: file.tell() for name, file in self._spooled.items()}
        kinds = KINDS | {name: "U64" if column.typecode == "Q" else "U32" for name, column in self._columns.items()}
        header: dict[str, Any] = {"__metadata__": metadata}
        place = 0
        order = sorted(kinds, key=lambda name: -np.dtype(DTYPES[kinds[name]]).itemsize)
        for name in order:  # the widest numbers first, so that all are aligned
            width = np.dtype(DTYPES[kinds[name]]).itemsize
            size = sizes[name] if name in sizes else len(self._columns[name]) * width
            header[name] = {"dtype": kinds[name], "shape": [size // width], "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                if name in self._spooled:
                    self._spooled[name].seek(0)
                    shutil.copyfileobj(self._spooled[name], file, COPY_BYTES)
                else:
                    dtype = np.dtype(DTYPES[kinds[name]]).newbyteorder("<")
                    file.write(np.array(self._columns[name], dtype=dtype).tobytes())


def _last(column: array) -> int:
    return column[-1] if column else 0


def read_made(path: Path) -> Made | None:
    """What made the store at ``path``; None where there is none, or none of this version."""
    try:
        header, _ = _read_header(path)
        return _made_of(header)
    except (OSError, DataError, ConfigError):
        return None


def open_store(path: Path, tokenizer: str | None = None) -> Store:
    """Map a store; raises ConfigError where it is missing or made with another ``tokenizer``, DataError if damaged."""
    try:
        header, start = _read_header(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is not there yet.", where=str(path), do="run 'dvc repro validate_data'"
        ) from None
    made, metadata = _made_of(header), header["__metadata__"]
    if tokenizer is not None and made.tokenizer != tokenizer:
        raise ConfigError(
            "data/validated was made with another tokenizer or chat template.",
            where=str(path),
            do="run validate_data with the same model.path, or safetrain run, which does",
        )
    arrays = _map(path, header, start)
    rows = TokenRows(arrays["ids"], arrays["trained"], arrays["row_ends"], arrays["label_counts"])
    return Store(
        made, metadata["digest"], rows, tuple(_questions(arrays)), tuple(json.loads(metadata["files"])),
        arrays["files"], arrays["lines"],
    )  # fmt: skip


def _questions(arrays: dict[str, np.ndarray]) -> Iterator[Question]:
    prompts, answers, texts = arrays["prompt_ids"], arrays["answer_ids"], arrays["question_texts"]
    starts = (0, 0, 0)
    columns = [arrays[name].tolist() for name in ("question_rows", "prompt_ends", "answer_ends", "text_ends")]
    for row, *ends in zip(*columns, strict=True):
        prompt, answer, text = (part[a:b] for part, a, b in zip((prompts, answers, texts), starts, ends, strict=True))
        yield Question(row, tuple(prompt.tolist()), tuple(answer.tolist()), text.tobytes().decode("utf-8"))
        starts = (ends[0], ends[1], ends[2])


def _map(path: Path, header: dict[str, Any], start: int) -> dict[str, np.ndarray]:
    """Each array as a view of the file. Its pages are clean, so the system takes them back when it needs memory."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<")
        found[name] = np.frombuffer(mapped, dtype, entry["shape"][0], start + entry["data_offsets"][0])
    return found


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the arrays begin; raises DataError for a file that is not as long as its header says."""
    size = os.stat(path).st_size  # noqa: PTH116
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path)
        try:
            header = json.loads(file.read(length))
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError):
            raise _damaged(path) from None
    if size != 8 + length + end or header.get("__metadata__", {}).get("version") != str(VERSION):
        raise _damaged(path)
    return header, 8 + length


def _made_of(header: dict[str, Any]) -> Made:
    value = json.loads(header["__metadata__"]["made"])
    return Made(**{**value, "stop_ids": tuple(value["stop_ids"])})


def _damaged(path: Path) -> DataError:
    return DataError(
        "The token store is damaged, or of another version.", where=str(path), do="run 'dvc repro -f -s validate_data'"
    )


__all__ = ["Made", "Store", "StoreWriter", "TokenRow", "open_store", "read_made", "store_path"]
