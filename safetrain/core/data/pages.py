"""Gives pages of a mapped file back once they were read, so that reading all of it takes a MiB or two of memory."""

import mmap

MOST_BYTES = 2**20  # that may be mapped before they are given back
AROUND_BYTES = 2 * 2**16  # that Linux maps around a row's ids and around its labels


class Pages:
    """Counts what is read of a file and gives its pages back; they stay in the system's cache."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._bytes, self._advice = mapped, 0, ""

    def read_row(self, size_bytes: int) -> None:
        """A row somewhere in the file is about to be read: the system should not read ahead."""
        self._read(size_bytes + AROUND_BYTES, "MADV_RANDOM")

    def read_along(self, size_bytes: int) -> None:
        """A stretch of the file is about to be read, and probably the next one after it."""
        self._read(size_bytes, "MADV_NORMAL")

    def give_back(self) -> None:
        """Let go of what was read."""
        self._advise("MADV_DONTNEED")
        self._bytes = 0

    def _read(self, size_bytes: int, advice: str) -> None:
        if self._advice != advice:
            self._advise(advice)
            self._advice = advice
        if self._bytes > MOST_BYTES:
            self.give_back()
        self._bytes += size_bytes

    def _advise(self, name: str) -> None:
        """Give the system this advice, if the platform knows it."""
        option = getattr(mmap, name, None)
        if option is not None:
            self._mapped.madvise(option)
