"""Token stores: the tokenized rows of each split in one file, written by validate_data and read in parts.

A store is a safetensors file (8 bytes of header length, JSON, little-endian arrays), so other tools can open it. It has
the ``ids`` of all rows in sequence, ``trained`` (whether a token is a label), ``row_ends``, ``label_counts``, the
source ``files`` and ``lines`` of each row, and for each question ``question_rows``, the ids of prompt and answer,
and the text. The metadata has the provenance.

The tokens of a corpus stay in their own files, and all are labels. Its store has the length, file and number of each
document; the metadata names the files, and the stretches in them that belong to the split.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.data.token_rows import Question, Questions, TokenRows, Values
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import dvc
from safetrain.core.model.files import file_sample, tokenizer_hash
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json, write_atomic

VERSION = 3
DTYPES = {"U8": "u1", "BOOL": "?", "U32": "<u4", "U64": "<u8"}
OF_ROWS = {"ids": "U32", "trained": "BOOL", "prompt_ids": "U32", "answer_ids": "U32", "question_texts": "U8",
           "row_ends": "U64", "question_rows": "U64", "prompt_ends": "U64", "answer_ends": "U64", "text_ends": "U64",
           "label_counts": "U32", "files": "U32", "lines": "U32"}  # fmt: skip
ENDS = {"row_ends": "ids", "prompt_ends": "prompt_ids", "answer_ends": "answer_ids", "text_ends": "question_texts"}
OF_DOCUMENTS = {"lengths": "U32", "files": "U32", "lines": "U32"}
CORPUS = "documents_in"  # the metadata key of a corpus
COPY_BYTES = 2**20
SAMPLES = 16  # of a token file


@dataclass(frozen=True)
class Provenance:
    """What a store was made from; train refuses the store of another model's tokenizer."""

    tokenizer: str  # hash of the files of tokenizer and chat template
    source: str  # hash of the data files
    made_on: str  # ISO date that templates used as today
    stop_ids: tuple[int, ...]  # those that training teaches, and the model's own
    opening: str  # appended to the generation prompt, so that it ends as in training
    asked: str = ""  # removed from the generation prompt's end before that
    system: str = ""  # the system prompt of all rows; empty if they differ or have none


class FileValues:
    """Numbers of one type in a file, from an offset. The file stays readable when it is replaced."""

    def __init__(self, path: Path, dtype: np.dtype, offset: int, count: int) -> None:
        """Raises OSError."""
        self._path, self._dtype, self._offset, self._count = path, dtype, offset, count
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> np.ndarray:
        """Raises DataError if the file is too short or unreadable."""
        start, stop, _ = place.indices(self._count)
        width = self._dtype.itemsize
        offset, size = self._offset + width * start, width * max(0, stop - start)
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise DataError(f"The tokens cannot be read: {error.strerror}.", where=str(self._path)) from None
        if len(content) < size:
            what, do = "A token file has become shorter.", "restore it and run the same command, which resumes"
            raise DataError(what, where=str(self._path), expected=f"{offset + size} bytes or more", do=do)
        return np.frombuffer(content, self._dtype)


@dataclass(frozen=True)
class TokenFile:
    """A token file of a corpus and its state at validation."""

    path: str
    tokens: int
    token_bytes: int  # 2 or 4, little-endian
    digest: str  # of sampled bytes

    def require_unchanged(self) -> None:
        """Raise DataError if the file is missing, or its size or sampled bytes have changed since validation."""
        path, size = Path(self.path), self.tokens * self.token_bytes
        try:
            if path.stat().st_size == size and sampled_digest(path) == self.digest:
                return
            what = "has changed since validation"
        except OSError as error:
            what = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise DataError(
            f"A file of the corpus {what}.",
            where=self.path,
            expected=f"{size} bytes, as validate_data saw them",
            do=f"restore it, or validate the corpus again: {dvc()} repro -f -s validate_data",
        )

    def ids(self, begin: int, end: int) -> np.ndarray:
        """Read ids, (tokens,) uint32; raises DataError. Reopens the file: macOS allows 256 open files."""
        try:
            values = FileValues(Path(self.path), np.dtype(f"<u{self.token_bytes}"), 0, self.tokens)
        except OSError as error:
            raise DataError(f"The corpus cannot be read: {error.strerror}.", where=self.path) from None
        return values[begin:end].astype(np.uint32)


@dataclass(frozen=True)
class Stretch:
    """Consecutive whole documents of a token file."""

    file: int
    begin: int  # tokens
    end: int


def sampled_digest(path: Path) -> str:
    """Hash a file's size and a sample of its bytes: the checks of every run cannot read terabytes. Raises OSError."""
    return file_sample(path, SAMPLES).hex()


