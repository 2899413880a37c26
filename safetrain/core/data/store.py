"""Tokens made once: rows as ids and labels in one memory-mapped file for each split, written by validate_data.

The file is a safetensors file (8 bytes of header length, JSON, little-endian arrays), so other tools open it too:
``ids`` of all rows one after the other, ``trained`` (is this token a label), ``row_ends``, ``label_counts``, the source
``files`` and ``lines`` of each row, and of the rows with a question: ``question_rows``, the ids of their
prompts, the question's text and the category. The metadata says what made it.
"""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.data.corpus_store import CORPUS, open_documents
from safetrain.core.data.pages import Pages
from safetrain.core.data.store_file import COPY_BYTES, damaged, dtype_of, read_parts, write_parts
from safetrain.core.data.token_rows import Question, Questions, TokenRows
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.storage.files import from_json, write_atomic

VERSION = 2
KINDS = {"ids": "U32", "trained": "BOOL", "prompt_ids": "U32", "answer_ids": "U32", "question_texts": "U8",
         "question_groups": "U8", "row_ends": "U64", "question_rows": "U64", "prompt_ends": "U64",
         "answer_ends": "U64", "text_ends": "U64", "group_ends": "U64", "label_counts": "U32", "files": "U32",
         "lines": "U32"}  # fmt: skip
ENDS = {"row_ends": "ids", "prompt_ends": "prompt_ids", "answer_ends": "answer_ids", "text_ends": "question_texts",
        "group_ends": "question_groups"}  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """What a store was made from; train refuses one that was made with another model's tokenizer."""

    tokenizer: str  # hash of the tokenizer's and the template's files
    settings: str  # the keys of params.yaml that decide what is a label, as text
    source: str  # hash of the data files
    made_on: str  # ISO date that templates took for today
    stop_ids: tuple[int, ...]  # that end an answer: those that training teaches, and the model's own
    opening: str  # appended to the generation prompt when asking, so that it ends as in training
    asked: str = ""  # removed from the end of the generation prompt before that
    system: str = ""  # the system prompt that every row has; empty where they differ, or have none


@dataclass(frozen=True)
class Store:
    """An open store. ``rows`` stays on the disk and is read page by page."""

    made: Provenance
    digest: str  # of ids, labels and row boundaries
    rows: TokenRows
    questions: Questions
    files: tuple[str, ...]
    file_of_row: np.ndarray  # (rows,) index into files
    line_of_row: np.ndarray  # (rows,) from 1
    label_bytes: float = 0.0  # UTF-8 bytes of a label, on average; 0: not known

    def where(self, row: int) -> str:
        """``file:line`` of a row in the data that was validated; of one in a binary table ``file:row``."""
        return f"{self.files[self.file_of_row[row]]}:{self.line_of_row[row]}"


def store_path(folder: Path, split: str) -> Path:
    """The token store of a split, beside its canonical rows."""
    return folder / f"{split}.tokens.safetensors"


@dataclass(frozen=True)
class Columns:
    """Rows as arrays: ``ids`` and ``trained`` of all of them, and for each its length, labels, file and line."""

    ids: np.ndarray  # (tokens,) uint32
    trained: np.ndarray  # (tokens,) bool
    lengths: np.ndarray  # (rows,)
    label_counts: np.ndarray  # (rows,)
    files: np.ndarray  # (rows,)
    lines: np.ndarray  # (rows,) from 1


class StoreWriter(contextlib.AbstractContextManager["StoreWriter"]):
    """Writes a store, whole or not at all, in memory that does not grow with the number of rows and tokens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._closing = contextlib.ExitStack()
        self._spooled: dict[str, BinaryIO] = {}
        for name in KINDS:
            file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 closed with the writer
            self._spooled[name] = self._closing.enter_context(file)
        self._rows, self._labels, self._ends = 0, 0, dict.fromkeys(ENDS, 0)
        self._ids_digest, self._labels_digest = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def __exit__(self, *_ended: object) -> None:
        self._closing.close()

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Columns) -> None:
        """Several rows, one after the other."""
        raw, labels = rows.ids.astype("<u4").tobytes(), rows.trained.astype(np.bool_).tobytes()
        self._spooled["ids"].write(raw)
        self._spooled["trained"].write(labels)
        self._ids_digest.update(raw)
        self._labels_digest.update(labels)
        self._labels += int(np.count_nonzero(rows.trained))
        ends = self._ends["row_ends"] + np.cumsum(rows.lengths, dtype=np.uint64)
        self._rows, self._ends["row_ends"] = self._rows + len(ends), self._ends["row_ends"] + int(rows.lengths.sum())
        columns = {"row_ends": ends, "label_counts": rows.label_counts, "files": rows.files, "lines": rows.lines}
        for name, values in columns.items():
            self._spooled[name].write(values.astype(dtype_of(KINDS[name])).tobytes())

    def add_question(self, question: Question) -> None:
        """Add the question of a row, in the order of the rows."""
        text, group = question.text.encode("utf-8"), question.group.encode("utf-8")
        self._spooled["question_rows"].write(question.row.to_bytes(8, "little"))
        self._add_to("prompt_ends", np.asarray(question.prompt, dtype="<u4").tobytes(), len(question.prompt))
        self._add_to("answer_ends", np.asarray(question.answer, dtype="<u4").tobytes(), len(question.answer))
        self._add_to("text_ends", text, len(text))
        self._add_to("group_ends", group, len(group))

    def _add_to(self, name: str, raw: bytes, count: int) -> None:
        """Write ``count`` values, and where they end."""
        self._ends[name] += count
        self._spooled[ENDS[name]].write(raw)
        self._spooled[name].write(self._ends[name].to_bytes(8, "little"))

    def finish(self, made: Provenance, files: Sequence[str], label_bytes: int = 0) -> None:
        """Write the file: to a temporary name, flushed, renamed. ``label_bytes``: of the text of all labels."""
        digest = hashlib.blake2b(self._ids_digest.digest() + self._labels_digest.digest(), digest_size=16)
        ends = self._spooled["row_ends"]
        ends.seek(0)
        while piece := ends.read(COPY_BYTES):
            digest.update(piece)
        metadata = metadata_of(made, digest.hexdigest(), files, label_bytes / self._labels if self._labels else 0.0)
        write_atomic(self._path, lambda temporary: self._write(temporary, metadata))

    def _write(self, path: Path, metadata: dict[str, str]) -> None:
        write_parts(path, metadata, {name: (kind, self._spooled[name]) for name, kind in KINDS.items()})


def metadata_of(made: Provenance, digest: str, files: Sequence[str], label_bytes: float) -> dict[str, str]:
    """What a store says of itself; ``label_bytes``: of a label's text, on average, 0 where that is not known."""
    return {
        "version": str(VERSION),
        "digest": digest,
        "made": json.dumps(dataclasses.asdict(made), ensure_ascii=False),
        "files": json.dumps(list(files), ensure_ascii=False),
        "label_bytes": repr(label_bytes),
    }


