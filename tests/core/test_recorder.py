"""The flight recorder survives the death of its writer, and a reader never sees a record that is not whole."""

import errno
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.recorder import (
    HEADER_BYTES,
    LAYOUT,
    MOST_ROWS,
    SLOTS,
    Allocator,
    Edge,
    FlightReader,
    FlightRecord,
    Phase,
    Recorder,
    Work,
    boot_id,
    read_flight,
)

# Writes four records a step, and stays in the last step's optimizer until it is killed.
WRITER = """
import sys
import time
from pathlib import Path
from safetrain.core.recorder import Edge, Phase, Recorder, Work
recorder = Recorder(Path(sys.argv[1]))
recorder.device("a device")
recorder.write(Phase.LOAD_MODEL, Edge.BEFORE, Work())
recorder.write(Phase.LOAD_MODEL, Edge.AFTER, Work())
for step in range(1, int(sys.argv[2]) + 1):
    recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(step, 0, 2, 100 + step, (step, step + 1)))
    recorder.write(Phase.GRADIENT, Edge.AFTER, Work(step, 0, 2, 100 + step, (step, step + 1)))
    recorder.write(Phase.OPTIMIZER, Edge.BEFORE, Work(step))
    if step == int(sys.argv[2]):
        print("there", flush=True)
        sys.stdin.read()
    recorder.write(Phase.OPTIMIZER, Edge.AFTER, Work(step))
    time.sleep(float(sys.argv[3]))
"""


def writer(path: Path, steps: int, pause: float = 0.0) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WRITER, str(path), str(steps), str(pause)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def killed_at_its_last_step(path: Path, steps: int) -> int:
    """The writer's process id."""
    process = writer(path, steps)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    kill(process)
    return process.pid


def read(path: Path) -> list[FlightRecord]:
    return list(read_flight(path).records)


