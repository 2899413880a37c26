"""Reads the flight recorder's ring again and again, only what is new of it, and changes nothing: no flush, no lock."""

import os
from collections import deque
from pathlib import Path

from safetrain.core.protocol.flight import (
    HEADER_BYTES,
    LAYOUT,
    SLOTS,
    FlightHeader,
    FlightRecord,
    header_in,
    place_of,
    read_flight,
    record_in,
)

SLOTS_AT_ONCE = 64


class FlightTail:
    """Follows one path, through every recorder file that is put there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self.header: FlightHeader | None = None
        self.records: deque[FlightRecord] = deque(maxlen=SLOTS)

    def read(self) -> None:
        """Take up what was written since the last time."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._forget()
            return
        try:
            found = os.fstat(descriptor)
            if self._file != (found.st_dev, found.st_ino) or self.header is None:
                self._read_all((found.st_dev, found.st_ino))
            else:
                self._read_new(descriptor)
        except OSError:  # a disk that fails: what was read stays
            pass
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        self._file, self.header = None, None
        self.records.clear()

    def _read_all(self, file: tuple[int, int]) -> None:
        self._forget()
        read = read_flight(self._path)
        if read is not None:
            self._file, self.header = file, read[0]
            self.records.extend(read[1])

    def _read_new(self, descriptor: int) -> None:
        front = os.pread(descriptor, HEADER_BYTES, 0)
        if len(front) < HEADER_BYTES:
            self._forget()
            return
        self.header = header_in(front) or self.header  # the device is told later
        while True:
            seen = self.records[-1].number if self.records else 0
            slot = seen % SLOTS
            part = os.pread(descriptor, min(SLOTS_AT_ONCE, SLOTS - slot) * LAYOUT.size, place_of(slot))
            for number in range(len(part) // LAYOUT.size):
                record = record_in(part, slot + number, number * LAYOUT.size)
                if record is None or record.number <= seen:
                    return
                if record.number > seen + 1 and self._file is not None:  # the ring has been round since
                    self._read_all(self._file)
                    return
                self.records.append(record)
                seen = record.number
            if not part:
                return
