"""Trainings of two ranks in which one hangs, has no room or is started elsewhere; the one at fault must be named."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.chaos.disk import can_mount, full_then_room, small_disk
from tests.support.chaos.ending import Ending, Ground, go_on, hit, train_hit
from tests.support.chaos.kills import RANKS
from tests.support.chaos.project import NO_LEARNING, Project, difference_of_movement, left_over

MOST_MOVED = 1e-4  # of the way that the weights have gone: another number of ranks adds in another order
MIDDLE = 8  # call of "micro-batch" of a rank, with two checkpoints behind it


def endings_of_ranks(ground: Ground) -> Iterator[Ending]:
    """Endings that are no signals."""
    yield from (hang(ground, rank) for rank in range(RANKS))
    yield from (through_mlx_launch(ground, rank) for rank in range(RANKS))
    yield from (stopped_and_continued(ground, ranks) for ranks in (1, 3))
    if not can_mount():
        yield Ending("a full disk", skipped="only root on Linux can mount a small disk")
        return
    yield one_without_room(ground)
    with small_disk(ground.folder / "small-disk", ranks=RANKS) as project:
        yield full_then_room(ground, project, "save", 3)


def hang(ground: Ground, rank: int) -> Ending:
    """One rank's gradient never ends; the other waits for it, and is not blamed."""
    ending = Ending(f"the gradient of rank {rank} never ends (train.hang_minutes=0.03)")
    done, truth, told = train_hit(ground.project, hit("hang", occurrence=MIDDLE, rank=rank), "train.hang_minutes=0.03")
    ending.expect(
        told, cause="hang", confidence="confirmed", is_memory=False, exit_code=124, phase="gradient",
        step=truth["step"] + 1, rank=rank, ranks=RANKS,
    )  # fmt: skip
    ending.require(done.code == 124, f"exit code {done.code}")
    ending.require(f"rank {rank} of {RANKS}" in done.out, "the rank is not named")
    go_on(ground, ending)
    return ending


def stopped_and_continued(ground: Ground, ranks: int) -> Ending:
    """Asked to stop in the middle, then continued by another number of ranks."""
    project = ground.project
    ending = Ending(f"stopped with {RANKS} ranks, continued with {ranks}")
    initial = project.adapter_after(f"train.learning_rate={NO_LEARNING}", "train.max_steps=1")
    whole = project.adapter_after()
    process = project.start_training(
        plan=hit("signal from outside", occurrence=MIDDLE, awaits_stop=True, rank=1), anew=True
    )
    project.wait_until_hit(process)
    process.send_signal(signal.SIGTERM)
    done = project.finish(process)
    ending.expect(project.json("postmortem.json"), cause="stopped", rank=None, exit_code=143)
    ending.require(done.code == 143, f"exit code {done.code}")
    again = project.train(f"train.ranks={ranks}")
    ending.require(again.code == 0, f"ended with {again.code}: {again.last_line}")
    ending.require(bool(again.continued_from), "it began anew")
    moved = difference_of_movement(project.adapter(), whole, initial)
    ending.require(moved < MOST_MOVED, f"the adapter is {moved:.1e} of the weights' movement away")
    ending.resumed = f"{moved:.1e} of the weights' movement away"
    return ending


def one_without_room(ground: Ground) -> Ending:
    """Rank 1 has no room for its own files; with room the same command trains."""
    project = ground.project
    ending = Ending("no room on the disk of rank 1")
    (project.output / "postmortem.json").unlink(missing_ok=True)
    began = time.monotonic()
    with full_disk_of_rank(project, 1):
        done = project.train(anew=True)
        ending.require(time.monotonic() - began < 20, f"took {time.monotonic() - began:.0f} s to end")
        ending.require(done.code == 8, f"exit code {done.code} and not 8: {done.last_line}")
        ending.require(not (left := left_over(project.folder)), f"still there: {left}")
        ending.verdict = "disk full, of rank 1" if "rank 1 of 2" in done.out else "wrong"
        ending.require("rank 1 of 2" in done.out, f"the rank is not named: {done.out[-500:]}")
    ending.compare(project, ground.reference, project.train(anew=True))
    return ending


@contextmanager
def full_disk_of_rank(project: Project, rank: int) -> Iterator[None]:
    """The rank's own folder is a disk without room."""
    folder = project.flight / f"rank_{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "safetrain-chaos", str(folder)], check=True)
    try:
        (folder / "filler").write_bytes(bytes(65536))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


THROUGH_MLX_LAUNCH = """
import sys
from safetrain.core.records.hostfile import Hosts
Hosts.all_here = property(lambda _self: False)
sys.argv = ["stages.train", *sys.argv[1:]]
from stages.train import main
main()
"""


def through_mlx_launch(ground: Ground, rank: int) -> Ending:
    """The ranks are started as on several machines, all of which are this one; one is killed, then all goes on."""
    project = ground.project
    ending = Ending(f"SIGKILL of rank {rank}, started by mlx.launch")
    hostfile = project.parent / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * RANKS))
    command = (sys.executable, "-c", THROUGH_MLX_LAUNCH, f"train.hostfile={hostfile}")
    project.truth.unlink(missing_ok=True)
    plan = hit("signal", occurrence=MIDDLE, signal=int(signal.SIGKILL), rank=rank) | {"truth": str(project.truth)}
    project.discard()
    done = project.finish(project.start(*command, plan=plan))
    truth = project.read_truth() or {"step": -1}
    ending.expect(
        project.json("postmortem.json"), cause="killed", rank=rank, ranks=RANKS, phase="gradient",
        step=truth["step"] + 1, exit_code=137,
    )  # fmt: skip
    ending.require(done.code == 137, f"exit code {done.code}: {done.last_line}")
    ending.require(not (left := left_over(project.folder)), f"still there: {left}")
    again = project.finish(project.start(*command))
    ending.compare(project, ground.reference, again)
    ending.require(bool(again.continued_from), "it began anew")
    return ending
