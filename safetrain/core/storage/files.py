"""Write files whole or not at all (temporary name, flush, fsync, rename), and records as JSON.

A record is a frozen dataclass; the types of its fields say what a JSON list or object becomes.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from safetrain.core.errors import ConfigError, DiskFullError, SafetrainError
from safetrain.core.formatting import size_text, written_again
from safetrain.core.storage.paths import ERROR

Kind = TypeVar("Kind")

LFS_POINTER = b"version https://git-lfs"  # start of a file whose content Git LFS has not fetched
FETCH_LFS = "run 'git lfs install && git lfs pull' in the repository that holds the file"
PLAIN_KINDS: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float)}  # of a record's fields
SPARE_BYTES = 2**20  # stay free on the disk
MOST_JSON_BYTES = 2**26  # of a model's JSON; the index of the largest models has 10 MB
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the disk, or no quota left
FULL_FLUSH: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS has it
MAC_CACHE = Path("Library/Caches/safetrain")  # in a user's home; macOS removes nothing there


def cache_directory(platform: str = sys.platform) -> Path:
    """Return the cache folder: ``$SAFETRAIN_CACHE_DIR``, or the XDG cache, or the system's own."""
    caches = os.environ.get("XDG_CACHE_HOME")
    own = Path.home() / (MAC_CACHE if platform == "darwin" else ".cache/safetrain")
    return Path(os.environ.get("SAFETRAIN_CACHE_DIR") or (Path(caches) / "safetrain" if caches else own))


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write(temporary)``, flush the file to the disk, and rename it to ``path``.

    The temporary file keeps the suffix of ``path``, because some writers choose a format by it.
    A reader sees the old file or the new one, never half of either. Raises OSError, with ``path``, if the disk fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.partial{path.suffix}")
    try:
        write(temporary)
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except OSError as error:
        if str(error.filename) != str(temporary) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # the temporary name means nothing to the user
    finally:
        with contextlib.suppress(OSError):  # a failing disk: the first error counts
            temporary.unlink(missing_ok=True)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary)`` with an empty folder, flush it to the disk, and rename it to ``path``.

    A link stays a link: the folder that it names is replaced.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}-", suffix=".partial", ignore_cleanup_errors=True
    ) as scratch:
        temporary = Path(scratch) / path.name
        temporary.mkdir()
        write(temporary)
        replace_directory(temporary, path)


@contextlib.contextmanager
def full_disk_named(what: str, folder: Path, do: str) -> Iterator[None]:
    """Raise DiskFullError, with the message ``what``, if the disk of ``folder`` becomes full in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise DiskFullError(what, where=folder, do=do) from error


def require_new(target: Path, do: str = "choose another folder") -> Path:
    """Return the parent folder of ``target``; raises ConfigError if ``target`` exists."""
    if target.exists() or target.is_symlink():
        raise ConfigError("The target already exists.", where=target, do=do)
    return target.parent.resolve()


def require_room(folder: Path, size_bytes: int, what: str, do: str) -> None:
    """Raise DiskFullError, with the message ``what``, unless the disk has ``size_bytes`` and a reserve free."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + SPARE_BYTES:
        needed = f"{size_text(size_bytes + SPARE_BYTES)} free"
        raise DiskFullError(what, where=folder.resolve(), expected=needed, got=f"{size_text(free)} free", do=do)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to ``path`` as indented JSON with a final newline, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, unreadable, over 64 MiB or holds something else."""
    try:
        is_small = path.is_file() and path.stat().st_size <= MOST_JSON_BYTES  # not of a pipe: it might never end
        value = json.loads(path.read_text(encoding="utf-8")) if is_small else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_directory(temporary: Path, final: Path) -> None:
    """Flush ``temporary`` to the disk and rename it to ``final``, replacing an older folder."""
    for path in [*sorted(temporary.rglob("*")), temporary]:
        _fsync(path)
    final = final.resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        doomed = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-old-"))
        final.replace(doomed)
        temporary.replace(final)
        shutil.rmtree(doomed)
    else:
        temporary.replace(final)
    _fsync(final.parent)


def link_files(source: Path, target: Path) -> None:
    """Make hard links to the files of the folder ``source`` in the folder ``target``."""
    for file in source.iterdir():
        link_file(file, target / file.name)


def link_file(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where the file system has none."""
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)  # DVC may have made the source a symbolic link
        return
    if not source.is_file():  # a device has no end
        raise OSError(errno.EINVAL, "it is not a plain file", source)
    shutil.copy2(source, target)


