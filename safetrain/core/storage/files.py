"""Files that are whole or absent. Every result goes through here: temporary name, flush, fsync, rename."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from safetrain.core.errors import ConfigError, DiskFullError
from safetrain.core.formatting import size_text

NOT_SUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.ENODEV)
SPARE_BYTES = 2**20  # that stay free beside what is written
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk has no room, or the user has used up a quota
FULL_FLUSH: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS has it


def cache_directory(platform: str = sys.platform) -> Path:
    """The user's cache folder for safetrain: ``$SAFETRAIN_CACHE_DIR``, else the XDG cache, else the system's own."""
    chosen, caches = os.environ.get("SAFETRAIN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    if caches:
        return Path(caches) / "safetrain"
    return mac_cache_directory() if platform == "darwin" else Path.home() / ".cache" / "safetrain"


def mac_cache_directory() -> Path:
    """Where macOS keeps caches of a user's programs; the system removes nothing there."""
    return Path.home() / "Library" / "Caches" / "safetrain"


def private_folder(folder: Path) -> Path:
    """Make a folder of ours that nobody else can look or write into; raises PermissionError where it is not.

    For what is loaded as code: whoever can write there would run theirs as us.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "not a folder of this user", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def write_atomic(path: Path, write: Callable[[Path], None], *, over: bool = True) -> None:
    """Call ``write(temporary)``, make what it wrote durable, and rename it to ``path``.

    The temporary file keeps the suffix of ``path``, because some writers choose a format by it.
    A reader sees the old file or the new one, never half of either. Raises OSError when the disk refuses,
    FileExistsError where ``path`` is there and nothing may be written ``over``. Errors name ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.partial{path.suffix}")
    try:
        _make_empty(temporary)
        write(temporary)
        _fsync(temporary)
        if over:
            temporary.replace(path)
        else:
            _rename_new(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        if str(error.filename) != str(temporary) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # nobody knows the other name
    finally:
        with contextlib.suppress(OSError):  # of a disk that takes no writes: the error that counts is another
            temporary.unlink(missing_ok=True)


def _make_empty(path: Path) -> None:
    """With the rights that the user's umask leaves; raises PermissionError where a file system takes no files."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileNotFoundError:  # of a folder that is there, as /proc says it
        if not path.parent.is_dir():
            raise
        raise PermissionError(errno.EPERM, "the file system takes no files", str(path)) from None


def _rename_new(temporary: Path, path: Path) -> None:
    try:
        path.hardlink_to(temporary)
    except OSError as error:
        if error.errno not in (*NOT_SUPPORTED, errno.EPERM):  # file systems without links
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary)`` with an empty folder, make what it wrote durable, and rename it to ``path``.

    Raises OSError when the disk refuses, FileExistsError where ``path`` is there and is no empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.partial")
    temporary.mkdir()
    try:
        write(temporary)
        _fsync_inside(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        _fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def full_disk_named(what: str, folder: Path, do: str) -> Iterator[None]:
    """Raises DiskFullError, which says ``what`` is, where ``folder``'s disk has no room for what is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise DiskFullError(what, where=str(folder), do=do) from error


def require_new(target: Path, do: str = "choose another folder") -> Path:
    """The folder that ``target`` will be in; raises ConfigError where it is there, or nothing can be written there."""
    if target.exists() or target.is_symlink():
        raise ConfigError("The target exists already.", where=str(target), do=do)
    parent = target.parent.resolve()
    nearest = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError("Nothing can be written there.", where=str(nearest), do="choose another folder")
    return parent


def require_room(folder: Path, size_bytes: int, what: str, do: str) -> None:
    """Raise DiskFullError, which says ``what`` is, unless the disk of ``folder`` has so much room and a little more."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + SPARE_BYTES:
        needed = size_text(size_bytes + SPARE_BYTES)
        raise DiskFullError(what, where=str(folder.resolve()), expected=needed, got=f"{size_text(free)} free", do=do)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    write_atomic(path, lambda temporary: _write_string(temporary, text))


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to ``path`` as indented JSON with a closing newline, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_directory(temporary: Path, final: Path) -> None:
    """Make the files of ``temporary`` durable and give the folder its final name, replacing an older one."""
    _fsync_inside(temporary)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        doomed = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-old-"))
        final.replace(doomed)
        temporary.replace(final)
        shutil.rmtree(doomed)
    else:
        temporary.replace(final)
    _fsync(final.parent)


def _write_string(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _fsync_inside(folder: Path) -> None:
    """Flush a folder, and all that lies in it."""
    for path in sorted(folder.rglob("*")):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        make_durable(descriptor)
    finally:
        os.close(descriptor)


def make_durable(descriptor: int, full_flush: int | None = FULL_FLUSH) -> None:
    """Flush a file or folder to the medium itself; raises OSError when the disk refuses.

    On macOS fsync(2) stops at the drive, which may lose or reorder what it has; F_FULLFSYNC (``full_flush``) does not.
    Some file systems have only fsync.
    """
    if full_flush is not None:
        try:
            fcntl.fcntl(descriptor, full_flush)
            return
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
    os.fsync(descriptor)
