"""The second training is refused with the first one's process id; a dead holder blocks nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safetrain.core.errors import AlreadyRunningError, MachineError
from safetrain.core.lock import lock_path, require_no_training, training_lock

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


@pytest.mark.parametrize("link", ["symbolic", "hard", "in the output folder"])
def test_what_somebody_else_put_under_the_lock_s_name_is_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """In a folder that is open to all, somebody else may have put it there."""
    monkeypatch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path))
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    if link == "hard":
        lock_path().hardlink_to(precious)
    else:
        (lock_path() if link == "symbolic" else tmp_path / ".training.lock").symlink_to(precious)
    with pytest.raises(MachineError, match="lock"), training_lock(tmp_path):
        pass
    assert precious.read_text() == "thesis"
