"""Folders for what a dry run writes: beside the checkpoints, where there is room, and locked by their plan."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.core.lock import open_lock_file

PREFIX = "dry-run-"
HELD = "held"  # in such a folder: locked for as long as its plan lives
FOLDERS_LOCK = ".dry-runs.lock"  # held for a moment, while one is made or remains are removed


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder in ``parent`` for the length of the block; in the system's own place where there is no ``parent``."""
    if not parent.is_dir():
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            yield Path(folder)
        return
    with _locked(parent / FOLDERS_LOCK):  # nobody removes it before it is held
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        holder = open_lock_file(made / HELD)
        fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(holder)


def remove_remains(parent: Path) -> None:
    """Remove the folders of killed plans in ``parent``; those of living plans are locked."""
    if not any(parent.glob(f"{PREFIX}*")):
        return
    with _locked(parent / FOLDERS_LOCK):
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_unheld(folder)


def _remove_unheld(folder: Path) -> None:
    try:
        holder = open_lock_file(folder / HELD)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # its plan has just ended, or it is not ours
        return
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(holder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel releases the lock however we end, and the file stays."""
    descriptor = open_lock_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
