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
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, fail)
    assert path.read_text() == '{\n  "old": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


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


def test_a_refusal_names_the_target_and_not_a_name_that_nobody_knows(tmp_path: Path) -> None:
    target = tmp_path / "page.html"

    def refuse(temporary: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(temporary))

    with pytest.raises(OSError, match="Read-only") as refused:
        write_atomic(target, refuse)
    assert refused.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls have flushed, in order; the full one as on macOS."""
    calls: list[str] = []
    monkeypatch.setattr(fcntl, "fcntl", lambda _descriptor, command: calls.append(f"fcntl {command}"))
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("fsync"))
    return calls


def test_on_macos_the_drive_is_flushed_too(tmp_path: Path, flushed: list[str]) -> None:
    with (tmp_path / "a").open("w") as file:
        make_durable(file.fileno(), F_FULLFSYNC)
        make_durable(file.fileno(), None)
    assert flushed == [f"fcntl {F_FULLFSYNC}", "fsync"]


def test_a_file_system_without_a_full_flush_gets_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _command: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    calls: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", calls.append)
    with (tmp_path / "a").open("w") as file:
        make_durable(file.fileno(), F_FULLFSYNC)
        assert calls == [file.fileno()]


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFETRAIN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory("darwin") == Path.home() / "Library" / "Caches" / "safetrain"
    assert cache_directory("linux") == Path.home() / ".cache" / "safetrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert {cache_directory(name) for name in ("darwin", "linux")} == {Path("/elsewhere/safetrain")}
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", "/mine")
    assert cache_directory("darwin") == Path("/mine")
