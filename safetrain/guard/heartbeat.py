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

    def feed(self, records: list[FlightRecord]) -> None:
        """Take note of new records, oldest first."""
        for record in records:
            if self._last is not None:
                key, took = (self._last.phase, self._last.edge), record.monotonic_seconds - self._since
                self._longest[key] = max(self._longest.get(key, 0.0), took)
            self._last, self._since = record, record.monotonic_seconds

    def forgive(self) -> None:
        """Count from now: the process was stopped and goes on."""
        self._since = time.monotonic()

    def allowed_seconds(self) -> float | None:
        """How long the present phase may take, None for ever."""
        last = self._last
        return allowed_seconds(last, self._floor, self._longest.get((last.phase, last.edge)) if last else None)

    def overdue_seconds(self) -> float:
        """For how long nothing has been recorded, if that is longer than allowed; else 0."""
        allowed, waited = self.allowed_seconds(), time.monotonic() - self._since
        return waited if allowed is not None and waited > allowed else 0.0
