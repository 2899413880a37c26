"""Writes the token stores of data/validated, in the format of core/data/store.py."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.store import (
    CORPUS,
    KINDS,
    OF_DOCUMENTS,
    OF_QUESTIONS,
    OF_ROWS,
    PAIRS,
    VERSION,
    Corpus,
    Provenance,
)
from safetrain.core.data.token_rows import Question
from safetrain.core.model.files import header_of
from safetrain.core.storage.files import write_atomic


class StoreWriter(contextlib.ExitStack):
    """Writes a store atomically. Arrays wait in scratch files, so memory does not grow with the number of rows."""

    def __init__(self, path: Path, *, documents: bool = False) -> None:
        """``documents``: the store of a corpus, whose tokens stay in their own files."""
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._types, self._labels = path, OF_DOCUMENTS if documents else OF_ROWS, 0
        files = {name: tempfile.TemporaryFile(dir=path.parent) for name in self._types}  # noqa: SIM115
        self._arrays = {name: self.enter_context(file) for name, file in files.items()}

    def __len__(self) -> int:
        return self._count("row_ends")

    def add(
        self, ids: np.ndarray, trained: np.ndarray, lengths: np.ndarray, label_counts: np.ndarray, files: np.ndarray,
        lines: np.ndarray,
    ) -> None:  # fmt: skip
        """Add rows: ids, whether each id is a label, and each row's length, label count, file and line (from 1)."""
        self._labels += int(np.count_nonzero(trained))
        ends = self._count("ids") + np.cumsum(lengths)
        self._put(ids=ids, trained=trained, row_ends=ends, label_counts=label_counts, files=files, lines=lines)

    def add_question(self, question: Question) -> None:
        """Add the question of a row, in the order of the rows."""
        text = np.frombuffer(question.text.encode("utf-8"), dtype=np.uint8)
        prompt, answer = np.array(question.prompt), np.array(question.answer)
        self._put(question_rows=np.array([question.row]), prompt_ids=prompt, answer_ids=answer, question_texts=text)
        self._put(**{ends: np.array([self._count(values)]) for ends, values in OF_QUESTIONS.items()})

    def add_documents(self, lengths: np.ndarray, file: int, numbers: np.ndarray) -> None:
        """Add non-empty documents of one file of a corpus; ``numbers`` (documents,) count from 1."""
        self._put(lengths=lengths, files=np.full(len(lengths), file), lines=numbers)

    def finish(self, made: Provenance, files: Sequence[str], label_bytes: int = 0, *, pairs: bool = False) -> None:
        """Write the store. ``label_bytes``: UTF-8 bytes of all answers; ``pairs``: each two rows are a pair."""
        digest = self._digest("row_ends", self._digest("ids") + self._digest("trained"))
        self._write(made, digest.hex(), files, label_bytes / max(1, self._labels), **({PAIRS: "1"} if pairs else {}))

    def finish_corpus(self, made: Provenance, digest: str, corpus: Corpus, label_bytes: float) -> None:
        """Write the store of a split of a corpus. ``label_bytes``: mean UTF-8 bytes of a label."""
        text = json.dumps(dataclasses.asdict(corpus), ensure_ascii=False)
        self._write(made, digest, [file.path for file in corpus.files], label_bytes, **{CORPUS: text})

    def _put(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self._arrays[name].write(values.astype(self._types[name]).tobytes())

    def _count(self, name: str) -> int:
        """How many numbers an array has so far."""
        return self._arrays[name].tell() // np.dtype(self._types[name]).itemsize

    def _digest(self, name: str, before: bytes = b"") -> bytes:
        """Hash ``before`` and then the array ``name``."""
        self._arrays[name].seek(0)
        return hashlib.file_digest(self._arrays[name], lambda: hashlib.blake2b(before, digest_size=16)).digest()

    def _write(self, made: Provenance, digest: str, files: Sequence[str], label_bytes: float, **more: str) -> None:
        metadata = {
            "version": str(VERSION),
            "digest": digest,
            "made": json.dumps(dataclasses.asdict(made), ensure_ascii=False),
            "files": json.dumps(list(files), ensure_ascii=False),
            "label_bytes": repr(label_bytes),
            **more,
        }
        order = sorted(self._types, key=lambda name: -np.dtype(self._types[name]).itemsize)  # for alignment
        parts = [(name, KINDS[self._types[name]], [self._count(name)], self._arrays[name].tell()) for name in order]

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(header_of(parts, metadata))
                for name in order:
                    self._arrays[name].seek(0)
                    shutil.copyfileobj(self._arrays[name], file)

        write_atomic(self._path, write)
