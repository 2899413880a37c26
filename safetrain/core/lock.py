"""One training run at a time for each user and machine: the kernel releases the lock, however its holder dies."""

import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.errors import AlreadyRunningError, MachineError
from safetrain.core.storage.files import MAC_CACHE

FOLDER_LOCK = ".training.lock"
SHARED = Path("/tmp")
OPENED = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last: a pipe in its place does not block
TRAINING = "Another training run is in progress on this machine"
PROBE_SECONDS = 0.2  # longer than a probe by is_locked takes


def lock_path(platform: str = sys.platform) -> Path:
    """Return this user's lock file: in ``$SAFETRAIN_LOCK_DIR``, or the system's folder for such files, or /tmp.

    No other variable is used: a cron job has neither $XDG_RUNTIME_DIR nor $TMPDIR, and must find the same lock.
    On macOS, files in $TMPDIR are removed after three days without access (confstr(3)).
    """
    folder = Path("/run/user") / str(os.getuid())
    if platform == "darwin":
        folder = Path.home() / MAC_CACHE
    elif not os.access(folder, os.W_OK):
        folder = SHARED
    return Path(os.environ.get("SAFETRAIN_LOCK_DIR") or folder) / f"safetrain-{os.getuid()}-default.lock"


@contextmanager
def training_lock(output: Path) -> Iterator[tuple[int, int]]:
    """Lock the device and the output folder for one training run; raises AlreadyRunningError if another run has them.

    Yields the two descriptors: a child that inherits them holds the locks too, as long as it lives.
    The files stay when the locks are released: without them, two later processes could lock two different files.
    """
    with locked(lock_path()) as first, locked(output / FOLDER_LOCK) as second:
        yield first, second


def require_no_training(output: Path) -> None:
    """Raise AlreadyRunningError while a training run uses ``output``: its files must not change meanwhile."""
    if is_locked(output):
        raise _running(output / FOLDER_LOCK)


def is_locked(output: Path) -> bool:
    """Whether a training run uses ``output``."""
    return is_held(output / FOLDER_LOCK)


def is_held(path: Path) -> bool:
    """Whether a process holds this lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | OPENED)
    except OSError:
        return False
    try:
        return not _locks(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, what: str = TRAINING) -> Iterator[int]:
    """Hold one lock; raises AlreadyRunningError, whose message begins with ``what``, if another process has it.

    Raises MachineError, and writes nothing, if another user has put a link or file in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # writable, as network file systems require
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPENED, 0o600)
    except OSError as error:
        if not os.path.lexists(path):  # the folder is at fault
            raise
        raise _not_ours(path, os.strerror(error.errno or 0)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_ours(path, "no regular file")
        if not _locks(descriptor, fcntl.LOCK_EX, PROBE_SECONDS):
            raise _running(path, what)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _not_ours(path: Path, got: str) -> MachineError:
    what = "The lock of this user's training runs cannot be acquired."
    return MachineError(what, where=str(path), got=got, do="remove that file")


def _running(path: Path, what: str = TRAINING) -> AlreadyRunningError:
    """The error that names the process whose number is in the lock's file."""
    with path.open("rb") as file:
        holder = file.read(20).decode("ascii", "replace").strip()
    if not holder.isdecimal():  # it will be pasted into a shell
        return AlreadyRunningError(f"{what}.", where=path, do="wait until it ends")
    do = f"wait until it ends; or stop it (it saves its state): kill {holder}"
    return AlreadyRunningError(f"{what} (process {holder}).", where=path, do=do)


def _locks(descriptor: int, kind: int, seconds: float = 0.0) -> bool:
    """Whether this process gets the lock within ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(PROBE_SECONDS / 10)
