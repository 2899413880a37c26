"""A full disk makes a run wait instead of losing it: it goes on when there is room, and can be stopped meanwhile.

The disk's free space is played here; the waiting is real.
"""

import errno
import functools
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from safetrain.core.errors import DiskFullError, InterruptedRun
from safetrain.core.recorder import Edge, Phase, Recorder, read_flight
from safetrain.engine import run as run_module
from safetrain.engine.run import Watcher, write_or_wait
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


class Told:
    """What a room says and records, and the signal that it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.signal = 0
        self.path = folder / "recorder.bin"
        watcher = Watcher(lambda *_: None, lambda _: None, lambda: self.signal, Recorder(self.path), self.said.append)
        self.write = functools.partial(write_or_wait, folder, watcher)

    def phases(self) -> list[tuple[Phase, Edge, int]]:
        found = read_flight(self.path)
        return [(record.phase, record.edge, record.work.step) for record in found.records]


def test_a_write_that_the_disk_refuses_is_done_again_from_its_start(disk: Disk, tmp_path: Path) -> None:
    """The disk looks free, and was full in the middle of it: a quota, or others who were quicker."""
    told, parts = Told(tmp_path), []

    def write() -> None:
        parts.append("first half")
        if len(parts) == 1:
            raise OSError(errno.EDQUOT, "no")
        parts.append("second half")

    told.write(10 * MIB, 3, write)
    assert parts == ["first half", "first half", "second half"]
    assert told.phases() == [(Phase.WAIT, Edge.BEFORE, 3), (Phase.WAIT, Edge.AFTER, 3)]


def test_a_signal_ends_the_wait(disk: Disk, tmp_path: Path) -> None:
    told, done = Told(tmp_path), []
    disk.free = 0
    threading.Timer(0.2, lambda: setattr(told, "signal", 15)).start()
    began = time.monotonic()
    with pytest.raises(InterruptedRun, match="Stopped at step 3 while the disk was full") as caught:
        told.write(10 * MIB, 3, lambda: done.append(1))
    assert 0.19 <= time.monotonic() - began < 5
    assert caught.value.exit_code == 143
    assert "it continues from the newest checkpoint" in str(caught.value)
    assert done == []


def test_the_wait_has_an_end_also_where_the_disk_looks_free(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "WAIT_MINUTES", 0.005)
    told = Told(tmp_path)
    for disk.free in (0, 100 * MIB):
        began = time.monotonic()
        with pytest.raises(DiskFullError, match=r"The disk stayed full for 0\.005 minutes") as caught:
            told.write(10 * MIB, 3, Mock(side_effect=OSError(errno.EDQUOT, "no")))
        assert 0.3 <= time.monotonic() - began < 5
        assert str(tmp_path) in str(caught.value)
        assert told.phases()[-1] == (Phase.WAIT, Edge.BEFORE, 3)


def test_a_run_on_a_disk_that_is_full_now_and_then_gives_the_same_bits(
    disk: Disk, tiny_model: Build, tmp_path: Path
) -> None:
    """Also one that is stopped while it waits: what was saved before is whole."""
    base, said = tiny_model(bits=4), list[str]()
    run(job_in(tmp_path / "whole", base))
    asked, disk.asked = disk.asked, 0
    assert asked > 20
    disk.looks = (0 if look % 5 == 3 else 100 * MIB for look in range(10**6))
    run(job_in(tmp_path / "full", base), say=said.append)
    assert said.count("there is free space again") >= 5
    require_same_run(tmp_path / "full", tmp_path / "whole")
    disk.looks, said[:] = (100 * MIB if look < asked // 2 else 0 for look in range(10**6)), []
    with pytest.raises(InterruptedRun, match="while the disk was full"):
        run(job_in(tmp_path / "stopped", base), say=said.append, stop=lambda: signal.SIGINT if said else 0)
    disk.looks = iter(())
    assert 0 < run(job_in(tmp_path / "stopped", base)).state.resumed_from_step < 15
    require_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_without_room_for_its_checkpoints_does_not_start(disk: Disk, tiny_model: Build, tmp_path: Path) -> None:
    disk.free = MIB
    with pytest.raises(DiskFullError, match="too little disk space for this run's checkpoints"):
        run(job_in(tmp_path / "a", tiny_model()))
