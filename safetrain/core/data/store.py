"""Tokens made once: rows as ids and labels in one memory-mapped file for each split, written by validate_data.

The file is a safetensors file (8 bytes of header length, JSON, little-endian arrays), so other tools open it too:
``ids`` of all rows one after the other, ``trained`` (is this token a label), ``row_ends``, ``label_counts``, the source
``files`` and ``lines`` of each row, and of the rows with a question: ``question_rows``, the ids of their
prompts, the question's text and the category. The metadata says what made it.

Of a corpus the tokens stay in the files that they came in: of each document the store has where it starts, its tokens,
its labels, its file and its number there. The metadata names the files, and the stretches in them that belong to this
split.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.data.pages import Pages
from safetrain.core.data.token_files import OpenFiles, Stretch, StretchValues, TokenFile, require_unchanged
from safetrain.core.data.token_rows import Question, Questions, TokenRows
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import dvc
from safetrain.core.storage.files import from_json, write_atomic

VERSION = 2
DTYPES = {"U8": np.uint8, "BOOL": np.bool_, "U32": np.uint32, "U64": np.uint64}
COPY_BYTES = 2**20
KINDS = {"ids": "U32", "trained": "BOOL", "prompt_ids": "U32", "answer_ids": "U32", "question_texts": "U8",
         "question_groups": "U8", "row_ends": "U64", "question_rows": "U64", "prompt_ends": "U64",
         "answer_ends": "U64", "text_ends": "U64", "group_ends": "U64", "label_counts": "U32", "files": "U32",
         "lines": "U32"}  # fmt: skip
ENDS = {"row_ends": "ids", "prompt_ends": "prompt_ids", "answer_ends": "answer_ids", "text_ends": "question_texts",
        "group_ends": "question_groups"}  # fmt: skip
CORPUS = "corpus"  # the key of a corpus's metadata
OF_DOCUMENTS = {"starts": "U64", "lengths": "U32", "label_counts": "U32", "files": "U32", "lines": "U32"}


@dataclass(frozen=True)
class Provenance:
    """What a store was made from; train refuses one that was made with another model's tokenizer."""

    tokenizer: str  # hash of the tokenizer's and the template's files
    source: str  # hash of the data files
    made_on: str  # ISO date that templates took for today
    stop_ids: tuple[int, ...]  # that end an answer: those that training teaches, and the model's own
    opening: str  # appended to the generation prompt when asking, so that it ends as in training
    asked: str = ""  # removed from the end of the generation prompt before that
    system: str = ""  # the system prompt that every row has; empty where they differ, or have none


@dataclass(frozen=True)
class Corpus:
    """Where the tokens of a split of a corpus are."""

    files: tuple[TokenFile, ...]
    stretches: tuple[Stretch, ...]


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


