"""Two plans at once leave each other's scratch folders alone; what a killed one has left is removed."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.plan.dry_run import FOLDERS_LOCK, HELD, PREFIX, remove_remains, scratch_folder
from tests.conftest import ROOT
from tests.plan.test_choose import planned

OTHER = """
import sys, time
from pathlib import Path
from safetrain.plan.dry_run import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "job.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_plan_s_folder_is_removed_once_it_is_dead_and_not_before(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        theirs = Path(other.stdout.readline().strip())
        with scratch_folder(tmp_path) as mine:
            remove_remains(tmp_path)
            assert (theirs / "job.json").is_file()
            assert mine.is_dir()
        assert not mine.exists()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        other.stdout.close()
    assert theirs.is_dir()
    remove_remains(tmp_path)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_what_older_versions_have_left_is_removed_too(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}x7k2" / "checkpoints").mkdir(parents=True)
    (tmp_path / "adapters").mkdir()
    remove_remains(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDERS_LOCK, "adapters"]
    remove_remains(tmp_path / "nowhere")


def test_without_an_output_folder_it_is_elsewhere(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "nowhere") as folder:
        assert folder.is_dir()
        assert not folder.is_relative_to(tmp_path / "nowhere")
    assert not folder.exists()


@pytest.mark.usefixtures("own_cache")
def test_a_plan_leaves_what_another_plan_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("DRY_RUN", raising=False)
    theirs, dead = (tmp_path / "checkpoints_qlora" / f"{PREFIX}{name}" for name in ("theirs", "dead"))
    for folder in (theirs, dead):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    holder = os.open(theirs / HELD, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert planned()[0].verified
    finally:
        os.close(holder)
    assert theirs.is_dir()
    assert not dead.exists()
