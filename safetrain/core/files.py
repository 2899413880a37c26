"""Files that are whole or absent. Every result goes through here: temporary name, flush, fsync, rename."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk has no room, or the user has used up a quota


def cache_directory() -> Path:
    """The user's cache folder for safetrain: ``$SAFETRAIN_CACHE_DIR``, else the XDG cache."""
    chosen = os.environ.get("SAFETRAIN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safetrain"


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write(temporary)``, make what it wrote durable, and rename it to ``path``.

    The temporary file keeps the suffix of ``path``, because some writers choose a format by it.
    A reader sees the old file or the new one, never half of either. Raises OSError when the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=f".partial{path.suffix}")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        _fsync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        _fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    write_atomic(path, lambda temporary: _write_string(temporary, text))


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to ``path`` as indented JSON with a closing newline, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_directory(temporary: Path, final: Path) -> None:
    """Make the files of ``temporary`` durable and give the folder its final name, replacing an older one."""
    for file in sorted(temporary.rglob("*")):
        if file.is_file():
            _fsync(file)
    _fsync(temporary)
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


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
