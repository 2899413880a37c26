"""Deadlines are learnt from the run itself: a slow phase is not a hang, and a stopped clock is not one either."""

import time

import pytest

from safetrain.core.recorder import HANG_FIRST_TIME, HANG_TIMES_LONGEST, NO_WORK, Edge, FlightRecord, Phase
from safetrain.guard.process import Heartbeat, MemoryReadings, Sampler

FLOOR = 10.0


def record(phase: Phase, seconds: float, edge: Edge = Edge.BEFORE) -> FlightRecord:
    return FlightRecord(1, 0.0, seconds, phase, edge, NO_WORK, 0, 0, 0, 0, 0, 0, 0.0)


def fed(*records: FlightRecord) -> Heartbeat:
    heartbeat = Heartbeat(FLOOR)
    heartbeat.feed(list(records))
    return heartbeat


def test_the_longest_of_each_phase_is_learnt_apart() -> None:
    now = time.monotonic()
    heartbeat = fed(
        record(Phase.GRADIENT, now - 100),
        record(Phase.GRADIENT, now - 70, Edge.AFTER),  # 30 s
        record(Phase.GRADIENT, now - 69),
        record(Phase.GRADIENT, now - 67, Edge.AFTER),  # 2 s: the longest counts
        record(Phase.EVALUATE, now - 66),
        record(Phase.EVALUATE, now - 26, Edge.AFTER),  # 40 s
        record(Phase.GRADIENT, now - 25),
    )
    assert heartbeat.allowed_seconds() == pytest.approx(HANG_TIMES_LONGEST * 30)
    heartbeat.feed([record(Phase.EVALUATE, now - 24)])
    assert heartbeat.allowed_seconds() == pytest.approx(HANG_TIMES_LONGEST * 40)
    heartbeat.feed([record(Phase.SAVE, now - 23)])  # never seen
    assert heartbeat.allowed_seconds() == HANG_FIRST_TIME * FLOOR


def test_what_is_usually_quick_is_still_given_the_floor() -> None:
    now = time.monotonic()
    quick = [record(Phase.GRADIENT, now - 30), record(Phase.GRADIENT, now - 29.9, Edge.AFTER)]
    within = fed(*quick, record(Phase.GRADIENT, now - 0.9 * FLOOR))
    assert within.allowed_seconds() == FLOOR
    assert within.overdue_seconds() == 0.0
    beyond = fed(*quick, record(Phase.GRADIENT, now - 1.1 * FLOOR))
    assert beyond.overdue_seconds() == pytest.approx(1.1 * FLOOR, abs=1.0)


def test_waiting_for_room_on_the_disk_may_take_for_ever() -> None:
    now = time.monotonic()
    waiting = fed(record(Phase.SAVE, now - 10**6 - 1), record(Phase.WAIT, now - 10**6))
    assert waiting.allowed_seconds() is None
    assert waiting.overdue_seconds() == 0.0
    waiting.feed([record(Phase.WAIT, now - 10**5, Edge.AFTER)])  # there is room, and then nothing
    assert waiting.overdue_seconds() == pytest.approx(10**5, abs=1.0)


def test_a_record_from_before_the_pause_that_is_read_after_it_does_not_take_the_pardon_back() -> None:
    """What the process records as Ctrl-Z comes is still in the ring when both go on."""
    now = time.monotonic()
    heartbeat = fed(record(Phase.GRADIENT, now - 10**4), record(Phase.GRADIENT, now - 10**4 + 1, Edge.AFTER))
    heartbeat.forgive(now - 10**4 + 2, now)
    heartbeat.feed([record(Phase.GRADIENT, now - 10**4 + 1.5)])
    assert heartbeat.overdue_seconds() == 0.0


def test_only_the_pause_is_forgiven() -> None:
    now = time.monotonic()
    heartbeat = fed(record(Phase.GRADIENT, now - 10**4))
    heartbeat.forgive(now - 6000, now - 3000)
    heartbeat.forgive(now - 4000, now - 2000)  # the same pause, seen twice
    assert heartbeat.overdue_seconds() == pytest.approx(6000, abs=1.0)


def test_a_forgiven_pause_is_not_learnt_as_how_long_the_phase_takes() -> None:
    """Ctrl-Z over lunch must not make a real hang of the afternoon look short, nor a long phase look quick."""
    now = time.monotonic()
    heartbeat = fed(record(Phase.GRADIENT, now - 3600))
    heartbeat.forgive(now - 3600, now)
    heartbeat.feed([record(Phase.GRADIENT, now + 1, Edge.AFTER), record(Phase.GRADIENT, now + 2)])
    assert heartbeat.allowed_seconds() == HANG_FIRST_TIME * FLOOR


def test_what_was_seen_hours_ago_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    kills = iter((0, 0, 1, 1, 1))
    monkeypatch.setattr("safetrain.guard.process.oom_kills", lambda _groups: next(kills))
    seen, usual = Sampler(None), MemoryReadings(2, 3, 900, 0.0, 1)
    assert seen.recent() == MemoryReadings()
    seen.keep(0.0, usual)
    seen.keep(1.0, MemoryReadings(80, 90, 1, 70.0, 4))
    assert seen.recent() == MemoryReadings(80, 90, 1, 70.0, 4, 1)
    seen.keep(3600.0, MemoryReadings(2, 3, 900, 0.0, 1, 1))
    assert seen.recent() == MemoryReadings(2, 3, 900, 0.0, 1, 0)
