"""A result is whole or absent, whatever happens while it is written."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from safetrain.core.storage.files import (
    cache_directory,
    make_durable,
    replace_directory,
    write_atomic,
    write_json,
)

F_FULLFSYNC = 51  # macOS, sys/fcntl.h


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))

    with pytest.raises(OSError, match="No space left") as refused:
        write_atomic(path, fail)
    assert refused.value.filename == str(path)  # not a name that nobody knows
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert path.read_text() == '{\n  "old": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_file_is_as_private_as_its_owner_wants(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "rows.json", [])
    finally:
        os.umask(before)
    assert (tmp_path / "rows.json").stat().st_mode & 0o777 == mode


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    old, new = tmp_path / "final", tmp_path / "new"
    old.mkdir()
    (old / "stale").write_text("x")
    new.mkdir()
    (new / "fresh").write_text("y")
    replace_directory(new, old)
    assert [file.name for file in old.iterdir()] == ["fresh"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["final"]


def test_a_flush_reaches_the_drive_on_macos_and_falls_back_to_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def full(_descriptor: int, command: int) -> None:
        calls.append(f"fcntl {command}")
        if len(calls) > 2:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("fsync"))
    with (tmp_path / "a").open("w") as file:
        for command in (F_FULLFSYNC, None, F_FULLFSYNC):
            make_durable(file.fileno(), command)
    assert calls == [f"fcntl {F_FULLFSYNC}", "fsync", f"fcntl {F_FULLFSYNC}", "fsync"]


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFETRAIN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory("darwin") == Path.home() / "Library" / "Caches" / "safetrain"
    assert cache_directory("linux") == Path.home() / ".cache" / "safetrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert {cache_directory(name) for name in ("darwin", "linux")} == {Path("/elsewhere/safetrain")}
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", "/mine")
    assert cache_directory("darwin") == Path("/mine")
