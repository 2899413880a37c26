"""The store of a corpus whose tokens stay in the files that they came in: only where its documents lie is written.

The file is a safetensors file as any store (core/data/store.py), without tokens: of each document where it starts, its
tokens, its labels, its file and its number there. The metadata names the files of tokens and the stretches in them
that belong to this split.
"""

import contextlib
import dataclasses
import json
import mmap
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from safetrain.core.data.store_file import damaged, dtype_of, write_parts
from safetrain.core.data.token_files import OpenFiles, Stretch, StretchValues, TokenFile, require_unchanged
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.storage.files import from_json, write_atomic

CORPUS = "corpus"  # the key of the metadata
KINDS = {"starts": "U64", "lengths": "U32", "label_counts": "U32", "files": "U32", "lines": "U32"}


@dataclass(frozen=True)
class Corpus:
    """Where the tokens of a split are."""

    files: tuple[TokenFile, ...]
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Documents:
    """An open split of a corpus: all arrays are mapped."""

    rows: TokenRows
    corpus: Corpus
    file_of_row: np.ndarray  # (documents,)
    line_of_row: np.ndarray  # (documents,) its number in its file, from 1


class DocumentWriter(contextlib.AbstractContextManager["DocumentWriter"]):
    """Writes the store of one split, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path, self._tokens, self._documents = path, 0, 0
        self._closing = contextlib.ExitStack()
        self._spooled: dict[str, BinaryIO] = {}
        for name in KINDS:
            file = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 closed with the writer
            self._spooled[name] = self._closing.enter_context(file)

    def __exit__(self, *_ended: object) -> None:
        self._closing.close()

    def add(self, lengths: np.ndarray, label_counts: np.ndarray, file: int, numbers: np.ndarray) -> None:
        """Documents of one file, none of them empty; ``numbers`` (documents,) count from 1."""
        starts = self._tokens + np.cumsum(lengths, dtype=np.int64) - lengths
        self._tokens, self._documents = self._tokens + int(lengths.sum()), self._documents + len(lengths)
        files = np.full(len(lengths), file)
        columns = {"starts": starts, "lengths": lengths, "label_counts": label_counts, "files": files, "lines": numbers}
        for name, values in columns.items():
            self._spooled[name].write(values.astype(dtype_of(KINDS[name])).tobytes())

    def finish(self, corpus: Corpus, metadata: Mapping[str, str]) -> None:
        """Write the file: to a temporary name, flushed, renamed. ``metadata`` is that of any store."""
        said = {**metadata, CORPUS: json.dumps(dataclasses.asdict(corpus), ensure_ascii=False)}
        arrays = {name: (kind, self._spooled[name]) for name, kind in KINDS.items()}
        write_atomic(self._path, lambda temporary: write_parts(temporary, said, arrays))


def open_documents(path: Path, header: dict[str, Any], start: int) -> Documents:
    """Map a split; ``header`` ends where the arrays ``start``. Raises DataError where it or a file is not as it was."""
    try:
        corpus = from_json(Corpus, json.loads(header["__metadata__"][CORPUS]))
        places = {name: (header[name]["shape"][0], header[name]["data_offsets"]) for name in KINDS}
        sizes = {name: dtype_of(kind).itemsize for name, kind in KINDS.items()}
        whole = all(end - begin == count * sizes[name] for name, (count, (begin, end)) in places.items())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged(path) from None
    if not whole or len({count for count, _ in places.values()}) != 1:
        raise damaged(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = {
        name: np.frombuffer(mapped, dtype_of(KINDS[name]), count, start + offsets[0])
        for name, (count, offsets) in places.items()
    }
    reader = OpenFiles()
    ids = StretchValues(corpus.files, corpus.stretches, reader)
    starts, lengths = found["starts"].view("<i8"), found["lengths"].view("<i4")
    if not len(starts) or int(starts[-1]) + int(lengths[-1]) != len(ids):
        raise damaged(path)
    used = sorted({stretch.file for stretch in corpus.stretches})
    require_unchanged([corpus.files[number] for number in used])
    if any(corpus.files[number].masked for number in used):
        trained: Any = StretchValues(corpus.files, corpus.stretches, reader, labels=True)
    else:
        trained = np.broadcast_to(np.True_, len(ids))
    rows = TokenRows(ids, trained, starts, lengths, found["label_counts"].view("<i4"))
    return Documents(rows, corpus, found["files"], found["lines"])
