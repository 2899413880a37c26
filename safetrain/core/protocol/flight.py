"""The flight recorder: a ring of records in a memory-mapped file, written before and after each phase of a training.

The pages belong to the kernel, so what was written is there after SIGKILL, abort or a segmentation fault, and costs a
copy in memory (measured: benchmarks/bench_recorder.py). Against a crash of the machine itself, the supervisor flushes
it to the disk at rare phases and every few seconds; the training never waits for that.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.memory.macos import sysctl_text
from safetrain.core.memory.process import footprint_bytes
from safetrain.core.storage.files import make_durable

MAGIC = b"SAFETRN1"
HEADER_BYTES = 512
SLOTS = 4096
FLUSH_SECONDS = 5.0
RARE_FLUSH_SECONDS = 1.0  # at a rare phase
LOOK_SECONDS = 0.1  # between looks at the process's own memory, half the cost of a record
MOST_ROWS = 8  # whose ids a record holds
# number, wall clock, monotonic clock, phase, edge, micro-batch, step, rows, tokens, predicted, active, peak, cache,
# footprint, data segment, loss, first rows
LAYOUT = struct.Struct(f"<QddBBHIIIQQQQQQd{MOST_ROWS}I")
STATM = Path("/proc/self/statm")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Phase(enum.IntEnum):
    """What a training is doing. ``gradient`` is forward, loss and backward in one, unless the run is traced."""

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
    EXCHANGE = 13  # with the other ranks: it may wait for them

    @property
    def label(self) -> str:
        """In words."""
        return self.name.lower().replace("_", " ")


RARE = (Phase.LOAD_DATA, Phase.LOAD_MODEL, Phase.RESUME, Phase.EVALUATE, Phase.SAVE, Phase.WAIT, Phase.FINISH)


class Edge(enum.IntEnum):
    """Whether a record was made before or after its phase."""

    BEFORE = 0
    AFTER = 1


PHASES, EDGES = frozenset(Phase), frozenset(Edge)


@dataclass(frozen=True)
class Work:
    """What a phase works on."""

    step: int = 0  # the update that is being made, from 1; at save and evaluation the updates made
    micro_batch: int = 0
    rows: int = 0
    tokens: int = 0
    row_ids: tuple[int, ...] = ()  # line numbers in data/validated/train.jsonl, the first few


NOTHING = Work()


@dataclass(frozen=True)
class Allocator:
    """What mlx says of its memory."""

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True)
class FlightRecord:
    """One record: where the training was at a moment, and its memory then."""

    number: int
    wall_seconds: float
    monotonic_seconds: float  # of the machine, the same in all processes
    phase: Phase
    edge: Edge
    work: Work
    predicted_peak_bytes: int
    allocator: Allocator
    footprint_bytes: int
    data_bytes: int  # private writable memory, what RLIMIT_DATA counts; 0 where the system does not say
    loss: float  # of the last update, nats per label


@dataclass(frozen=True)
class FlightHeader:
    """Whose records these are."""

    pid: int
    boot_id: str
    started_seconds: float
    device: str
    gpu_uuid: str = ""  # of an NVIDIA device, as nvidia-smi has it


class Recorder:
    """Writes the ring. ``read_allocator`` and ``device`` are set once the engine is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _allocate(path)
        self._ring = mmap.mmap(self._file, HEADER_BYTES + SLOTS * LAYOUT.size)
        self._statm = os.open(STATM, os.O_RDONLY) if STATM.exists() else None
        self._number, self._looked = 0, 0.0
        self._footprint, self._data = 0, 0
        self.read_allocator: Callable[[], Allocator] = Allocator
        self.predicted_peak_bytes, self.loss = 0, 0.0
        self.device("unknown")

    def device(self, name: str, gpu_uuid: str = "") -> None:
        """Write the header, with the name of the device."""
        header = FlightHeader(os.getpid(), boot_id(), time.time(), name, gpu_uuid)
        text = json.dumps(dataclasses.asdict(header)).encode()
        self._ring[:HEADER_BYTES] = (MAGIC + struct.pack("<I", len(text)) + text).ljust(HEADER_BYTES, b"\0")

    @contextmanager
    def phase(self, phase: Phase, work: Work = NOTHING) -> Iterator[None]:
        """Record before and after the block; after only if it succeeds, so the last record names what failed."""
        self.write(phase, Edge.BEFORE, work)
        yield
        self.write(phase, Edge.AFTER, work)

    def write(self, phase: Phase, edge: Edge, work: Work) -> None:
        """Add one record. Its number is written last: a record that was cut off has none."""
        self._number += 1
        now, allocator = time.monotonic(), self.read_allocator()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._footprint, self._data = self._memory()
        rows = (*work.row_ids[:MOST_ROWS], *[0] * (MOST_ROWS - len(work.row_ids)))
        place = HEADER_BYTES + (self._number - 1) % SLOTS * LAYOUT.size
        LAYOUT.pack_into(
            self._ring, place, 0, time.time(), now, phase, edge, work.micro_batch, work.step, work.rows, work.tokens,
            self.predicted_peak_bytes, allocator.active_bytes, allocator.peak_bytes, allocator.cache_bytes,
            self._footprint, self._data, self.loss, *rows,
        )  # fmt: skip
        struct.pack_into("<Q", self._ring, place, self._number)

    def _memory(self) -> tuple[int, int]:
        """(footprint, private writable) bytes of this process; /proc is read directly, which is fast."""
        if self._statm is None:
            return footprint_bytes(os.getpid()), 0
        fields = os.pread(self._statm, 256, 0).split()
        return int(fields[1]) * PAGE, int(fields[5]) * PAGE


