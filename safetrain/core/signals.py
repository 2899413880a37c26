"""How a program ends: by an error, Ctrl-C or SIGTERM.

A training run ends after the current micro-batch; work that has written nothing yet ends at once.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from safetrain.core.errors import FREE_AND_CONTINUE, DiskError, DiskFullError, InterruptedRun, SafetrainError
from safetrain.core.formatting import print_text
from safetrain.core.storage.files import DISK_FULL, with_traceback

AT_RUNG = signal.SIGUSR2  # in an InterruptedRun: a search's candidate has reached its step


class Terminated(KeyboardInterrupt):
    """SIGTERM; like Ctrl-C, it unwinds the program, which ends child processes and removes temporary files."""


def terminate(_number: int) -> None:
    """Handle SIGTERM by raising Terminated."""
    raise Terminated


def exit_code_of(error: BaseException) -> int:
    """Print the error to stderr and return its exit code; raise it again if it is a bug."""
    if isinstance(error, BrokenPipeError):  # stdout is closed, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python still flushes stdout at exit
        return 128 + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        print_text("error: interrupted", sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    told = user_error_of(error)
    if told is None:
        raise error
    print_text(f"{'' if isinstance(told, InterruptedRun) else 'error: '}{with_traceback(told)}", sys.stderr)
    return told.exit_code


def user_error_of(error: BaseException) -> SafetrainError | None:
    """The error in words that a user can act on; None for a bug. The system's own have their traceback as cause."""
    if not isinstance(error, OSError) or error.errno is None:
        return error if isinstance(error, SafetrainError) else None
    where = str(error.filename or "this folder")
    if error.errno in DISK_FULL:
        return DiskFullError("The disk is full.", where=where, do=FREE_AND_CONTINUE)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SafetrainError(f"No permission: {error.strerror}.", where=where, do="choose another folder")
    do = "the same command continues. If it fails again, copy your files to another disk and check this one"
    told = DiskError(f"A file could not be read or written: {error.strerror}.", where=where, do=do)
    told.__cause__ = error
    return told


class StopRequest:
    """The signal that asks the program to stop; 0 for none."""

    def __init__(self) -> None:
        self.signal_number = 0


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the block, and note the signal in the yielded StopRequest."""
    request = StopRequest()

    def first(number: int) -> None:
        request.signal_number = request.signal_number or number

    with handling({signal.SIGINT: first, signal.SIGTERM: first}):
        yield request


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process on the first Ctrl-C or SIGTERM, even while mlx computes and Python does not run.

    For work that has nothing to save: the system itself ends the process.
    """
    with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM))):
        yield


@contextmanager
def handling(handlers: Mapping[int, Callable[[int], None] | None]) -> Iterator[None]:
    """Call these handlers with the signal's number inside the block; None: the system ends the process."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if handler := handlers[number]:
            handler(number)

    before = {number: signal.signal(number, handle if call else signal.SIG_DFL) for number, call in handlers.items()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
