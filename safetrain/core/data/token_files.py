"""Reads tokens from files when they are sliced, for token stores and for tokenized corpora.

Files are neither mapped nor cached, so only tokens in use take memory.
"""

import functools
import hashlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.errors import DataError
from safetrain.core.formatting import dvc

SAMPLES, SAMPLE_BYTES = 16, 2**16  # of a file, evenly spaced from its first to its last bytes


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
    """Hash the size and 1 MiB of evenly spaced samples of a file; raises OSError.

    Validation hashes whole files; the checks of every run cannot read terabytes.
    """
    size = path.stat().st_size
    state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb", buffering=0) as file:
        for place in np.linspace(0, max(0, size - SAMPLE_BYTES), SAMPLES).astype(np.int64).tolist():
            file.seek(place)
            state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()


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