def read_made(path: Path) -> Provenance | None:
    """Provenance of the store at ``path``, of any version; None if it is missing or cannot be read."""
    try:
        header, _ = read_parts(path)
        return _made_of(path, header)
    except (OSError, DataError):
        return None


def open_store(path: Path, tokenizer: str | None = None) -> Store:
    """Map a store; raises ConfigError where it is missing or made with another ``tokenizer``, DataError if damaged."""
    try:
        header, start = _read_header(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is not there yet.", where=str(path), do="run 'dvc repro validate_data'"
        ) from None
    made, metadata = _made_of(path, header), header["__metadata__"]
    if tokenizer is not None and made.tokenizer != tokenizer:
        raise ConfigError(
            "data/validated was made with another tokenizer or chat template.",
            where=str(path),
            do="run validate_data with the same model.path, or safetrain run, which does",
        )
    digest, files = metadata["digest"], tuple(json.loads(metadata["files"]))
    label_bytes = float(metadata.get("label_bytes", 0))
    if CORPUS in metadata:
        found = open_documents(path, header, start)
        where = (found.file_of_row, found.line_of_row)
        return Store(made, digest, found.rows, _no_questions(), files, *where, label_bytes)
    arrays, pages = _map(path, header, start)
    _require_consistent(path, arrays)
    ends = arrays["row_ends"].astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    rows = TokenRows(arrays["ids"], arrays["trained"], ends - lengths, lengths, arrays["label_counts"].copy(), pages)
    pages.give_back()
    parts = ((arrays[values], arrays[name]) for name, values in ENDS.items() if name != "row_ends")
    questions = Questions(arrays["question_rows"], *parts)
    return Store(made, digest, rows, questions, files, arrays["files"], arrays["lines"], label_bytes)


def _no_questions() -> Questions:
    none = np.zeros(0, dtype=np.uint32)
    return Questions(none, (none, none), (none, none), (none, none), (none, none))


def _map(path: Path, header: dict[str, Any], start: int) -> tuple[dict[str, np.ndarray], Pages]:
    """Each array as a view of the file. Its pages are clean, so the system takes them back when it needs memory."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    for name, kind in KINDS.items():
        entry = header[name]
        found[name] = np.frombuffer(mapped, dtype_of(kind), entry["shape"][0], start + entry["data_offsets"][0])
    return found, Pages(mapped)


def _require_consistent(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Rows and questions end one after the other, the last where the values end."""
    rows, questions = len(arrays["row_ends"]), len(arrays["question_rows"])
    counts = [(name, rows) for name in ("label_counts", "files", "lines")]
    counts += [("trained", len(arrays["ids"])), *[(ends, questions) for ends in ENDS if ends != "row_ends"]]
    whole = all(len(arrays[name]) == count for name, count in counts)
    for name, values in ENDS.items():
        ends, size = arrays[name], len(arrays[values])
        whole = whole and int(ends[-1] if len(ends) else 0) == size and bool(np.all(ends[:-1] <= ends[1:]))
    if not whole:
        raise damaged(path)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the arrays begin; raises DataError where it is not one of this version."""
    header, start = read_parts(path)
    try:
        metadata = header["__metadata__"]
        entries = {} if CORPUS in metadata else {name: header[name] for name in KINDS}
        whole = all(_is_whole(KINDS[name], entry) for name, entry in entries.items())
        whole = whole and metadata["version"] == str(VERSION) and {"digest", "made"} <= metadata.keys()
        whole = whole and isinstance(json.loads(metadata["files"]), list) and float(metadata.get("label_bytes", 0)) >= 0
    except (ValueError, KeyError, TypeError, IndexError):
        raise damaged(path) from None
    if not whole:
        raise damaged(path)
    return header, start


def _is_whole(kind: str, entry: dict[str, Any]) -> bool:
    (begin, end), (count,) = entry["data_offsets"], entry["shape"]
    return entry["dtype"] == kind and begin >= 0 and end - begin == count * dtype_of(kind).itemsize


def _made_of(path: Path, header: dict[str, Any]) -> Provenance:
    try:
        value = json.loads(header["__metadata__"]["made"])
        return from_json(Provenance, value)
    except (ValueError, KeyError, TypeError):
        raise damaged(path) from None
