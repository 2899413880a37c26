"""A result is whole or absent, one training runs at a time, and what is told of errors, paths and counts reads well."""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from safetrain.core.errors import AlreadyRunningError, EngineError, MachineError, ModelError, SafetrainError
from safetrain.core.formatting import counted, duration_text, override, similar_path
from safetrain.core.lock import lock_path, require_no_training, training_lock
from safetrain.core.storage.files import (
    cache_directory,
    keep_text,
    make_durable,
    with_traceback,
    write_atomic,
    write_json,
)
from safetrain.core.storage.paths import ERROR, FLIGHT

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


HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom safetrain.core.lock import training_lock\n"
    "with training_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


def test_the_second_training_is_refused_and_a_killed_first_one_is_not_in_the_way(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunningError, match=f"process {first.pid}"), training_lock(tmp_path):
            pass
        for _ in range(2):
            with pytest.raises(AlreadyRunningError, match=f"process {first.pid}"):
                require_no_training(tmp_path)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        first.stdout.close()
    deadline = time.monotonic() + 5
    while True:
        try:
            with training_lock(tmp_path):
                break
        except AlreadyRunningError:
            assert time.monotonic() < deadline
    require_no_training(tmp_path)
    require_no_training(tmp_path / "never used")


def test_on_macos_the_lock_is_not_among_files_that_are_cleaned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """$TMPDIR is, after three days without access; and neither cron nor a shell's variables lead to another lock."""
    monkeypatch.delenv("SAFETRAIN_LOCK_DIR", raising=False)
    found = lock_path("darwin")
    assert found.parent == Path.home() / "Library" / "Caches" / "safetrain"
    for name in ("TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "/elsewhere")
    assert lock_path("darwin") == found
    monkeypatch.setenv("SAFETRAIN_LOCK_DIR", "/mine")
    assert lock_path("darwin").parent == Path("/mine")


@pytest.mark.parametrize("link", ["symbolic", "in the output folder"])
def test_what_somebody_else_put_under_the_lock_s_name_is_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """In a folder that is open to all, somebody else may have put it there."""
    monkeypatch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path))
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    (lock_path() if link == "symbolic" else tmp_path / ".training.lock").symlink_to(precious)
    with pytest.raises(MachineError, match="lock"), training_lock(tmp_path):
        pass
    assert precious.read_text() == "thesis"


def translated(*, understood: bool = False) -> SafetrainError:
    """An error of ours that stands for another one."""
    try:
        try:
            raise RuntimeError("[matmul] bad shape")
        except RuntimeError as error:
            raise EngineError("mlx failed at step 3") from (None if understood else error)
    except EngineError as told:
        return told


def test_the_traceback_is_written_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a training, a command may fail: what it keeps leaves the training's own alone."""
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / ERROR
    assert with_traceback(translated()) == f"mlx failed at step 3\n  traceback: {kept}"
    assert (keep_text("of a child"), kept.read_text(encoding="utf-8")) == (str(kept), "of a child")
    told = with_traceback(translated(), tmp_path / FLIGHT)
    path = tmp_path / FLIGHT / ERROR
    assert told == f"mlx failed at step 3\n  traceback: {path}"
    text = path.read_text()
    assert "RuntimeError: [matmul] bad shape" in text
    assert f'{Path(__file__).name}", line' in text
    assert "The above exception was the direct cause" in text


def test_an_error_that_is_understood_has_none(tmp_path: Path) -> None:
    ours = ModelError("The adapter does not fit.")
    ours.__cause__ = ModelError("One tensor is too many.")
    for error in (translated(understood=True), ModelError("There is no model."), ours):
        assert with_traceback(error, tmp_path) == str(error)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()  # and a disk that refuses hides no error
    assert with_traceback(translated(), tmp_path / "file") == "mlx failed at step 3"


def test_counts_and_durations_are_as_people_say_them() -> None:
    told = [counted(number, "bad row") for number in (0, 1, 2, 11)]
    assert told == ["0 bad rows", "1 bad row", "2 bad rows", "11 bad rows"]
    told = [duration_text(seconds) for seconds in (0.2, 40, 720, 27_000, 172_799, 302_400)]
    assert told == ["1 s", "40 s", "12 min", "7.5 h", "48.0 h", "3.5 days"]


@pytest.mark.parametrize(
    "path", ["a/b-1.jsonl", "my data/mein öl.jsonl", "a=b.jsonl", "it's", 'a"b', "a,[b]", "${x}", "end\\"]
)
def test_an_override_can_be_pasted(path: str) -> None:
    (word,) = shlex.split(override("data.path", path))
    value = OverridesParser.create().parse_override(word).value()
    assert str(OmegaConf.create({"path": str(value)}).path) == path
    assert override("data.path", "data/rows.jsonl") == "data.path=data/rows.jsonl"  # without quotes


def test_a_missing_path_gets_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "data" / "example").mkdir(parents=True)
    assert similar_path(tmp_path / "data" / "exmaple") == f"did you mean {tmp_path}/data/example?"
    assert similar_path(tmp_path / "nowhere" / "rows.jsonl") == ""
