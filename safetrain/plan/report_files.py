"""How files reach the disk here: ``python -m safetrain.plan.report_files``. A process of its own: it calls the kernel.

Prints a line of JSON per finding (core/protocol/selftest.py).
"""

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
import time

from safetrain.core.protocol.selftest import DirtyPages, Flushes
from safetrain.core.storage.records import to_line

WRITTEN_BYTES, TIMES = 2**20, 3
MODIFIED = 0x4  # MINCORE_MODIFIED of macOS's <sys/mman.h>
FULL_FLUSH: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS has it


def main() -> None:
    """Print what is measured; pages only on macOS, where mincore says whether one is modified."""
    print(to_line(time_flushes()), flush=True)
    if sys.platform == "darwin":
        print(to_line(ask_dirty_pages()), flush=True)


def time_flushes() -> Flushes:
    """The median of a few megabytes, each made durable after it was written."""
    with tempfile.TemporaryFile() as file:

        def median(flush: int | None) -> float:
            seconds = list[float]()
            for _ in range(TIMES):
                file.write(os.urandom(WRITTEN_BYTES))
                file.flush()
                began = time.perf_counter()
                if flush is None:
                    os.fsync(file.fileno())
                else:
                    fcntl.fcntl(file.fileno(), flush)
                seconds.append(time.perf_counter() - began)
            return sorted(seconds)[TIMES // 2]

        plain = median(None)
        try:
            return Flushes(plain, None if FULL_FLUSH is None else median(FULL_FLUSH))
        except OSError:  # a file system without it
            return Flushes(plain, None)


def ask_dirty_pages() -> DirtyPages:
    """Write a page through mmap, and ask after each way to flush whether the kernel still calls it modified."""
    page = mmap.PAGESIZE
    with tempfile.TemporaryFile() as file:
        file.truncate(page)
        with mmap.mmap(file.fileno(), page) as mapped:
            mapped[0] = 1
            first = ctypes.c_char.from_buffer(mapped)
            address = ctypes.addressof(first)
            written = _is_modified(address, page)
            os.fsync(file.fileno())
            after_fsync = _is_modified(address, page)
            if FULL_FLUSH is not None:
                fcntl.fcntl(file.fileno(), FULL_FLUSH)
            after_full = _is_modified(address, page)
            mapped.flush()
            after_msync = _is_modified(address, page)
            del first  # a mapping that is pointed to cannot be closed
    return DirtyPages(written, after_fsync, after_full, after_msync)


def _is_modified(address: int, size: int) -> bool:
    state = (ctypes.c_ubyte * 1)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), state) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(state[0] & MODIFIED)


if __name__ == "__main__":
    main()
