"""Files that others write, read again and again: what is new of a long one, a small one only when it has changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

CHUNK_BYTES = 2**20
Value = TypeVar("Value")


class Tail:
    """Whole lines that are appended to a file; a new file in its place is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0
        self.unread_bytes = 0  # after the last call
        self.is_new = False  # what was returned before the last call is void

    def lines(self) -> list[bytes]:
        """New ones, about CHUNK_BYTES of them; more are left where there are ``unread_bytes``."""
        self.is_new, self.unread_bytes = False, 0
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if (facts.st_dev, facts.st_ino) != self._file or facts.st_size < self._read:
                    self._file, self._read, self.is_new = (facts.st_dev, facts.st_ino), 0, True
                file.seek(self._read)
                chunk = file.read(CHUNK_BYTES)
        except OSError:
            self.is_new = self._file is not None and not self._path.exists()
            self._file = None if self.is_new else self._file
            return []
        whole = chunk.rfind(b"\n") + 1
        self._read += whole
        self.unread_bytes = facts.st_size - self._read if whole and len(chunk) == CHUNK_BYTES else 0
        return chunk[:whole].splitlines()


class Changing(Generic[Value]):
    """A small file that is replaced as a whole; read only when it has changed."""

    def __init__(self, path: Path, read: Callable[[Path], Value | None]) -> None:
        self._path, self._of = path, read
        self._seen: tuple[int, int, int] | None = None
        self._value: Value | None = None

    def value(self) -> Value | None:
        """None where it is absent, or no such record."""
        try:
            facts = self._path.stat()
            seen = facts.st_ino, facts.st_mtime_ns, facts.st_size
        except OSError:
            self._seen, self._value = None, None
            return None
        if seen != self._seen:
            self._seen, self._value = seen, self._of(self._path)
        return self._value
