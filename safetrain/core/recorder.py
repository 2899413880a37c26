"""The flight recorder: a ring of records in a memory-mapped file, written before and after each phase of training.

The pages belong to the kernel, so records survive SIGKILL, an abort or a segmentation fault. Writing one is a copy in
memory (measured: benchmarks/results/bench_recorder.md). The supervisor flushes the ring to the disk against a crash of
the machine; the training never waits for the flush.
"""

import contextlib
import dataclasses
import enum
import json
import mmap
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from safetrain.core.memory.system import footprint_bytes, sysctl_text
from safetrain.core.storage.files import make_durable

MAGIC = b"SAFETRN3"
HEADER_BYTES = 512
SLOTS = 4096
MOST_ROWS = 8  # most row ids in a record
# number, wall clock, monotonic clock, phase, edge, step, micro-batch, rows, tokens, predicted peak, active, peak,
# cache, footprint, data segment, loss, first row ids
LAYOUT = struct.Struct(f"<QddBBIIIIQQQQQQd{MOST_ROWS}I")
NUMBERS = np.dtype([("number", "<u8"), ("rest", f"V{LAYOUT.size - 8}")])
RING_BYTES = HEADER_BYTES + SLOTS * LAYOUT.size
MEMORY_SECONDS = 0.1  # between readings of the process's own memory; a reading costs half a record
FLUSH_SECONDS = 2.0  # between flushes to the disk


class Phase(enum.IntEnum):
    """The current work of a training run. ``gradient`` covers forward, loss and backward, unless the run is traced."""

    START = 0
    LOAD_DATA = 1
    LOAD_MODEL = 2
    RESUME = 3
    GRADIENT = 4
    FORWARD = 5
    LOSS = 6
    BACKWARD = 7
    OPTIMIZER = 8
    EVALUATE = 9
    SAVE = 10
    WAIT = 11  # for room on the disk
    FINISH = 12
    EXCHANGE = 13  # with the other ranks
    VERIFY = 14  # the adapter's folder against the model in memory

    @property
    def label(self) -> str:
        """The phase's name in words."""
        return self.name.lower().replace("_", " ")


class Edge(enum.IntEnum):
    """Whether a record was made before or after its phase."""

    BEFORE = 0
    AFTER = 1


PHASES = frozenset(Phase)


@dataclass(frozen=True)
class Work:
    """The work of a phase: step, micro-batch and so on."""

    step: int = 0  # the update in progress, from 1; for saving and validation, the updates made so far
    micro_batch: int = 0
    rows: int = 0
    tokens: int = 0
    row_ids: tuple[int, ...] = ()  # numbers of the first few rows, from 1


NO_WORK = Work()


@dataclass(frozen=True)
class FlightRecord:
    """The training's position at one moment, and its memory."""

    number: int
    wall_seconds: float
    monotonic_seconds: float  # the machine's clock, the same in all processes
    phase: Phase
    edge: Edge
    work: Work
    predicted_peak_bytes: int
    active_bytes: int  # of mlx's allocator, like the next two
    peak_bytes: int
    cache_bytes: int
    footprint_bytes: int
    data_bytes: int  # private writable memory, which RLIMIT_DATA counts; 0 where the system does not say
    loss: float  # of the last update, in nats per label

    @property
    def phase_label(self) -> str:
        """``gradient``, or ``after gradient`` once the phase is over."""
        return self.phase.label if self.edge is Edge.BEFORE else f"after {self.phase.label}"


@dataclass(frozen=True)
class FlightHeader:
    """The process that writes the records."""

    pid: int
    boot_id: str
    started_seconds: float
    device: str


