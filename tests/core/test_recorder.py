"""The flight recorder and the journal survive the death of their writer; a reader never sees half a record."""

import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.events import (
    Begun,
    Died,
    Event,
    EventPipe,
    Failed,
    Finished,
    Journal,
    Progress,
    Said,
    Started,
    parse_event,
    parse_journal,
)
from safetrain.core.recorder import (
    HEADER_BYTES,
    LAYOUT,
    MOST_ROWS,
    SLOTS,
    Edge,
    FlightReader,
    FlightRecord,
    Phase,
    Recorder,
    Work,
    boot_id,
    read_flight,
)
from safetrain.core.records.metrics import StepRecord

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
    assert found.header is not None
    assert (found.header.pid, found.header.boot_id, found.header.device) == (pid, boot_id(), "a device")
    assert [record.number for record in found.records] == list(range(1, 2 + 4 * 50))
    before, last = list(found.records)[-2:]
    assert (last.phase, last.edge, last.work) == (Phase.OPTIMIZER, Edge.BEFORE, Work(50))
    assert (before.phase, before.edge, before.work) == (Phase.GRADIENT, Edge.AFTER, Work(50, 0, 2, 150, (50, 51)))
    assert last.footprint_bytes > 2**20


@pytest.mark.parametrize("count", [10, SLOTS, 2 * SLOTS + 1])
def test_the_ring_is_whole_where_it_wraps_and_a_record_that_is_not_whole_is_skipped(tmp_path: Path, count: int) -> None:
    path = tmp_path / "recorder.bin"
    reader = FlightReader(path)
    fill(path, count)
    numbers = [record.number for record in reader.read()]  # one that was overtaken goes on with the newest
    assert (numbers == sorted(set(numbers)), numbers[-1], reader.read()) == (True, count, [])
    steps = [record.work.step for record in read(path)]
    assert steps == list(range(max(1, count - SLOTS + 1), count + 1))
    number_of(path, (count - 1) % SLOTS, 0)  # cut off
    number_of(path, (count - 4) % SLOTS, 10**9)  # of another place
    assert [record.work.step for record in read(path)] == [step for step in steps if step not in (count, count - 3)]


def test_everything_that_a_record_holds_comes_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recorder.bin")
    recorder.read_allocator = lambda: (2**40, 2**41, 2**42)
    recorder.predicted_peak_bytes, recorder.loss = 2**43, 0.125
    before = time.monotonic()
    recorder.write(Phase.EVALUATE, Edge.AFTER, Work(2**32 - 1, 2**32 - 1, 100, 2**31, tuple(range(1, 100))))
    with pytest.raises(ZeroDivisionError), recorder.phase(Phase.SAVE, Work(3)):
        raise ZeroDivisionError
    record, failed = read(tmp_path / "recorder.bin")
    assert (failed.phase, failed.edge, failed.work.step) == (Phase.SAVE, Edge.BEFORE, 3)
    assert record.work == Work(2**32 - 1, 2**32 - 1, 100, 2**31, tuple(range(1, MOST_ROWS + 1)))
    assert (record.active_bytes, record.peak_bytes, record.cache_bytes) == (2**40, 2**41, 2**42)
    assert (record.predicted_peak_bytes, record.loss) == (2**43, 0.125)
    assert before <= record.monotonic_seconds <= time.monotonic()
    assert record.wall_seconds == pytest.approx(time.time(), abs=60)


