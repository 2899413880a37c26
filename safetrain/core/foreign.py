"""Files of strangers: models, adapters and tables, and the libraries and templates that read them.

Nothing in such a file is trusted: what a library raises becomes a sentence, and a template, which is a program, has
limits of time and memory.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from safetrain.core.errors import ModelError, SafetrainError

PANIC = "PanicException"  # of a library in Rust; no Exception, so its name is all there is
MOST_CHARACTERS = 300  # of a library's message
MOST_SECONDS, MOST_BYTES = 5.0, 2**30  # processor time and additional memory of a template
AGAIN_SECONDS = 1.0  # the timer rings again, should the code have caught its error
SIZES_BYTES, DATA = 128, 5  # of /proc/PID/statm, and which of its numbers counts private writable pages


@contextmanager
def told(what: str, where: Path | str, do: str = "", kind: type[SafetrainError] = ModelError) -> Iterator[None]:
    """Turn every error in the block into one of ``kind``, with ``what`` and the error's first line; bugs included.

    Those of safetrain, and of the system for a file that can be named, pass.
    """
    try:
        yield
    except SafetrainError:
        raise
    except BaseException as error:
        is_named = isinstance(error, OSError) and error.errno is not None and error.filename is not None
        if is_named or not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        raise kind(f"{what}: {first_line(error)}", where=where, do=do) from error


def first_line(error: BaseException) -> str:
    """The first line of a library's message, shortened; its type if it has no words."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = f"no {line}" if isinstance(error, KeyError) else line
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} …"


@contextmanager
def limited(seconds: float = MOST_SECONDS) -> Iterator[None]:
    """End Python code in the block by TimeoutError or MemoryError when it needs more. Costs about 6 microseconds.

    Only the main thread has a limit of time (of the processor: other programs do not count), only Linux one of memory.
    """
    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        most = int(os.pread(_sizes(os.getpid()), SIZES_BYTES, 0).split()[DATA]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    if is_main:
        _catch_timer()
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@cache
def _sizes(process: int) -> int:
    """The open file in which Linux says how many pages a process has."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)


@cache
def _catch_timer() -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("it needs too much time")

    signal.signal(signal.SIGPROF, end)