class _Spool(contextlib.AbstractContextManager[Any]):
    """The arrays of a store, each in a scratch file, in memory that does not grow with the number of rows."""

    def __init__(self, path: Path, kinds: Mapping[str, str]) -> None:
        self._path, self._kinds = path, kinds
        path.parent.mkdir(parents=True, exist_ok=True)
        self._closing = contextlib.ExitStack()
        self._spooled: dict[str, BinaryIO] = {}
        for name in kinds:
            file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 closed with the writer
            self._spooled[name] = self._closing.enter_context(file)

    def __exit__(self, *_ended: object) -> None:
        self._closing.close()

    def _put(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self._spooled[name].write(values.astype(_dtype_of(self._kinds[name])).tobytes())

    def _write(self, metadata: Mapping[str, str]) -> None:
        """Write the file, whole or not at all."""
        write_atomic(self._path, lambda temporary: self._write_parts(temporary, metadata))

    def _write_parts(self, path: Path, metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        place = 0
        order = sorted(self._kinds, key=lambda name: -_dtype_of(self._kinds[name]).itemsize)
        for name in order:  # the widest numbers first, so that all are aligned
            size = self._spooled[name].tell()
            count = size // _dtype_of(self._kinds[name]).itemsize
            header[name] = {"dtype": self._kinds[name], "shape": [count], "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                self._spooled[name].seek(0)
                shutil.copyfileobj(self._spooled[name], file, COPY_BYTES)


class StoreWriter(_Spool):
    """Writes a store of rows, whole or not at all."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, KINDS)
        self._rows, self._labels, self._ends = 0, 0, dict.fromkeys(ENDS, 0)
        self._ids_digest, self._labels_digest = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

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
        self._put(row_ends=ends, label_counts=rows.label_counts, files=rows.files, lines=rows.lines)

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
        self._write(metadata)


class DocumentWriter(_Spool):
    """Writes the store of one split of a corpus, whole or not at all."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, OF_DOCUMENTS)
        self._tokens = 0

    def add(self, lengths: np.ndarray, label_counts: np.ndarray, file: int, numbers: np.ndarray) -> None:
        """Documents of one file, none of them empty; ``numbers`` (documents,) count from 1."""
        starts = self._tokens + np.cumsum(lengths, dtype=np.int64) - lengths
        self._tokens += int(lengths.sum())
        files = np.full(len(lengths), file)
        self._put(starts=starts, lengths=lengths, label_counts=label_counts, files=files, lines=numbers)

    def finish(self, corpus: Corpus, metadata: Mapping[str, str]) -> None:
        """Write the file: to a temporary name, flushed, renamed. ``metadata`` is that of any store."""
        self._write({**metadata, CORPUS: json.dumps(dataclasses.asdict(corpus), ensure_ascii=False)})


def metadata_of(provenance: Provenance, digest: str, files: Sequence[str], label_bytes: float) -> dict[str, str]:
    """What a store says of itself; ``label_bytes``: of a label's text, on average, 0 where that is not known."""
    return {
        "version": str(VERSION),
        "digest": digest,
        "made": json.dumps(dataclasses.asdict(provenance), ensure_ascii=False),
        "files": json.dumps(list(files), ensure_ascii=False),
        "label_bytes": repr(label_bytes),
    }


def read_made(path: Path) -> Provenance | None:
    """Provenance of the store at ``path``, of any version; None if it is missing or cannot be read."""
    try:
        header, _ = _read_parts(path)
        return _made_of(path, header)
    except (OSError, DataError):
        return None


def open_store(path: Path, tokenizer: str | None = None) -> Store:
    """Map a store; raises ConfigError where it is missing or made with another ``tokenizer``, DataError if damaged."""
    try:
        header, start = _read_header(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is not there yet.", where=str(path), do=f"run '{dvc()} repro validate_data'"
        ) from None
    made, metadata = _made_of(path, header), header["__metadata__"]
    if tokenizer is not None and made.tokenizer != tokenizer:
        raise ConfigError(
            "data/validated was made with another tokenizer or chat template.",
            where=str(path),
            do="run validate_data with the same model.path, or safetrain run, which does",
        )
    arrays, pages = _map(path, header, start)
    origin = (tuple(json.loads(metadata["files"])), arrays["files"], arrays["lines"], float(metadata["label_bytes"]))
    if CORPUS in metadata:
        return Store(made, metadata["digest"], _documents(path, metadata, arrays), _no_questions(), *origin)
    _require_consistent(path, arrays)
    ends = arrays["row_ends"].astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    rows = TokenRows(arrays["ids"], arrays["trained"], ends - lengths, lengths, arrays["label_counts"].copy(), pages)
    pages.give_back()
    parts = ((arrays[values], arrays[name]) for name, values in ENDS.items() if name != "row_ends")
    return Store(made, metadata["digest"], rows, Questions(arrays["question_rows"], *parts), *origin)


def _no_questions() -> Questions:
    none = np.zeros(0, dtype=np.uint32)
    return Questions(none, (none, none), (none, none), (none, none), (none, none))


def _documents(path: Path, metadata: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> TokenRows:
    """The rows of a split of a corpus; raises DataError where it or a file is not as it was."""
    try:
        corpus = from_json(Corpus, json.loads(metadata[CORPUS]))
    except (ValueError, KeyError, TypeError):
        raise damaged(path) from None
    reader = OpenFiles()
    ids = StretchValues(corpus.files, corpus.stretches, reader)
    starts, lengths = arrays["starts"].view("<i8"), arrays["lengths"].view("<i4")
    if len({len(values) for values in arrays.values()}) != 1 or not len(starts):
        raise damaged(path)
    if int(starts[-1]) + int(lengths[-1]) != len(ids):
        raise damaged(path)
    used = sorted({stretch.file for stretch in corpus.stretches})
    require_unchanged([corpus.files[number] for number in used])
    if any(corpus.files[number].masked for number in used):
        trained: Any = StretchValues(corpus.files, corpus.stretches, reader, labels=True)
    else:
        trained = np.broadcast_to(np.True_, len(ids))
    return TokenRows(ids, trained, starts, lengths, arrays["label_counts"].view("<i4"))


def _map(path: Path, header: dict[str, Any], start: int) -> tuple[dict[str, np.ndarray], Pages]:
    """Each array as a view of the file. Its pages are clean, so the system takes them back when it needs memory."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for name, kind in _kinds_of(header).items():
        entry = header[name]
        arrays[name] = np.frombuffer(mapped, _dtype_of(kind), entry["shape"][0], start + entry["data_offsets"][0])
    return arrays, Pages(mapped)


def _kinds_of(header: Mapping[str, Any]) -> Mapping[str, str]:
    return OF_DOCUMENTS if CORPUS in header["__metadata__"] else KINDS


def _require_consistent(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Rows and questions end one after the other, the last where the values end."""
    rows, questions = len(arrays["row_ends"]), len(arrays["question_rows"])
    counts = [(name, rows) for name in ("label_counts", "files", "lines")]
    counts += [("trained", len(arrays["ids"])), *[(ends, questions) for ends in ENDS if ends != "row_ends"]]
    is_whole = all(len(arrays[name]) == count for name, count in counts)
    for name, values in ENDS.items():
        ends, size = arrays[name], len(arrays[values])
        is_whole = is_whole and int(ends[-1] if len(ends) else 0) == size and bool(np.all(ends[:-1] <= ends[1:]))
    if not is_whole:
        raise damaged(path)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the arrays begin; raises DataError where it is not one of this version."""
    header, start = _read_parts(path)
    try:
        metadata = header["__metadata__"]
        is_whole = all(_is_whole(kind, header[name]) for name, kind in _kinds_of(header).items())
        is_whole = is_whole and metadata["version"] == str(VERSION) and {"digest", "made"} <= metadata.keys()
        is_whole = is_whole and isinstance(json.loads(metadata["files"]), list) and float(metadata["label_bytes"]) >= 0
    except (ValueError, KeyError, TypeError, IndexError):
        raise damaged(path) from None
    if not is_whole:
        raise damaged(path)
    return header, start


def _read_parts(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the arrays begin; raises DataError for a file that is not as long as it says."""
    size = os.stat(path).st_size  # noqa: PTH116
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise damaged(path)
        text = file.read(length)
    try:
        header = json.loads(text)
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged(path) from None
    if size != 8 + length + end:
        raise damaged(path)
    return header, 8 + length


def _is_whole(kind: str, entry: dict[str, Any]) -> bool:
    (begin, end), (count,) = entry["data_offsets"], entry["shape"]
    return entry["dtype"] == kind and begin >= 0 and end - begin == count * _dtype_of(kind).itemsize


def _made_of(path: Path, header: dict[str, Any]) -> Provenance:
    try:
        value = json.loads(header["__metadata__"]["made"])
        return from_json(Provenance, value)
    except (ValueError, KeyError, TypeError):
        raise damaged(path) from None


def _dtype_of(kind: str) -> np.dtype:
    """NumPy's name of a kind of safetensors."""
    return np.dtype(DTYPES[kind]).newbyteorder("<")


def damaged(path: Path) -> DataError:
    """The error for a token store that is not as it was written."""
    return DataError(
        "The token store is damaged, or of another version.",
        where=str(path),
        do=f"run '{dvc()} repro -f -s validate_data'",
    )