def test_files_that_are_not_ours_or_are_damaged_stop_no_training(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    assert read_flight(path).header is None
    size = HEADER_BYTES + SLOTS * LAYOUT.size
    for content in (b"", b"SAFE", os.urandom(size), b"SAFETRN1" + bytes(size)):
        path.write_bytes(content)
        assert (read_flight(path).header, read(path)) == (None, [])
    for kept in (7, HEADER_BYTES, -1):
        fill(path, 10)
        path.write_bytes(path.read_bytes()[:kept])
        assert (read_flight(path).header, read(path)) == (None, [])
    for place in (len(b"SAFETRN1") + 4, HEADER_BYTES + 24):  # a header that is not JSON, a phase that does not exist
        fill(path, 10)
        damaged = bytearray(path.read_bytes())
        damaged[place] = 0xFF
        path.write_bytes(damaged)
        assert [record.number for record in read(path)] in ([], list(range(2, 11)))


def test_a_reader_gives_each_record_once_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    seen, reader = list[FlightRecord](), FlightReader(path)
    assert reader.read() == []  # nothing is there yet
    process = writer(path, 10**9, pause=2e-4)
    try:
        deadline = time.monotonic() + 20
        while len(seen) < SLOTS + 100:
            assert time.monotonic() < deadline
            seen += reader.read()
            time.sleep(0.005)
    finally:
        kill(process)
    assert [record.number for record in seen] == list(range(1, len(seen) + 1))
    for record in seen[2:]:  # whole: number, phase, edge and work fit together
        step, place = (record.number + 1) // 4, (record.number + 1) % 4
        phase = Phase.GRADIENT if place < 2 else Phase.OPTIMIZER
        assert (record.work.step, record.phase, record.edge) == (step, phase, Edge(place % 2))
    seen += reader.read()
    assert seen[-1] == read(path)[-1]


def test_a_reader_follows_the_header(tmp_path: Path) -> None:
    path = tmp_path / "recorder.bin"
    recorder, reader = fill(path, 1), FlightReader(path)
    assert [record.number for record in reader.read()] == [1]
    recorder.device("Device(gpu, 0)")  # known only while it runs
    assert reader.read() == []
    assert reader.header is not None
    assert (reader.header.device, reader.header.pid) == ("Device(gpu, 0)", os.getpid())


RECORD = StepRecord(3, 0.5, 1.25, None, 1e-4, 0.75, 900, 50.5, 2**33, 2**34, 1.5)
EVENTS: list[Event] = [
    Begun(15, 4, "training on 18 rows\nof text"),
    RECORD,
    Said("the disk is full — ≥ 3 MiB"),
    Failed("TrainingError", "line one\nline two", 7),
    Finished(15),
]


def events_in(path: Path) -> list[Event]:
    return [entry.event for entry in parse_journal(path.read_bytes())]


def test_events_come_back_equal_a_line_each_and_a_torn_one_is_none(tmp_path: Path) -> None:
    with (tmp_path / "pipe").open("w+b") as file:
        pipe = EventPipe(file.fileno())
        for event in EVENTS:
            pipe.send(event)
    lines = (tmp_path / "pipe").read_bytes().splitlines(keepends=True)
    assert [parse_event(line) for line in lines] == EVENTS
    assert all(parse_event(line[:kept]) is None for line in lines for kept in range(len(line) - 1))


def test_every_kind_of_event_comes_back_and_only_those_of_this_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    before: list[Event] = [Started(), Begun(9, 0, "an earlier run"), Finished(9)]
    events: list[Event] = [
        Started(), Begun(9, 0, "this run"), Said("text"), Progress(1, 2.0, 3), Failed("Error", "text", 1),
        Died("killed", 3), Started(), Begun(9, 4, "continued"), Finished(9), Started(),
    ]  # fmt: skip
    for event in (*before, *events):
        journal.write(event)
    assert events_in(tmp_path / "journal.jsonl") == events
    journal.write(Begun(100, 40, "training"))
    for step in range(41, 60):  # of progress it keeps some
        journal.write(StepRecord(step, 1.0, 1.5, None, 1e-4, 0.5, 20, 900.0, 1, 1, 2.0 * step))
    assert events_in(tmp_path / "journal.jsonl")[-2:] == [Begun(100, 40, "training"), Progress(41, 82.0, 0)]


def test_a_line_that_a_power_cut_or_a_full_disk_has_cut_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(Said("before"))
    with path.open("ab") as file:
        file.write(b'\n{"type": "Said", "te')
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, usual[1]))
    try:
        journal.write(Said("lost"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    journal.write(Said("after"))
    assert events_in(path) == [Said("before"), Said("after")]
    (tmp_path / "a folder").mkdir()
    Journal(tmp_path / "a folder").write(Said("lost"))  # disturbs no training
