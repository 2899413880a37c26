"""Ctrl-C or SIGTERM asks the run to end after its step. What ends it at once is the supervisor's business."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C it ends child processes and removes temporary files on its way out."""


def terminate(_number: int) -> None:
    """A handler of SIGTERM."""
    raise Terminated


class StopRequest:
    """Which signal asked for the end, 0 for none."""

    def __init__(self) -> None:
        self.signal_number = 0


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM for the length of the block."""
    request = StopRequest()

    def first(number: int) -> None:
        request.signal_number = request.signal_number or number

    with handling({signal.SIGINT: first, signal.SIGTERM: first}):
        yield request


@contextmanager
def handling(handlers: Mapping[int, Callable[[int], None]]) -> Iterator[None]:
    """Call the handler of a signal with its number, for the length of the block."""

    def handle(number: int, _frame: FrameType | None) -> None:
        handlers[number](number)

    before = {number: signal.signal(number, handle) for number in handlers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
