"""Trainings of two ranks in which one is killed, hangs or has no room: both must end, and that one be named."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.chaos.chains import Outcome, Reference
from tests.support.chaos.disk import can_mount, full_then_room, small_disk
from tests.support.chaos.ending import Ending, Ground, go_on, hit, train_hit
from tests.support.chaos.inject.chaos_sites import OF_RANKS, SITES, Site
from tests.support.chaos.kills import AHEAD_STEPS, CAUSES, STOPS, Kill, calls_of
from tests.support.chaos.project import UPDATES, Done, Project, left_over
from tests.support.chaos.weights import NO_LEARNING, difference_of_movement

RANKS = 2
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
ON_ALL_RANKS = ("read rows", "open base", "add adapters", "micro-batch", "update")
OTHERWISE = ("validate", "load BLAS")  # not called with several ranks, or before the phase that it belongs to
AFTER_AN_EXCHANGE = ("keep best", "measure")  # called behind one, in the phase that it belongs to
LEAST_EXCHANGES = 4  # of each kind, before the first update
MOST_MOVED = 1e-4  # of the way that the weights have gone: another number of ranks adds in another order
END_SECONDS = 5.0
MIDDLE = 8  # call of "micro-batch" of a rank, with two checkpoints behind it
MOST_OF_ONE = 16  # kills of one training
Cell = tuple[str, signal.Signals, int]  # phase, signal, rank


@dataclass(frozen=True)
class RankKill(Kill):
    """A kill of one rank."""

    rank: int = 0

    def plan(self) -> dict[str, Any]:
        """For the injection."""
        return super().plan() | {"rank": self.rank}

    def __str__(self) -> str:
        return super().__str__().replace("to the worker", f"to rank {self.rank}")


@dataclass
class RankOutcome(Outcome):
    """What came of one kill of a rank."""

    rank: int = 0
    end_seconds: float = 0.0  # from the kill to the end of all processes


def sites_of(rank: int) -> list[Site]:
    """Where a rank can be hit."""
    every = [site for site in (*SITES, *OF_RANKS) if site.name not in (*OTHERWISE, *AFTER_AN_EXCHANGE)]
    return [site for site in every if rank == 0 or site.name in ON_ALL_RANKS or site in OF_RANKS]


def cells(source: random.Random) -> list[Cell]:
    """Each phase of each rank with each signal, shuffled."""
    found = [
        (phase, number, rank)
        for rank in range(RANKS)
        for phase in dict.fromkeys(site.phase for site in sites_of(rank))
        for number in SIGNALS
    ]
    source.shuffle(found)
    return found


def draw(cell: Cell, step: int, source: random.Random) -> RankKill | None:
    """A kill of this kind in a process that starts at ``step``; None if it has no such phase."""
    phase, number, rank = cell
    updates = min(AHEAD_STEPS, UPDATES - step)
    calls = {
        site: LEAST_EXCHANGES + (updates if site.name == "sum" else 0) if phase == "exchange" else calls_of(site, step)
        for site in sites_of(rank)
        if site.phase == phase
    }
    possible = [site for site, count in calls.items() if count]
    if not possible:
        return None
    site = source.choice(possible)
    most = 1 if site.name == "read rows" else calls[site]
    place, delay = source.choice(("entry", "exit", "inside")), source.random() * 0.005
    outside = number in STOPS and source.random() < 0.5
    return RankKill(site, source.randint(1, most), place, delay, number, outside, rank)


def kill(project: Project, planned: RankKill, step: int) -> tuple[RankOutcome | None, int]:
    """One process of a training that goes on from ``step``; None if the kill was not reached; the next step.

    What it comes to in the end is compared by whoever lets it go to the end.
    """
    cell = planned.site.phase, planned.signal
    process = project.start_training(plan=planned.plan(), anew=not step)
    project.wait_until_hit(process)
    if planned.from_outside and process.poll() is None:
        process.send_signal(planned.signal)
    done = project.finish(process)
    truth = project.read_truth()
    if truth is None:
        told_wrong = [f"ended before the kill: {done.last_line}"]
        return (RankOutcome(cell, str(planned), cell[0], told_wrong, rank=planned.rank) if done.code else None), UPDATES
    ended = time.time() - project.truth.stat().st_mtime
    told = project.json("postmortem.json") if done.code else {}
    faults = faults_of(planned, truth, done, told)
    if done.continued_from not in (None, step):
        faults.append(f"continued from step {done.continued_from} and not {step}")
    if planned.signal not in STOPS and ended > END_SECONDS:
        faults.append(f"took {ended:.1f} s to end")
    if left := left_over(project.folder):
        faults.append(f"still there: {left}")
    resumes = int(told.get("resumes_from_step", 0))
    lost = max(0, truth["step"] - resumes) if done.code else 0
    outcome = RankOutcome(cell, str(planned), truth["phase"], faults, lost, rank=planned.rank, end_seconds=ended)
    return outcome, resumes if done.code else UPDATES


def faults_of(planned: RankKill, truth: dict[str, Any], done: Done, told: dict[str, Any]) -> list[str]:
    """What is wrong with what was said; empty if nothing."""
    if done.code == 0:  # everything was written, or a stop that came too late
        late = truth["phase"] == "finish" or truth["step"] >= UPDATES - 1
        return [] if late else ["the training went on"]
    expected: dict[str, object] = {"exit_code": 128 + planned.signal, "ranks": RANKS, "is_memory": False}
    if planned.signal in STOPS:
        expected |= {"cause": "stopped", "rank": None}
    else:
        expected |= {"cause": CAUSES[planned.signal], "rank": planned.rank, "phase": truth["phase"]}
        if truth["phase"] in ("gradient", "optimizer"):
            expected["step"] = truth["step"] + 1
    found = [
        f"{key} is {told.get(key)!r} and not {value!r}" for key, value in expected.items() if told.get(key) != value
    ]
    if done.code != 128 + planned.signal:
        found.append(f"exit code {done.code} and not {128 + planned.signal}")
    if planned.signal not in STOPS and f"rank {planned.rank} of {RANKS}, on this machine" not in done.out:
        found.append("the rank is not named")
    if planned.signal in STOPS and told.get("resumes_from_step", 0) < truth["step"]:
        found.append("a stop lost steps")
    return found


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


def run_kills(
    project: Project, reference: Reference, least: int, seed: int, say: Callable[[str], None]
) -> list[RankOutcome]:
    """Kill and continue trainings until every cell has had its turn, and at least ``least`` have."""
    source, outcomes = random.Random(seed), list[RankOutcome]()
    waiting = cells(source)
    while len(waiting) < least:
        waiting += cells(source)
    while waiting:
        step, mine = 0, list[RankOutcome]()
        for _ in range(MOST_OF_ONE):
            planned = _next(waiting, step, source)
            if planned is None or step >= UPDATES:
                break
            outcome, step = kill(project, planned, step)
            if outcome is not None:
                waiting.remove((*outcome.cell, outcome.rank))
                mine.append(outcome)
                ended = f"all ended after {outcome.end_seconds:.1f} s"
                say(f"{len(outcomes) + len(mine)}: {outcome.text}: {outcome.faults or 'right'}; {ended}")
        _to_the_end(project, reference, mine)
        outcomes += mine
    return outcomes


def _next(waiting: list[Cell], step: int, source: random.Random) -> RankKill | None:
    """The first cell that a training at ``step`` can have now; its end comes last."""
    early = step < UPDATES - AHEAD_STEPS and any(phase != "finish" for phase, _, _ in waiting)
    for cell in waiting:
        planned = draw(cell, step, source) if cell[0] != "finish" or not early else None
        if planned is not None:
            return planned
    return None


def _to_the_end(project: Project, reference: Reference, mine: list[RankOutcome]) -> None:
    """Let the training finish with the same command, and compare it."""
    done = project.train()
    exact = done.code == 0 and project.fingerprint() == reference.fingerprint
    for outcome in mine:
        outcome.resumed_exactly = exact
    if mine and not exact:
        mine[-1].faults.append(f"other results than undisturbed, exit {done.code}: {done.last_line}")


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