class Recorder:
    """Writes the ring. As soon as the engine knows the device, it sets ``read_allocator`` and calls ``device``."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        # all blocks and pages from the start: without disk space a mapped page kills the process, and no record waits
        os.pwrite(descriptor, bytes(RING_BYTES), 0)
        self._ring = mmap.mmap(descriptor, RING_BYTES)
        self._number, self._memory_read_at = 0, 0.0
        self._last: tuple[Phase, Edge, Work] = Phase.LOAD_DATA, Edge.BEFORE, NO_WORK
        self._footprint, self._data = 0, 0
        self.read_allocator: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)  # active, peak, cache
        self.predicted_peak_bytes, self.loss = 0, 0.0
        self.device("unknown")

    def device(self, name: str) -> None:
        """Write the header, with the name of the device."""
        header = FlightHeader(os.getpid(), boot_id(), time.time(), name)
        self._ring[:HEADER_BYTES] = (MAGIC + json.dumps(dataclasses.asdict(header)).encode()).ljust(HEADER_BYTES)

    @contextmanager
    def phase(self, phase: Phase, work: Work = NO_WORK) -> Iterator[None]:
        """Record before and after the block; after only if it succeeds, so the last record names what failed."""
        self.write(phase, Edge.BEFORE, work)
        yield
        self.write(phase, Edge.AFTER, work)

    def write(self, phase: Phase, edge: Edge, work: Work) -> None:
        """Add one record. Its number is written last, so a torn record has no number."""
        self._number += 1
        self._last = phase, edge, work
        now = time.monotonic()
        if now - self._memory_read_at > MEMORY_SECONDS:
            self._memory_read_at = now
            self._footprint = footprint_bytes(os.getpid())
            self._data = getattr(psutil.Process().memory_info(), "data", 0)
        rows = (*work.row_ids[:MOST_ROWS], *[0] * (MOST_ROWS - len(work.row_ids)))
        place = HEADER_BYTES + (self._number - 1) % SLOTS * LAYOUT.size
        LAYOUT.pack_into(
            self._ring, place, 0, time.time(), now, phase, edge, work.step, work.micro_batch, work.rows, work.tokens,
            self.predicted_peak_bytes, *self.read_allocator(), self._footprint, self._data, self.loss, *rows,
        )  # fmt: skip
        struct.pack_into("<Q", self._ring, place, self._number)

    def repeat(self) -> None:
        """Add the last record again, to show that slow work makes progress."""
        self.write(*self._last)


class FlightReader:
    """Follows a recorder file. ``records`` holds the ring's records, oldest first; reading changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flushed_at = 0.0
        self.header: FlightHeader | None = None
        self.records: deque[FlightRecord] = deque(maxlen=SLOTS)

    @property
    def last(self) -> FlightRecord | None:
        return self.records[-1] if self.records else None

    def read(self) -> list[FlightRecord]:
        """Read and return the records written since the last call, oldest first, without torn ones."""
        try:
            ring = self._path.read_bytes()
            if len(ring) != RING_BYTES or not ring.startswith(MAGIC):  # its writer is still making it, or it is damaged
                return []
            self.header = FlightHeader(**json.loads(ring[len(MAGIC) : HEADER_BYTES]))
        except (OSError, ValueError, TypeError):  # no file yet, a failing disk, a header that is being written
            return []
        numbers = np.frombuffer(ring, NUMBERS, SLOTS, HEADER_BYTES)["number"]
        slots = np.flatnonzero(numbers > (self.last.number if self.last else 0)).tolist()
        new = [record for slot in slots if (record := _record_in(ring, slot)) is not None]
        new.sort(key=lambda record: record.number)
        self.records.extend(new)
        return new

    def make_durable(self) -> None:
        """Flush the ring to the disk, at most every few seconds; a failing disk must not end the supervisor.

        On macOS, fsync does not write what another process wrote through a mapping (macfuse#202), so this maps the ring
        and flushes the mapping.
        """
        if time.monotonic() - self._flushed_at < FLUSH_SECONDS:
            return
        self._flushed_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError), self._path.open("r+b") as file:  # gone, or still empty
            if sys.platform == "darwin":
                with mmap.mmap(file.fileno(), 0) as ring:
                    ring.flush()
            make_durable(file.fileno())


def read_flight(path: Path) -> FlightReader:
    """Read the header and records of a recorder file; empty if it is missing."""
    reader = FlightReader(path)
    reader.read()
    return reader


def row_ids(rows: Sequence[int]) -> tuple[int, ...]:
    """Convert the first MOST_ROWS row indices to line numbers."""
    return tuple(row + 1 for row in rows[:MOST_ROWS])


def boot_id() -> str:
    """Return the system's id of the current boot; empty if it has none."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.is_file():
        return linux.read_text().strip()
    return sysctl_text("kern.bootsessionuuid") if sys.platform == "darwin" else ""


def _record_in(ring: bytes, slot: int) -> FlightRecord | None:
    """Parse the record of a slot; None if it is empty or torn."""
    values = LAYOUT.unpack_from(ring, HEADER_BYTES + slot * LAYOUT.size)
    number, wall, monotonic, phase, edge, step, micro_batch, rows, tokens = values[:9]
    if (number - 1) % SLOTS != slot or phase not in PHASES or edge > Edge.AFTER:
        return None
    ids = tuple(row for row in values[16 : 16 + min(rows, MOST_ROWS)] if row)  # validation rows have no number
    work = Work(step, micro_batch, rows, tokens, ids)
    return FlightRecord(number, wall, monotonic, Phase(phase), Edge(edge), work, *values[9:16])


@dataclass(frozen=True)
class RunMarker:
    """flight/run.json, which exists from the start of a training process until its end is explained."""

    boot_id: str
    command: str  # as the user typed it
    started_seconds: float  # wall clock
    limit_bytes: int = 0  # on the process's memory
    limit_name: str = ""


def living_process(pid: int) -> psutil.Process | None:
    """Return the process with this id if it runs and is not a zombie."""
    try:
        process = psutil.Process(pid) if pid > 0 else None
        return None if process is None or process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None