@dataclass(frozen=True)
class Corpus:
    """The token files of a corpus, and the stretches of one split: their ids in sequence are read when sliced."""

    files: tuple[TokenFile, ...]
    stretches: tuple[Stretch, ...]

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([stretch.end - stretch.begin for stretch in self.stretches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, _ = place.indices(len(self))
        number, parts = int(np.searchsorted(self._ends, start, side="right")), list[np.ndarray]()
        while start < stop:
            end, stretch = int(self._ends[number]), self.stretches[number]
            begin, count = stretch.end - (end - start), min(stop, end) - start
            parts.append(self.files[stretch.file].ids(begin, begin + count))
            start, number = start + count, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.uint32), *parts])


@dataclass(frozen=True)
class Store:
    """An open store. Its tokens stay on the disk and are read row by row."""

    made: Provenance
    digest: str  # of ids, labels and row boundaries
    rows: TokenRows
    questions: Questions
    files: tuple[str, ...]
    file_of_row: Values  # (rows,) index into files
    line_of_row: Values  # (rows,) from 1
    label_bytes: float = 0.0  # mean UTF-8 bytes of a label; 0: unknown

    def where(self, row: int) -> str:
        """``file:line`` of a row in the source data; ``file:row`` in a binary table."""
        file, line = (int(values[row : row + 1][0]) for values in (self.file_of_row, self.line_of_row))
        return f"{self.files[file]}:{line}"


def store_path(folder: Path, split: str) -> Path:
    """The token store of a split, next to its canonical rows."""
    return folder / f"{split}.tokens.safetensors"


