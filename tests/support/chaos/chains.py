"""Trainings that are killed, continued, killed again, to their end; which must be the end of one that nobody killed."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.chaos.kills import Cell, Kill, deck, draw, faults_of
from tests.support.chaos.project import UPDATES, Done, Fingerprint, Project, left_over

MOST_AT_THE_END = 3  # kills of a training that has no update left
MOST_KILLS = 60  # of one training, so that every seed comes to an end


@dataclass
class Outcome:
    """What came of one kill."""

    cell: Cell
    text: str  # the plan, to repeat it
    phase: str  # where it was hit
    faults: list[str]
    lost_steps: int = 0
    resumed_exactly: bool = False


@dataclass
class Chain:
    """One training under way, over all its processes."""

    number: int
    step: int = 0  # that the next process must continue from
    at_the_end: int = 0
    finished: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """A training that nobody killed."""

    fingerprint: Fingerprint
    seconds: dict[str, list[float]]  # of each call of each site


def make_reference(project: Project) -> Reference:
    """Train undisturbed, and once more with a stopwatch; raises RuntimeError unless both end alike."""
    profile = project.parent / "profile.json"
    fingerprint = undisturbed(project)
    if undisturbed(project, {"profile": str(profile)}) != fingerprint:
        raise RuntimeError("two trainings that nobody killed differ")
    return Reference(fingerprint, json.loads(profile.read_text()))


def undisturbed(project: Project, plan: dict[str, Any] | None = None) -> Fingerprint:
    """Train once; raises RuntimeError when that ends badly."""
    done = project.train(plan=plan, anew=True)
    if done.code:
        raise RuntimeError(f"the training does not run at all: {done.out[-3000:]}")
    return project.fingerprint()


def run_chains(
    project: Project, reference: Reference, kills: int, seed: int, say: Callable[[str], None]
) -> list[Outcome]:
    """Kill trainings until every pair of phase and signal has had its turns; at least ``kills`` of them."""
    source = random.Random(seed)
    waiting, outcomes, number = deck(kills, source), [], 0
    wanted = len(waiting)
    while waiting:
        number += 1
        chain = Chain(number)
        while waiting and not chain.finished and len(chain.outcomes) < MOST_KILLS and _may_go_on(chain):
            kill, cell = _next(waiting, chain, reference, source)
            if kill is None or cell is None:
                break
            if kill_once(project, chain, kill, cell):
                waiting.remove(cell)
        finish_chain(project, reference, chain)
        outcomes += chain.outcomes
        wrong = sum(bool(outcome.faults) for outcome in chain.outcomes)
        told = f"chain {number} (seed {seed}): {len(chain.outcomes)} kills, {wrong} wrong"
        say(f"{told}; {len(outcomes)} of {wanted} kills made")
        for line in chain.history if wrong else []:
            say(f"    {line}")
    return outcomes


def _may_go_on(chain: Chain) -> bool:
    return chain.step < UPDATES or chain.at_the_end < MOST_AT_THE_END


def _next(
    waiting: list[Cell], chain: Chain, reference: Reference, source: random.Random
) -> tuple[Kill | None, Cell | None]:
    """The first in the deck that this training can have now; the end of a training is killed last."""
    for cell in waiting:
        if cell[0] == "finish" and chain.step < UPDATES - 6 and any(phase != "finish" for phase, _ in waiting):
            continue
        kill = draw(cell, chain.step, reference.seconds, source)
        if kill is not None:
            return kill, cell
    return None, None


def kill_once(project: Project, chain: Chain, kill: Kill, cell: Cell) -> bool:
    """One process of the training; returns whether the kill took place."""
    done = strike(project, chain, kill)
    truth = project.read_truth()
    chain.finished = done.code == 0
    if truth is None:
        chain.history.append(f"{kill}: not reached, exit {done.code}")
        if done.code:
            chain.outcomes.append(Outcome(cell, str(kill), cell[0], [f"ended before the kill: {done.last_line}"]))
            chain.finished = True
        return False
    told = project.json("postmortem.json") if done.code else {}
    faults = faults_of(kill, chain.step, truth, done, told) + _resumed_wrong(chain, done)
    if left := left_over(project.folder):
        faults.append(f"still there: {left}")
    resumes = told.get("resumes_from_step", 0)
    lost = max(0, truth["step"] - resumes) if done.code else 0
    chain.outcomes.append(Outcome(cell, str(kill), truth["phase"], faults, lost))
    chain.history.append(f"{kill}: {truth['phase']} after step {truth['step']}, exit {done.code}, {faults or 'right'}")
    chain.at_the_end += chain.step >= UPDATES
    chain.step = resumes
    return True


def strike(project: Project, chain: Chain, kill: Kill) -> Done:
    """Start the training, or continue it, and have it killed."""
    process = project.start_training(plan=kill.plan(), anew=not chain.outcomes)
    if kill.from_outside:
        project.wait_until_hit(process)
        if process.poll() is None:
            os.kill(process.pid, kill.signal)
    return project.finish(process)


def _resumed_wrong(chain: Chain, done: Done) -> list[str]:
    """Whether a process continued where the post-mortem before it had promised."""
    if done.continued_from is None or done.continued_from == chain.step:
        return []
    return [f"continued from step {done.continued_from} and not {chain.step}"]


def finish_chain(project: Project, reference: Reference, chain: Chain) -> None:
    """Let the training finish, and compare it."""
    faults: list[str] = []
    if not chain.finished:
        done = project.train(anew=not chain.outcomes)
        faults = _resumed_wrong(chain, done)
        faults += [] if done.code == 0 else [f"the last process ended with {done.code}: {done.last_line}"]
        found = project.json("training_summary.json").get("resumed_from_step")
        faults += [] if found == done.continued_from else [f"training_summary.json: resumed_from_step is {found}"]
        chain.finished = done.code == 0
        chain.history.append(f"to the end: exit {done.code}, {faults or 'right'}")
    exact = chain.finished and project.fingerprint() == reference.fingerprint
    if not exact:
        faults.append("other results than those of a training that nobody killed")
        chain.history.append(faults[-1])
    for outcome in chain.outcomes:
        outcome.resumed_exactly = exact
    if chain.outcomes:
        chain.outcomes[-1].faults += faults