def read_flight(path: Path) -> tuple[FlightHeader, list[FlightRecord]] | None:
    """Header and whole records, oldest first; None where there is no recorder file. The writer may be at work."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if content[: len(MAGIC)] != MAGIC or len(content) < HEADER_BYTES + SLOTS * LAYOUT.size:
        return None
    header = header_in(content)
    if header is None:
        return None
    found = (record_in(content, slot, place_of(slot)) for slot in range(SLOTS))
    return header, sorted((record for record in found if record is not None), key=lambda record: record.number)


class FlightReader:
    """Reads records as they are added, without copying the ring, and makes them durable.

    ``through_mapping``: on macOS fsync does not write what another process wrote through its mapping; a mapping must be
    flushed (macfuse#202). The ring is then mapped writable, but never written.
    """

    def __init__(self, path: Path, *, through_mapping: bool = sys.platform == "darwin") -> None:
        self._path, self._through_mapping = path, through_mapping
        self._seen, self._flushed = 0, 0.0
        self._ring: mmap.mmap | None = None
        self._file = -1

    def close(self) -> None:
        """Make the last records durable and let go of the file."""
        if self._ring is not None:
            self._make_durable(self._ring)
            self._ring.close()
            os.close(self._file)
            self._ring = None

    def new_records(self) -> list[FlightRecord]:
        """Records that were not returned before, oldest first."""
        ring = self._open()
        if ring is None:
            return []
        found: list[FlightRecord] = []
        while record := record_in(ring, slot := self._seen % SLOTS, place_of(slot)):
            if record.number <= self._seen:
                break
            found.append(record)
            self._seen = record.number
        now = time.monotonic()
        if now - self._flushed > (RARE_FLUSH_SECONDS if any(one.phase in RARE for one in found) else FLUSH_SECONDS):
            self._make_durable(ring)
            self._flushed = now
        return sorted(found, key=lambda record: record.number)

    def pid(self) -> int:
        """Of the writer; 0 until it has said so."""
        ring = self._open()
        header = header_in(ring[:HEADER_BYTES]) if ring is not None else None
        return header.pid if header is not None else 0

    def gpu_uuid(self) -> str:
        """Of the NVIDIA device that the writer uses; empty without one, and until it has said so."""
        header = header_in(self._ring[:HEADER_BYTES]) if self._ring is not None else None
        return header.gpu_uuid if header is not None else ""

    def _open(self) -> mmap.mmap | None:
        """The ring; None until its writer has made it."""
        if self._ring is None:
            if not self._path.is_file() or self._path.stat().st_size < HEADER_BYTES + SLOTS * LAYOUT.size:
                return None
            self._file = os.open(self._path, (os.O_RDWR if self._through_mapping else os.O_RDONLY) | os.O_CLOEXEC)
            access = mmap.ACCESS_WRITE if self._through_mapping else mmap.ACCESS_READ
            self._ring = mmap.mmap(self._file, 0, access=access)
        return self._ring

    def _make_durable(self, ring: mmap.mmap) -> None:
        """A disk that fails must not end the one who watches."""
        with contextlib.suppress(OSError):
            if self._through_mapping:
                ring.flush()
            make_durable(self._file)


def header_in(content: bytes) -> FlightHeader | None:
    """The header of the ring; None where it is damaged, or of another version."""
    (length,) = struct.unpack_from("<I", content, len(MAGIC))
    start = len(MAGIC) + 4
    try:
        return FlightHeader(**json.loads(content[start : start + length]))
    except (ValueError, TypeError):
        return None


def place_of(slot: int) -> int:
    """Of a slot, in the ring's bytes."""
    return HEADER_BYTES + slot * LAYOUT.size


def record_in(content: bytes | mmap.mmap, slot: int, place: int) -> FlightRecord | None:
    """The record of a slot, at a place in ``content``; None if it is empty or half written."""
    values = LAYOUT.unpack_from(content, place)
    number, wall, monotonic, phase, edge, micro, step, rows, tokens = values[:9]
    if number == 0 or (number - 1) % SLOTS != slot or phase not in PHASES or edge not in EDGES:
        return None
    predicted, active, peak, cache, footprint, data, loss = values[9:16]
    ids = tuple(row for row in values[16 : 16 + min(rows, MOST_ROWS)] if row)  # rows to validate on have no number
    work = Work(step, micro, rows, tokens, ids)
    allocator = Allocator(active, peak, cache)
    return FlightRecord(
        number, wall, monotonic, Phase(phase), Edge(edge), work, predicted, allocator, footprint, data, loss
    )


def _allocate(path: Path) -> int:
    """A new file with all its blocks: writing to a mapped page that the disk has no room for kills the process.

    A new file each time: the one before may still be mapped by a reader.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    size = HEADER_BYTES + SLOTS * LAYOUT.size
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    os.pwrite(descriptor, bytes(size), 0)  # in memory from the start, so that no record waits for a page
    return descriptor


def boot_id() -> str:
    """Changes when the machine is started; empty where the system has none."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.is_file():
        return linux.read_text().strip()
    return sysctl_text("kern.bootsessionuuid") if sys.platform == "darwin" else ""


def row_ids(rows: Sequence[int]) -> tuple[int, ...]:
    """Line numbers of rows given by index."""
    return tuple(row + 1 for row in rows[:MOST_ROWS])
