"""Learns how long each phase takes, and says when one has taken far too long."""

import time

from safetrain.core.protocol.flight import Edge, FlightRecord, Phase
from safetrain.core.protocol.hang import allowed_seconds


class Heartbeat:
    """Fed with flight records; the clock is the machine's monotonic one, which stands still while a laptop sleeps."""

    def __init__(self, floor_seconds: float) -> None:
        self._floor = floor_seconds
        self._longest: dict[tuple[Phase, Edge], float] = {}
        self._last: FlightRecord | None = None
        self._since = time.monotonic()
        self._pauses: list[tuple[float, float]] = []  # from, until; in order, and none within another

    def feed(self, records: list[FlightRecord]) -> None:
        """Take note of new records, oldest first."""
        for record in records:
            if self._last is not None and not self._paused_seconds(record.monotonic_seconds):
                key, took = (self._last.phase, self._last.edge), record.monotonic_seconds - self._since
                self._longest[key] = max(self._longest.get(key, 0.0), took)
            self._last, self._since = record, record.monotonic_seconds
            self._pauses = [pause for pause in self._pauses if pause[1] > self._since]

    def forgive(self, start_seconds: float, end_seconds: float) -> None:
        """Leave out this time: the process or the supervisor was stopped, or may have been.

        A record from before the pause may still come after it, as it waits in the ring meanwhile.
        """
        before = self._pauses[-1][1] if self._pauses else start_seconds
        if self._pauses and start_seconds <= before:
            self._pauses[-1] = (self._pauses[-1][0], max(before, end_seconds))
        else:
            self._pauses.append((start_seconds, end_seconds))

    def allowed_seconds(self) -> float | None:
        """How long the present phase may take, None for ever."""
        last = self._last
        return allowed_seconds(last, self._floor, self._longest.get((last.phase, last.edge)) if last else None)

    def overdue_seconds(self) -> float:
        """For how long nothing has been recorded, pauses left out, if that is longer than allowed; else 0."""
        allowed, now = self.allowed_seconds(), time.monotonic()
        waited = now - self._since - self._paused_seconds(now)
        return waited if allowed is not None and waited > allowed else 0.0

    def _paused_seconds(self, until_seconds: float) -> float:
        """Of the time since the last record."""
        return sum(max(0.0, min(end, until_seconds) - max(start, self._since)) for start, end in self._pauses)