def remove_folder(path: Path) -> None:
    """Remove a file, a link, or a folder with all in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        make_durable(descriptor)
    finally:
        os.close(descriptor)


def make_durable(descriptor: int, full_flush: int | None = FULL_FLUSH) -> None:
    """Flush a file or folder to the medium itself; raises OSError if the disk fails.

    On macOS fsync(2) only reaches the drive's cache, which may be lost or reordered; F_FULLFSYNC (``full_flush``)
    reaches the medium. Some file systems have only fsync, and some cannot flush a folder.
    """
    with contextlib.suppress(OSError):
        if full_flush is not None:
            fcntl.fcntl(descriptor, full_flush)
            return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_record(path: Path, record: Any) -> None:
    write_json(path, dataclasses.asdict(record))


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """Read what ``write_record`` wrote; raises OSError, or ValueError or TypeError for other content."""
    return from_json(kind, json.loads(path.read_text(encoding="utf-8")))


def read_or_none(path: Path, kind: type[Kind]) -> Kind | None:
    """Read a record; None if it is missing or unreadable."""
    try:
        return read_record(path, kind)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def read_result(path: Path, kind: type[Kind], again: str = "") -> Kind:
    """Read the record of a stage; raises ConfigError if it is missing or unreadable (then ``again`` is the remedy)."""
    try:
        return read_record(path, kind)
    except FileNotFoundError:
        what, got, do = "does not exist yet.", "", "run the pipeline: safetrain run"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what, got, do = "cannot be read.", damage_of(error), again or written_again()
    raise ConfigError(f"{path.name} {what}", where=path, got=got, do=do)


def damage_of(error: Exception) -> str:
    """Why a record cannot be read: fields that do not fit (TypeError) are another version's, else it is damaged."""
    return f"a file of another version of safetrain: {error}" if isinstance(error, TypeError) else f"damaged: {error}"


def from_json(kind: type[Kind], value: Any) -> Kind:
    """Build the dataclass ``kind`` from its JSON, ignoring unknown keys; raises TypeError for a missing field."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    hints = get_type_hints(kind)
    values = {name: _field(hints[name], item) for name, item in value.items() if name in hints}
    own = (field for field in dataclasses.fields(kind) if field.name not in values)  # type: ignore[arg-type]
    if missing := [field.name for field in own if field.default is field.default_factory is dataclasses.MISSING]:
        raise TypeError(f"it has no {', '.join(missing[:4])}{', …' * (len(missing) > 4)}")
    return kind(**values)


def _field(kind: Any, value: Any) -> Any:
    """Make a tuple from a list and a dataclass from an object; raises TypeError for a value of another type."""
    inside = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):  # one type or None
        return None if value is None else _field(inside[0], value)
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]  # which is none of these types
        kinds = inside[:1] * len(items) if inside[-1] is Ellipsis else inside
        return tuple(_field(one, item) for one, item in zip(kinds, items, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_json(kind, value)
    is_kind = isinstance(value, PLAIN_KINDS[kind]) if kind in PLAIN_KINDS else True
    if not is_kind or (isinstance(value, bool) and kind in (int, float)):
        raise TypeError(f"{str(value)[:60]!r} is no {kind.__name__}")
    return value


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def keep_text(text: str, folder: Path | None = None) -> str:
    """Write a traceback that is already text, such as a child process's; returns its path, empty if the disk fails.

    The default folder is the user's cache; a training run passes its flight folder.
    """
    path = (folder or cache_directory()) / ERROR
    try:
        write_text(path, text)
    except OSError:
        return ""
    return str(path)


def with_traceback(error: SafetrainError, folder: Path | None = None, *, in_one_line: bool = False) -> str:
    """The error's message, or only its first line, and the path of the traceback if a library's error caused it."""
    message, cause = error.what if in_one_line else str(error), error.__cause__
    if cause is None or isinstance(cause, SafetrainError):
        return message
    file = keep_text("".join(traceback.format_exception(error)), folder)
    where = f" (traceback: {file})" if in_one_line else f"\n  traceback: {file}"
    return message + where if file else message
