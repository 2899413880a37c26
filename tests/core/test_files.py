"""A result is whole or absent, one training runs at a time, and what is told of errors, paths and counts reads well."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.errors import (
    AlreadyRunningError,
    DiskError,
    DiskFullError,
    EngineError,
    MachineError,
    ModelError,
    SafetrainError,
)
from safetrain.core.lock import lock_path, require_no_training, training_lock
from safetrain.core.records.run_state import MANIFEST, Checkpoint, fault_of, name_of, to_prune, write_manifest
from safetrain.core.signals import user_error_of
from safetrain.core.storage.files import (
    cache_directory,
    keep_text,
    link_file,
    with_traceback,
    write_atomic,
    write_folder,
    write_json,
)
from safetrain.core.storage.paths import ERROR, FLIGHT


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
    """$TMPDIR is, after three days without access; nor do cron or a shell's variables lead to another lock."""
    monkeypatch.delenv("SAFETRAIN_LOCK_DIR", raising=False)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        assert lock_path("darwin").parent == Path.home() / "Library" / "Caches" / "safetrain"
        monkeypatch.setenv(name, "/elsewhere")


def test_what_somebody_else_put_under_the_lock_s_name_is_refused_and_not_written(tmp_path: Path) -> None:
    """In a folder that is open to all."""
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    (tmp_path / ".training.lock").symlink_to(precious)
    with pytest.raises(MachineError, match="lock"), training_lock(tmp_path):
        pass
    assert precious.read_text() == "thesis"
    (tmp_path / ".training.lock").unlink()
    os.mkfifo(tmp_path / ".training.lock")
    with pytest.raises(MachineError, match="no regular file"), training_lock(tmp_path):
        pass


def test_only_a_number_from_the_lock_is_printed_to_be_pasted(tmp_path: Path) -> None:
    lock = tmp_path / ".training.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for content, said in (("123; rm -rf ~", "wait until it ends"), ("123", "kill 123")):
            lock.write_text(content)
            with pytest.raises(AlreadyRunningError) as refused:
                require_no_training(tmp_path)
            assert said in str(refused.value)
            assert "rm" not in str(refused.value)


def test_a_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other disk" / "adapters"
    elsewhere.mkdir(parents=True)
    (elsewhere / "old").write_text("old")
    (tmp_path / "adapters").symlink_to(elsewhere)

    def write(folder: Path) -> None:
        (folder / "new").write_text("new")

    write_folder(tmp_path / "adapters", write)
    assert (tmp_path / "adapters").is_symlink()
    assert [file.name for file in elsewhere.iterdir()] == ["new"]


def test_a_device_is_no_result_to_keep(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")  # copied, it fills the disk
    with pytest.raises(OSError, match="not a plain file"):
        link_file(tmp_path / "zero", tmp_path / "copy")


def test_an_error_of_the_system_is_told_in_words_with_its_file(tmp_path: Path) -> None:
    for number, kind in ((errno.EIO, DiskError), (errno.ENAMETOOLONG, DiskError), (errno.EDQUOT, DiskFullError)):
        told = user_error_of(OSError(number, os.strerror(number), "weights"))
        assert type(told) is kind
        assert told.where == "weights"


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


CONTENTS = {"adapters.safetensors": bytes(range(256)) * 20, "state.json": b'{"step": 3}\n', "empty": b""}


def checkpoint(output: Path, step: int, epoch: int = 0) -> Checkpoint:
    folder = output / name_of(epoch, step)
    folder.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    write_manifest(folder)
    assert fault_of(folder) == ""
    return Checkpoint(folder, step)


def test_whatever_is_cut_grown_flipped_or_lost_is_named(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        file = checkpoint(tmp_path / name, 3).folder / name
        size = len(content)
        for changed in (content[:-1], content[: size // 2], content + b"\0"):
            if changed != content:
                file.write_bytes(changed)
                assert fault_of(file.parent) == f"{name} has different contents"
        for place in (0, size // 2, size - 1) if size else ():
            flipped = bytearray(content)
            flipped[place] ^= 1 << 7
            file.write_bytes(flipped)
            assert fault_of(file.parent) == f"{name} has different contents"
        file.unlink()
        assert fault_of(file.parent) == f"{name} cannot be read: No such file or directory"
    file = checkpoint(tmp_path, 3).folder / MANIFEST
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert fault_of(file.parent), f"byte {place} of the manifest"
    for text in ("", "[]", "null", '{"sha256": ["state.json"]}'):
        file.write_text(text)
        assert fault_of(file.parent).startswith(MANIFEST)


@pytest.mark.parametrize(
    ("keep", "best", "gone"), [(1, 4, [6, 2]), (1, 8, [6, 4, 2]), (2, 2, [4]), (2, 0, [4, 2]), (3, 2, []), (9, 0, [])]
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, keep: int, best: int, gone: list[int]) -> None:
    folders = {step: checkpoint(tmp_path, step).folder for step in (2, 4, 6, 8)}
    assert to_prune(tmp_path, keep, best) == [folders[step] for step in gone]
    assert all(folder.is_dir() for folder in folders.values())  # it only names them