def number_of(path: Path, slot: int, value: int) -> None:
    """Overwrite the number of the record in a slot."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + slot * LAYOUT.size)
        file.write(struct.pack("<Q", value))


def fill(path: Path, records: int) -> Recorder:
    recorder = Recorder(path)
    for step in range(1, records + 1):
        recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(step))
    return recorder


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "flight" / "recorder.bin"
    pid = killed_at_its_last_step(path, 50)
    found = read_flight(path)
    header, records = found.header, list(found.records)
    assert header is not None
    assert (header.pid, header.boot_id, header.device) == (pid, boot_id(), "a device")
    assert header.started_seconds == pytest.approx(time.time(), abs=60)
    assert [record.number for record in records] == list(range(1, 2 + 4 * 50))
    last, before = records[-1], records[-2]
    assert (last.phase, last.edge, last.work) == (Phase.OPTIMIZER, Edge.BEFORE, Work(50))
    assert (before.phase, before.edge) == (Phase.GRADIENT, Edge.AFTER)
    assert before.work == Work(50, 0, 2, 150, (50, 51))
    assert last.footprint_bytes > 2**20


@pytest.mark.parametrize("count", [SLOTS - 1, SLOTS, SLOTS + 1, 2 * SLOTS])
def test_the_ring_is_whole_where_it_wraps(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "recorder.bin", count)
    steps = [record.work.step for record in read(tmp_path / "recorder.bin")]
    assert steps == list(range(max(1, count - SLOTS + 1), count + 1))


@pytest.mark.parametrize("count", [10, SLOTS + 10])
def test_a_record_that_was_cut_off_is_skipped_and_the_one_before_is_the_last(tmp_path: Path, count: int) -> None:
    path = tmp_path / "recorder.bin"
    fill(path, count)
    number_of(path, (count - 1) % SLOTS, 0)
    records = read(path)
    assert records[-1].work.step == count - 1
    assert len(records) == min(count, SLOTS) - 1


def test_a_number_that_belongs_to_another_place_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    fill(path, 10)
    number_of(path, 4, 10**9)
    assert [record.number for record in read(path)] == [1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_everything_that_a_record_holds_comes_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recorder.bin")
    recorder.read_allocator = lambda: Allocator(2**40, 2**41, 2**42)
    recorder.predicted_peak_bytes, recorder.loss = 2**43, 0.125
    before = time.monotonic()
    recorder.write(Phase.EVALUATE, Edge.AFTER, Work(2**32 - 1, 2**32 - 1, 100, 2**31, tuple(range(1, 100))))
    (record,) = read(tmp_path / "recorder.bin")
    assert record.work == Work(2**32 - 1, 2**32 - 1, 100, 2**31, tuple(range(1, MOST_ROWS + 1)))
    assert record.allocator == Allocator(2**40, 2**41, 2**42)
    assert (record.predicted_peak_bytes, record.loss) == (2**43, 0.125)
    assert before <= record.monotonic_seconds <= time.monotonic()
    assert record.wall_seconds == pytest.approx(time.time(), abs=60)


def test_a_phase_that_fails_leaves_its_beginning_as_the_last_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recorder.bin")
    with recorder.phase(Phase.LOAD_DATA):
        pass
    with pytest.raises(ZeroDivisionError), recorder.phase(Phase.SAVE, Work(3)):
        raise ZeroDivisionError
    told = [(record.phase, record.edge, record.work.step) for record in read(tmp_path / "recorder.bin")]
    assert told == [
        (Phase.LOAD_DATA, Edge.BEFORE, 0),
        (Phase.LOAD_DATA, Edge.AFTER, 0),
        (Phase.SAVE, Edge.BEFORE, 3),
    ]


def test_files_that_are_none_of_ours_or_cut_off_are_none(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    assert read_flight(path).header is None
    size = HEADER_BYTES + SLOTS * LAYOUT.size
    for content in (b"", b"SAFE", bytes(size), os.urandom(size), b"SAFETRN1" + bytes(size)):
        path.write_bytes(content)
        assert (read_flight(path).header, read(path)) == (None, [])
    for kept in (7, 100, HEADER_BYTES, HEADER_BYTES + 5 * LAYOUT.size, -1):
        fill(path, 10)
        path.write_bytes(path.read_bytes()[:kept])
        assert (read_flight(path).header, read(path)) == (None, [])


@pytest.mark.parametrize("place", [len(b"SAFETRN1") + 4, HEADER_BYTES + 24])
def test_a_file_with_other_contents_stops_no_training(tmp_path: Path, place: int) -> None:
    """A header that is no JSON, a phase that does not exist: what is left of a disk that failed, or another version."""
    path = tmp_path / "recorder.bin"
    fill(path, 10)
    content = bytearray(path.read_bytes())
    content[place] = 0xFF
    path.write_bytes(content)
    assert [record.number for record in read(path)] in ([], list(range(2, 11)))


def test_a_reader_gives_each_record_once_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    seen: list[FlightRecord] = []
    reader = FlightReader(path)
    assert reader.read() == []  # nothing is there yet
    process = writer(path, 10**9, pause=2e-4)
    try:
        deadline = time.monotonic() + 20
        while len(seen) < 2 * SLOTS + 100:
            assert time.monotonic() < deadline
            seen += reader.read()
            time.sleep(0.005)
    finally:
        kill(process)
    assert [record.number for record in seen] == list(range(1, len(seen) + 1))
    for record in seen[2:]:  # whole: number, phase, edge and work fit together
        step, place = (record.number + 1) // 4, (record.number + 1) % 4
        assert record.work.step == step
        assert (record.phase, record.edge) == (
            Phase.GRADIENT if place < 2 else Phase.OPTIMIZER,
            Edge(place % 2),
        )
    seen += reader.read()
    assert reader.read() == []
    assert seen[-1] == read(path)[-1]


def test_a_reader_that_was_overtaken_goes_on_with_the_newest(tmp_path: Path) -> None:
    """A supervisor that was stopped for an hour."""
    path = tmp_path / "recorder.bin"
    recorder, reader = fill(path, 10), FlightReader(path)
    assert len(reader.read()) == 10
    for step in range(11, 10 + SLOTS + 500):
        recorder.write(Phase.GRADIENT, Edge.BEFORE, Work(step))
    numbers = [record.number for record in reader.read()]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 10
    assert numbers[-1] == 10 + SLOTS + 499
    assert reader.read() == []


def test_a_disk_that_refuses_to_flush_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "recorder.bin"
    fill(path, 3)
    reader = FlightReader(path)
    assert len(reader.read()) == 3
    monkeypatch.setattr(os, "fsync", refuse)
    reader.make_durable()


def test_making_it_durable_writes_nothing_also_through_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where what the writer's mapping holds is on the disk only then."""
    path = tmp_path / "recorder.bin"
    recorder = fill(path, 3)
    reader = FlightReader(path)
    reader.read()
    before = path.read_bytes()
    monkeypatch.setattr(sys, "platform", "darwin")
    reader.make_durable()
    assert path.read_bytes() == before
    recorder.write(Phase.SAVE, Edge.BEFORE, Work(4))
    assert [record.number for record in reader.read()] == [4]


def test_a_reader_follows_the_recorder_that_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    fill(path, 3)
    reader = FlightReader(path)
    assert len(reader.read()) == 3
    recorder = fill(path, 1)
    assert [record.number for record in reader.read()] == [1]
    assert len(reader.records) == 1
    recorder.device("Device(gpu, 0)")  # known only while it runs
    assert reader.read() == []
    assert reader.header is not None
    assert (reader.header.device, reader.header.pid) == ("Device(gpu, 0)", os.getpid())
    path.unlink()
    assert reader.read() == []
    assert reader.last is None


def test_a_new_recorder_in_the_old_one_s_place_on_the_disk_is_seen(tmp_path: Path) -> None:
    """A file system may give a new file the number of the one that was removed."""
    path = tmp_path / "recorder.bin"
    killed_at_its_last_step(path, 50)
    reader = FlightReader(path)
    assert len(reader.read()) > 3
    fill(tmp_path / "new.bin", 3)
    path.write_bytes((tmp_path / "new.bin").read_bytes())
    assert [record.number for record in reader.read()] == [1, 2, 3]
