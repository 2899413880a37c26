"""Events arrive as they were sent; the journal keeps what happened to a run, whatever happens to its file."""

import resource
from pathlib import Path

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
from safetrain.core.records.metrics import StepRecord

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


def test_it_keeps_progress_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.take(Begun(100, 40, "training"))
    for step in range(41, 60):
        journal.take(StepRecord(step, 1.0, 1.5, None, 1e-4, 0.5, 20, 900.0, 1, 1, 2.0 * step))
    assert events_in(path) == [Begun(100, 40, "training"), Progress(41, 82.0, 0)]


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
