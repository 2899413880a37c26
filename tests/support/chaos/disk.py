"""Disks: full ones, and checkpoint files that are cut or changed."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.chaos.ending import Ending, Ground, hit, train_hit
from tests.support.chaos.project import Project, step_of, wait_for

DISK_BYTES = 32 * 2**20
CUTS = ("0 bytes", "1 byte", "half", "all but 2 bytes", "1 bit flipped", "missing")


def disk(ground: Ground) -> Iterator[Ending]:
    """All of them."""
    yield damaged(ground)
    if not can_mount():
        yield Ending("a full disk", skipped="only root on Linux can mount a small disk")
        return
    with small_disk(ground.folder / "small-disk") as project:
        yield full_then_room(ground, project, "save", 3)
        yield full_then_room(ground, project, "update", 10)


def damaged(ground: Ground, most_cases: int = 1000) -> Ending:
    """Each file of the newest checkpoint cut or changed in turn; the one before must be used, and said so."""
    project, source = ground.project, ground.source
    plan = hit("signal", signal=int(signal.SIGKILL))
    train_hit(project, plan)
    newest, before = project.checkpoints()[:2]
    kept = ground.folder / f"interrupted-{source.random()}"
    shutil.copytree(project.output, kept, symlinks=True)
    files = sorted(path.name for path in newest.iterdir())
    every = [(name, cut) for name in files for cut in CUTS]
    cases = source.sample(every, min(most_cases, len(every)))
    ending = Ending(f"one of the {len(files)} files of the newest checkpoint damaged ({len(cases)} times)")
    for name, cut in cases:
        shutil.rmtree(project.output)
        shutil.copytree(kept, project.output, symlinks=True)
        damage(newest / name, cut, source)
        done = project.train()
        faults = len(ending.faults)
        ending.compare(project, ground.reference, done)
        ending.require(f"{newest.name} is damaged" in done.out, "it was not said")
        ending.require(done.continued_from == step_of(before), f"continued from {done.continued_from}")
        ending.faults[faults:] = [f"{name}, {cut}: {fault}" for fault in ending.faults[faults:]]
    ending.verdict = f"said, and step {step_of(before)} used instead of {step_of(newest)}"
    return ending


def damage(file: Path, cut: str, source: random.Random) -> None:
    """Cut or change one file."""
    content = file.read_bytes()
    place = source.randrange(len(content))
    changed = bytearray(content)
    changed[place] ^= 1 << source.randrange(8)
    file.unlink()
    if cut != "missing":
        kinds = {"0 bytes": b"", "1 byte": content[:1], "half": content[:place], "all but 2 bytes": content[:-2]}
        file.write_bytes(kinds.get(cut, bytes(changed)))


def can_mount() -> bool:
    """Whether this is root on Linux with the right to mount."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(parent: Path, **pins: int) -> Iterator[Project]:
    """A project whose output folder is a disk of its own; ``pins``: of its training."""
    project = Project(parent, train=pins)
    project.plan()  # which wants more room than this disk has
    planned = {path.name: path.read_bytes() for path in project.output.iterdir() if path.is_file()}
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "safetrain-chaos", str(project.output)], check=True)
    try:
        for name, content in planned.items():
            (project.output / name).write_bytes(content)
        yield project
    finally:
        subprocess.run(["umount", "--lazy", str(project.output)], check=True)


def fill(project: Project) -> Path:
    """Take all the room that is left."""
    filler = project.output / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def full_then_room(ground: Ground, project: Project, site: str, occurrence: int) -> Ending:
    """The disk fills up, training waits, there is room again, training goes on."""
    ending = Ending(f"the disk is full from call {occurrence} of '{site}' on, and has room later")
    go = project.parent / "go"
    go.unlink(missing_ok=True)
    process = project.start_training(plan=hit("pause", site, occurrence, go=str(go)), anew=True)
    project.wait_until_hit(process)
    filler = fill(project)
    go.touch()
    try:
        wait_for(lambda: "is full: step" in project.printed() or process.poll() is not None, "it says so")
    finally:
        filler.unlink()
    done = project.finish(process)
    ending.require("Training waits for free space" in done.out, "it did not wait")
    ending.require("there is free space again" in done.out, "it did not go on")
    ending.verdict = "waits, and goes on"
    ending.compare(project, ground.reference, done)
    return ending
