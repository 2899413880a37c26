"""A full disk makes a run wait instead of losing it: it goes on when there is room, and can be stopped meanwhile.

The disk's free space is played here; the waiting is real.
"""

import errno
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from safetrain.core.errors import DiskFullError, InterruptedRun
from safetrain.core.recorder import Phase, read_flight
from safetrain.engine import run as run_module
from safetrain.engine import state
from safetrain.engine.weight_files import save_arrays
from tests.engine.test_training import job_in, require_same_run, run

MIB = 2**20
Build = Callable[..., Path]


class Disk:
    """A disk with ``free`` bytes, or with what ``looks`` says at each look until that is used up."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.looks: Iterator[int] = iter(())
        self.asked = 0

    def usage(self, _folder: Path) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(free=next(self.looks, self.free))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(100 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", made.usage)
    monkeypatch.setattr(run_module, "LOOK_SECONDS", 0.02)
    return made


def test_a_run_on_a_disk_that_is_full_now_and_then_gives_the_same_bits(
    disk: Disk, tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is stopped while it waits: what was saved before is whole."""
    base, said = tiny_model(bits=4), list[str]()
    run(job_in(tmp_path / "whole", base))
    asked, disk.asked = disk.asked, 0
    assert asked > 20
    disk.looks = (0 if look % 5 == 3 else 100 * MIB for look in range(10**6))
    refusals = iter([OSError(errno.EDQUOT, "no")])  # the disk looks free, and was full in the middle of a write
    with monkeypatch.context() as patched:
        patched.setattr(state, "save_arrays", Mock(side_effect=lambda *asked: raised_or(save_arrays, refusals, *asked)))
        run(job_in(tmp_path / "full", base), say=said.append)
    assert said.count("there is free space again") >= 5
    phases = [record.phase for record in read_flight(tmp_path / "full" / "recorder.bin").records]
    assert Phase.WAIT in phases
    require_same_run(tmp_path / "full", tmp_path / "whole")
    disk.looks, said[:] = (100 * MIB if look < asked // 2 else 0 for look in range(10**6)), []
    with pytest.raises(InterruptedRun, match=r"while the disk was full(?s:.*)from the newest checkpoint") as caught:
        run(job_in(tmp_path / "stopped", base), say=said.append, stop=lambda: signal.SIGTERM if said else 0)
    assert caught.value.exit_code == 143
    disk.looks = iter(())
    assert 0 < run(job_in(tmp_path / "stopped", base)).state.resumed_from_step < 15
    require_same_run(tmp_path / "stopped", tmp_path / "whole")


def raised_or(write: Callable[..., None], errors: Iterator[OSError], *asked: object) -> None:
    """Fail as long as there are errors."""
    for error in errors:
        raise error
    write(*asked)


def test_the_wait_has_an_end_also_where_the_disk_looks_free(
    disk: Disk, tiny_model: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "WAIT_MINUTES", 0.005)
    monkeypatch.setattr(state, "save_arrays", Mock(side_effect=OSError(errno.EDQUOT, "no")))
    began = time.monotonic()
    with pytest.raises(DiskFullError, match=r"The disk stayed full for 0\.005 minutes") as caught:
        run(job_in(tmp_path / "a", tiny_model()))
    assert 0.3 <= time.monotonic() - began < 5
    assert str(tmp_path) in str(caught.value)


def test_a_run_without_room_for_its_checkpoints_does_not_start(disk: Disk, tiny_model: Build, tmp_path: Path) -> None:
    disk.free = MIB
    with pytest.raises(DiskFullError, match="too little disk space for this run's checkpoints"):
        run(job_in(tmp_path / "a", tiny_model()))
