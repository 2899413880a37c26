"""Files of token ids left where they are (`*.ds`, as datatrove writes them), and stretches of them as one sequence.

Nothing is mapped: a stretch is read when it is needed, so a corpus of any size takes the memory of what is in use.
"""

import collections
import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.errors import DataError
from safetrain.core.formatting import dvc

LOSS_SUFFIX = ".loss"  # beside a file of tokens: a byte for each, 0 if it is not a label
MOST_OPEN = 64  # files: a Mac allows a process 256
SAMPLES, SAMPLE_BYTES = 16, 2**16  # of a file, evenly spread, the first and the last bytes among them


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens as it was validated."""

    path: str
    tokens: int
    token_bytes: int  # 2 or 4, little-endian
    masked: bool  # a file beside it says which tokens are labels
    digest: str  # of sampled bytes of both

    @property
    def has_changed(self) -> bool:
        """Whether size or sampled bytes are others now; raises OSError where it is gone."""
        path = Path(self.path)
        return path.stat().st_size != self.tokens * self.token_bytes or sampled_digest(path, self.masked) != self.digest


@dataclass(frozen=True)
class Stretch:
    """Whole documents of a file that stand one after the other."""

    file: int
    begin: int  # tokens
    end: int


def sampled_digest(path: Path, masked: bool) -> str:
    """Of sizes, and of 1 MiB of the tokens and as much of the mask, evenly spread; raises OSError.

    Whole files are hashed when they are validated; what looks at them every time reads no terabyte.
    """
    state = hashlib.blake2b(digest_size=16)
    for each in (path, loss_path(path)) if masked else (path,):
        size = each.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with each.open("rb", buffering=0) as file:
            for place in np.linspace(0, max(0, size - SAMPLE_BYTES), SAMPLES).astype(np.int64).tolist():
                file.seek(place)
                state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()


def loss_path(path: Path) -> Path:
    """Where the mask of a file of tokens is."""
    return path.with_name(path.name + LOSS_SUFFIX)


def require_unchanged(files: Sequence[TokenFile]) -> None:
    """Raise DataError where a file is gone, or another than was validated."""
    for file in files:
        try:
            what = "is not the one that was validated" if file.has_changed else ""
        except OSError as error:
            what = f"cannot be read: {os.strerror(error.errno or 0)}"
        if what:
            raise DataError(
                f"A file of the corpus {what}.",
                where=file.path,
                expected=f"{file.tokens * file.token_bytes} bytes, as validate_data saw them",
                do=f"put it back, or validate the corpus as it is now: {dvc()} repro -f -s validate_data",
            )


class OpenFiles:
    """Reads bytes of many files with few of them open; closes them when it is collected."""

    def __init__(self) -> None:
        self._open: collections.OrderedDict[Path, int] = collections.OrderedDict()  # descriptors
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)

    def __len__(self) -> int:
        return len(self._open)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """So many bytes; raises DataError where they are not there."""
        parts, rest = list[bytes](), size
        with self._lock:
            try:
                file = self._opened(path)
                while rest and (part := os.pread(file, rest, offset + size - rest)):  # Linux gives 2 GiB at most
                    parts.append(part)
                    rest -= len(part)
            except OSError as error:
                raise DataError(f"The corpus cannot be read: {error.strerror}.", where=str(path)) from None
        if rest:
            raise DataError(
                "A file of the corpus has become shorter.",
                where=str(path),
                expected=f"{offset + size} bytes or more",
                do="put it back, and go on: the same command resumes",
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _opened(self, path: Path) -> int:
        file = self._open.pop(path, None)
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if file is None else file
        if len(self._open) > MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return self._open[path]


def _close(files: collections.OrderedDict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


class StretchValues:
    """A number for each token of some stretches, one after the other, read as it is sliced: ids, or what is a label."""

    def __init__(
        self, files: Sequence[TokenFile], stretches: Sequence[Stretch], reader: OpenFiles, *, labels: bool = False
    ) -> None:
        self._files, self._stretches, self._reader, self._labels = files, stretches, reader, labels
        self._paths = [loss_path(Path(file.path)) if labels else Path(file.path) for file in files]
        self._ends = np.cumsum([stretch.end - stretch.begin for stretch in stretches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, _ = place.indices(len(self))
        number, parts = int(np.searchsorted(self._ends, start, side="right")), list[np.ndarray]()
        while start < stop:
            end, stretch = int(self._ends[number]), self._stretches[number]
            count = min(stop, end) - start
            parts.append(self._read(stretch.file, stretch.end - (end - start), count))
            start, number = start + count, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([self._none(), *parts])

    def _none(self) -> np.ndarray:
        return np.zeros(0, dtype=np.bool_ if self._labels else np.uint32)

    def _read(self, number: int, begin: int, count: int) -> np.ndarray:
        file = self._files[number]
        if self._labels and not file.masked:
            return np.broadcast_to(np.True_, count)
        if self._labels:
            return np.frombuffer(self._reader.read(self._paths[number], begin, count), dtype=np.uint8) != 0
        raw = self._reader.read(self._paths[number], begin * file.token_bytes, count * file.token_bytes)
        return np.frombuffer(raw, dtype=f"<u{file.token_bytes}").astype(np.uint32)