class _Writer(contextlib.ExitStack):
    """Writes a store atomically. Arrays wait in scratch files, so memory does not grow with the rows."""

    def __init__(self, path: Path, kinds: Mapping[str, str]) -> None:
        super().__init__()
        self._path, self._kinds = path, kinds
        path.parent.mkdir(parents=True, exist_ok=True)
        self._arrays = dict[str, BinaryIO]()
        for name in kinds:
            self._arrays[name] = self.enter_context(tempfile.TemporaryFile(dir=path.parent))  # noqa: SIM115

    def _put(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self._arrays[name].write(values.astype(DTYPES[self._kinds[name]]).tobytes())

    def _write(self, made: Provenance, digest: str, files: Sequence[str], label_bytes: float, **more: str) -> None:
        """Write the file atomically; ``label_bytes``: mean UTF-8 bytes of a label."""
        metadata = {
            "version": str(VERSION),
            "digest": digest,
            "made": json.dumps(dataclasses.asdict(made), ensure_ascii=False),
            "files": json.dumps(list(files), ensure_ascii=False),
            "label_bytes": repr(label_bytes),
            **more,
        }
        write_atomic(self._path, lambda temporary: self._write_arrays(temporary, metadata))

    def _write_arrays(self, path: Path, metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": metadata}
        widths, place = {name: np.dtype(DTYPES[kind]).itemsize for name, kind in self._kinds.items()}, 0
        order = sorted(widths, key=lambda name: -widths[name])  # the widest numbers first, for alignment
        for name in order:
            size = self._arrays[name].tell()
            shape, offsets = [size // widths[name]], [place, place + size]
            header[name] = {"dtype": self._kinds[name], "shape": shape, "data_offsets": offsets}
            place += size
        text = json.dumps(header, ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                self._arrays[name].seek(0)
                shutil.copyfileobj(self._arrays[name], file, COPY_BYTES)


class StoreWriter(_Writer):
    """Writes a store of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, OF_ROWS)
        self._rows, self._labels, self._ends = 0, 0, dict.fromkeys(ENDS, 0)
        self._ids_digest, self._labels_digest = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def __len__(self) -> int:
        return self._rows

    def add(
        self, ids: np.ndarray, trained: np.ndarray, lengths: np.ndarray, label_counts: np.ndarray, files: np.ndarray,
        lines: np.ndarray,
    ) -> None:  # fmt: skip
        """Add rows: ``ids`` and ``trained`` of all tokens; for each row its length, labels, file, and line from 1."""
        raw, labels = ids.astype("<u4").tobytes(), trained.astype(np.bool_).tobytes()
        self._arrays["ids"].write(raw)
        self._arrays["trained"].write(labels)
        self._ids_digest.update(raw)
        self._labels_digest.update(labels)
        self._labels += int(np.count_nonzero(trained))
        ends = self._ends["row_ends"] + np.cumsum(lengths, dtype=np.uint64)
        self._rows, self._ends["row_ends"] = self._rows + len(ends), self._ends["row_ends"] + int(lengths.sum())
        self._put(row_ends=ends, label_counts=label_counts, files=files, lines=lines)

    def add_question(self, question: Question) -> None:
        """Add the question of a row, in the order of the rows."""
        self._put(question_rows=np.array([question.row]))
        text = np.frombuffer(question.text.encode("utf-8"), dtype=np.uint8)
        parts = {"prompt_ends": np.array(question.prompt), "answer_ends": np.array(question.answer), "text_ends": text}
        for name, values in parts.items():
            self._ends[name] += len(values)
            self._put(**{ENDS[name]: values, name: np.array([self._ends[name]])})

    def finish(self, made: Provenance, files: Sequence[str], label_bytes: int = 0) -> None:
        """Write the file. ``label_bytes``: UTF-8 bytes of all answers."""
        digest = hashlib.blake2b(self._ids_digest.digest() + self._labels_digest.digest(), digest_size=16)
        self._arrays["row_ends"].seek(0)
        while piece := self._arrays["row_ends"].read(COPY_BYTES):
            digest.update(piece)
        self._write(made, digest.hexdigest(), files, label_bytes / self._labels if self._labels else 0.0)


class DocumentWriter(_Writer):
    """Writes the store of one split of a corpus."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, OF_DOCUMENTS)

    def add(self, lengths: np.ndarray, file: int, numbers: np.ndarray) -> None:
        """Add non-empty documents of one file; ``numbers`` (documents,) count from 1."""
        self._put(lengths=lengths, files=np.full(len(lengths), file), lines=numbers)

    def finish(self, made: Provenance, digest: str, corpus: Corpus, label_bytes: float) -> None:
        """Write the file. ``label_bytes``: mean UTF-8 bytes of a label."""
        text = json.dumps(dataclasses.asdict(corpus), ensure_ascii=False)
        self._write(made, digest, [file.path for file in corpus.files], label_bytes, **{CORPUS: text})


def read_made(path: Path) -> Provenance | None:
    """The provenance of a store; None if it is missing, cannot be read, or has another version."""
    try:
        return _read(path).made
    except (OSError, DataError):
        return None


def open_split(split: str, base: Path) -> Store:
    """Open a split in data/validated, made with the tokenizer of ``base``; raises as ``open_store`` does."""
    return open_store(store_path(paths.VALIDATED, split), tokenizer_hash(base))


def open_store(path: Path, tokenizer: str | None = None) -> Store:
    """Open a store; raises ConfigError if it is missing or made with another ``tokenizer``.

    Raises DataError if it is damaged, or if a file of a corpus has changed.
    """
    try:
        store = _read(path)
    except FileNotFoundError:
        do = f"run '{dvc()} repro validate_data'"
        raise ConfigError(f"{path.name} does not exist yet.", where=str(path), do=do) from None
    if tokenizer is not None and store.made.tokenizer != tokenizer:
        raise ConfigError(
            "data/validated was made with another tokenizer or chat template.",
            where=str(path),
            do="run validate_data with the same model.path, or safetrain run",
        )
    if isinstance(corpus := store.rows.ids, Corpus):
        for number in {stretch.file for stretch in corpus.stretches}:
            corpus.files[number].require_unchanged()
    return store


def _read(path: Path) -> Store:
    """Read a store's header and the sizes of its rows; raises DataError if it is damaged or has another version."""
    with path.open("rb") as file:
        size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
        text, end = file.read(length) if length < size else b"", 0
    try:
        header = json.loads(text)
        metadata, arrays = header["__metadata__"], dict[str, FileValues]()
        for name, kind in (OF_DOCUMENTS if CORPUS in metadata else OF_ROWS).items():
            (begin, stop), (count,) = header[name]["data_offsets"], header[name]["shape"]
            arrays[name], end = FileValues(path, np.dtype(DTYPES[kind]), 8 + length + begin, count), max(end, stop)
            if header[name]["dtype"] != kind:
                raise ValueError(name)
        if metadata["version"] != str(VERSION) or size != 8 + length + end:
            raise ValueError(path)
        rows, questions = _documents(metadata[CORPUS], arrays) if CORPUS in metadata else _rows(arrays)
        made, names = from_json(Provenance, json.loads(metadata["made"])), tuple(json.loads(metadata["files"]))
        origin = (names, arrays["files"], arrays["lines"], float(metadata["label_bytes"]))
        return Store(made, metadata["digest"], rows, questions, *origin)
    except (ValueError, KeyError, TypeError, AttributeError):
        what, do = "The token store is damaged, or has another version.", f"run '{dvc()} repro -f -s validate_data'"
        raise DataError(what, where=str(path), do=do) from None


def _rows(arrays: Mapping[str, FileValues]) -> tuple[TokenRows, Questions]:
    ends = {name: arrays[name][:].astype(np.int64) for name in ENDS}
    lengths = np.diff(ends["row_ends"], prepend=0)
    starts = ends["row_ends"] - lengths
    rows = TokenRows(arrays["ids"], arrays["trained"], starts, lengths, arrays["label_counts"][:])
    parts = ((arrays[values], ends[name]) for name, values in ENDS.items() if name != "row_ends")
    return rows, Questions(arrays["question_rows"][:], *parts)


def _documents(text: str, arrays: Mapping[str, FileValues]) -> tuple[TokenRows, Questions]:
    corpus, lengths = from_json(Corpus, json.loads(text)), arrays["lengths"][:].astype(np.int64)
    if not len(lengths) or int(lengths.sum()) != len(corpus):
        raise ValueError(CORPUS)
    trained = np.broadcast_to(np.True_, len(corpus))
    rows = TokenRows(corpus, trained, np.cumsum(lengths) - lengths, lengths, lengths - 1)
    return rows, Questions(np.zeros(0, dtype=np.uint64))
