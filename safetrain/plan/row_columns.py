"""Numbers of each row on the disk, and which rows have the same: memory hardly grows with the number of rows."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.storage.files import full_disk_named

CHUNK = 2**16  # rows that are read at a time
SORTED = 2**18  # rows whose keys are sorted at a time, about


class RowColumns(contextlib.AbstractContextManager["RowColumns"]):
    """Columns by name, each in a scratch file of ``folder``. ``kinds``: NumPy's short names of their types."""

    def __init__(self, folder: Path, **kinds: str) -> None:
        self._files = {name: tempfile.TemporaryFile(dir=folder) for name in kinds}  # noqa: SIM115
        self._types = {name: np.dtype(kind) for name, kind in kinds.items()}
        self._count = 0

    def __exit__(self, *_ended: object) -> None:
        for file in self._files.values():
            file.close()

    def __len__(self) -> int:
        return self._count

    def add(self, **values: Sequence[int] | np.ndarray) -> None:
        """The next rows: as many numbers for each column."""
        for name, kind in self._types.items():
            self._files[name].write(np.asarray(values[name], dtype=kind).tobytes())
        self._count += len(next(iter(values.values())))

    def chunks(self, *names: str) -> Iterator[tuple[np.ndarray, ...]]:
        """The columns ``names`` of all rows, some thousand rows at a time."""
        for start in range(0, self._count, CHUNK):
            yield tuple(self._read(name, start, min(CHUNK, self._count - start)) for name in names)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """One column, some thousand rows at a time."""
        return (numbers for (numbers,) in self.chunks(name))

    def column(self, name: str) -> np.ndarray:
        """(rows,) all of it."""
        return self._read(name, 0, self._count)

    def one(self, name: str, row: int) -> int:
        """Of one row."""
        return int(self._read(name, row, 1)[0])

    def _read(self, name: str, start: int, count: int) -> np.ndarray:
        file, kind = self._files[name], self._types[name]
        file.flush()
        return np.frombuffer(read_at(file.fileno(), count * kind.itemsize, start * kind.itemsize), dtype=kind)


def first_alike(count: int, keys: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """(count,) uint32: the first row with the same key as each. ``keys()`` gives uint64 of all rows, piece by piece."""
    found = np.zeros(count, dtype=np.uint32)
    parts = -(-count // SORTED)
    for part in range(parts):
        values, rows = list[np.ndarray](), list[np.ndarray]()
        for mine, own in _of_part(part, parts, keys()):  # equal keys of a piece become one: many equal ones are few
            distinct, places = np.unique(own, return_index=True)
            values.append(distinct)
            rows.append(mine[places])
        known, places = np.unique(np.concatenate(values), return_index=True)
        firsts = np.concatenate(rows)[places]
        for mine, own in _of_part(part, parts, keys()):
            found[mine] = firsts[np.searchsorted(known, own)]
    return found


def first_among(keys: Callable[[], Iterable[np.ndarray]], rows: np.ndarray, among: np.ndarray) -> list[int | None]:
    """For a few ``rows``, ascending: the first row with the same key for which ``among`` (rows,) is true, if any."""
    own, start = list[int](), 0
    for values in keys():
        own += values[rows[(start <= rows) & (rows < start + len(values))] - start].tolist()
        start += len(values)
    found, start = dict[int, int](), 0
    for values in keys():
        for key in set(own) - set(found):
            same = np.flatnonzero((values == key) & among[start : start + len(values)])
            if len(same):
                found[key] = start + int(same[0])
        start += len(values)
    return [found.get(key) for key in own]


def _of_part(part: int, parts: int, keys: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows whose keys belong to one part, and these keys."""
    start = 0
    for values in keys:
        mine = np.flatnonzero((values >> np.uint64(33)) % np.uint64(parts) == part)
        yield start + mine, values[mine]
        start += len(values)


def keys_of(keys: Iterable[np.ndarray], rows: np.ndarray) -> Iterator[np.ndarray]:
    """``keys`` of the rows for which ``rows`` (rows,) is true, and 0 of all others."""
    start = 0
    for values in keys:
        yield np.where(rows[start : start + len(values)], values, np.uint64(0))
        start += len(values)


def ascending(counts: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that were counted, ascending, and how often each of them or a smaller one was."""
    values = sorted(counts)
    return np.array(values), np.cumsum([counts[value] for value in values])


def quantile(values: np.ndarray, ends: np.ndarray, share: float) -> float:
    """What NumPy's gives for all the numbers of which ``ascending`` says these two things."""
    place = (int(ends[-1]) - 1) * share
    both = values[np.searchsorted(ends, [int(place), -int(-place // 1)], "right")]
    return float(np.mean(both) if share == 0.5 else np.quantile(both, place % 1))


def named_when_full(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Raises DiskFullError where there is no room for what is written into ``folder``."""
    do = "free some space there: scratch files and what is written take some five times as much as the data"
    return full_disk_named("The disk is full.", folder, do)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """All of it: one call gives at most 2 GiB."""
    pieces = []
    while size:
        piece = os.pread(descriptor, min(size, 2**30), offset)
        if not piece:
            raise EOFError(f"{size} bytes are missing at {offset}")
        pieces.append(piece)
        size, offset = size - len(piece), offset + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
