"""Deadlines are learnt from the run itself: a slow phase is not a hang, and a stopped clock is not one either."""

import time

import pytest

from safetrain.core.recorder import NO_WORK, Edge, FlightRecord, Phase
from safetrain.guard.process import HANG_FIRST_TIME, HANG_TIMES_LONGEST, Heartbeat, MemoryReadings, Sampler

FLOOR, LONG = 10.0, 10.0**5
BEFORE, AFTER, GRADIENT, EVALUATE = Edge.BEFORE, Edge.AFTER, Phase.GRADIENT, Phase.EVALUATE
At = tuple[Phase, Edge, float]  # seconds ago
SLOW = [  # of 30 s and 2 s: the longest counts; of 40 s
    (GRADIENT, BEFORE, 100.0), (GRADIENT, AFTER, 70.0), (GRADIENT, BEFORE, 69.0), (GRADIENT, AFTER, 67.0),
    (EVALUATE, BEFORE, 66.0), (EVALUATE, AFTER, 26.0),
]  # fmt: skip
QUICK = [(GRADIENT, BEFORE, 30.0), (GRADIENT, AFTER, 29.9)]


@pytest.mark.parametrize(("records", "forgiven", "after", "allowed", "overdue"), [
    ([*SLOW, (GRADIENT, BEFORE, 25)], [], [], 30 * HANG_TIMES_LONGEST, 0),
    ([*SLOW, (EVALUATE, BEFORE, 24)], [], [], 40 * HANG_TIMES_LONGEST, 0),
    ([*SLOW, (Phase.SAVE, BEFORE, 23)], [], [], HANG_FIRST_TIME * FLOOR, 0),  # never seen
    ([*QUICK, (GRADIENT, BEFORE, 0.9 * FLOOR)], [], [], FLOOR, 0),  # what is usually quick is given the floor
    ([*QUICK, (GRADIENT, BEFORE, 1.1 * FLOOR)], [], [], FLOOR, 1.1 * FLOOR),
    ([(Phase.SAVE, BEFORE, 10 * LONG), (Phase.WAIT, BEFORE, 9 * LONG)], [], [], None, 0),  # for room on the disk
    ([(Phase.WAIT, BEFORE, 9 * LONG)], [], [(Phase.WAIT, AFTER, LONG)], HANG_FIRST_TIME * FLOOR, LONG),  # then nothing
    ([(GRADIENT, BEFORE, 9000)], [(6000, 3000), (4000, 2000)], [], HANG_FIRST_TIME * FLOOR, 5000),  # seen twice
    # What the process records as Ctrl-Z comes is still in the ring when both go on.
    ([(GRADIENT, BEFORE, 9000), (GRADIENT, AFTER, 8999)], [(8998, 0)], [(GRADIENT, BEFORE, 8998.5)], FLOOR, 0),
    # Ctrl-Z over lunch must not make a real hang of the afternoon look short, nor a long phase look quick.
    ([(GRADIENT, BEFORE, 3600)], [(3600, 0)], [(GRADIENT, AFTER, -1), (GRADIENT, BEFORE, -2)],
     HANG_FIRST_TIME * FLOOR, 0),
])  # fmt: skip
def test_deadlines_are_learnt_of_each_phase_apart_and_pauses_are_forgiven(
    records: list[At], forgiven: list[tuple[float, float]], after: list[At], allowed: float | None, overdue: float
) -> None:
    now, heartbeat = time.monotonic(), Heartbeat(FLOOR)

    def feed(found: list[At]) -> None:
        heartbeat.feed(
            [FlightRecord(1, 0.0, now - ago, phase, edge, NO_WORK, 0, 0, 0, 0, 0, 0, 0.0) for phase, edge, ago in found]
        )

    feed(records)
    for start, stop in forgiven:
        heartbeat.forgive(now - start, now - stop)
    feed(after)
    assert heartbeat.allowed_seconds() == (None if allowed is None else pytest.approx(allowed))
    assert heartbeat.overdue_seconds() == pytest.approx(overdue, abs=1.0)


def test_what_was_seen_hours_ago_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took all memory for a moment, and one of its processes was killed for it."""
    kills = iter((0, 0, 1, 1, 1))
    monkeypatch.setattr("safetrain.guard.process.oom_kills", lambda _groups: next(kills))
    seen, usual = Sampler(None), MemoryReadings(2, 3, 900, 1)
    assert seen.recent() == MemoryReadings()
    seen.keep(0.0, usual)
    seen.keep(1.0, MemoryReadings(80, 90, 1, 4))
    assert seen.recent() == MemoryReadings(80, 90, 1, 4, 1)
    seen.keep(3600.0, MemoryReadings(2, 3, 900, 1, 1))
    assert seen.recent() == MemoryReadings(2, 3, 900, 1, 0)
