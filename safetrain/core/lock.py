"""One training at a time per user on one machine: a lock file that the kernel releases however the holder dies."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.errors import AlreadyRunningError


def lock_path(device: str) -> Path:
    """The lock file of a device: in ``$SAFETRAIN_LOCK_DIR``, else the user's runtime folder, else the temporary one."""
    chosen = os.environ.get("SAFETRAIN_LOCK_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir())
    return folder / f"safetrain-{os.getuid()}-{device}.lock"


@contextmanager
def training_lock(device: str) -> Iterator[None]:
    """Hold the device for one training; raises AlreadyRunningError with the holder's process id.

    The file stays when the lock is released: removing it would let two later processes lock two different files.
    """
    path = lock_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise AlreadyRunningError(
                f"Another training runs on this machine (process {holder}).",
                where=str(path),
                do=f"wait for it, or end it: kill -INT {holder} saves its state first",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
