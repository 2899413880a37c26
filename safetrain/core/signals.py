"""Ctrl-C or SIGTERM asks the run to end after its step. What ends it at once is the supervisor's business."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Which signal asked for the end, 0 for none."""

    def __init__(self) -> None:
        self.signal_number = 0


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM for the length of the block."""
    request = StopRequest()

    def first(number: int, _frame: FrameType | None) -> None:
        request.signal_number = request.signal_number or number

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
