"""Trainings that are killed, continued, killed again, to their end; which must be the end of one that nobody killed.

Kills are drawn from a seed: in which phase and call, how far into it, by which signal, of several ranks which one.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.chaos.inject.chaos_sites import OF_RANKS, SITES, Site
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Done, Fingerprint, Project, left_over

RANKS = 2  # where there are several
STOPS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, *STOPS)
SIGNALS_OF_RANKS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
CAUSES = {signal.SIGKILL: "killed", signal.SIGSEGV: "crash", signal.SIGABRT: "crash", signal.SIGBUS: "crash"}
ON_ALL_RANKS = ("read rows", "open base", "add adapters", "micro-batch", "update")
NOT_OF_RANKS = ("validate", "load BLAS", "keep best", "measure")  # not called there, or in another phase than its own
LEAST_EXCHANGES = 4  # of each kind, before the first update
AHEAD_STEPS = 7  # a kill comes at most so many updates after the start, so that a run takes many
ARRAY_FILES = 3  # of a checkpoint
MOST_DELAY_SECONDS = 0.005
MOST_AT_THE_END = 3  # kills of a training that has no update left
MOST_KILLS = 60  # of one training, so that every seed comes to an end
END_SECONDS = 5.0  # for all ranks
Cell = tuple[str, signal.Signals, int | None]  # a phase, a signal, a rank


@dataclass(frozen=True)
class Kill:
    """One kill."""

    site: Site
    occurrence: int  # of the calls since the start of the process, from 1
    place: str  # entry, exit, inside
    delay_seconds: float  # into the call, where inside
    signal: signal.Signals
    from_outside: bool  # to the supervisor
    rank: int | None = None  # of several

    @property
    def cell(self) -> Cell:
        """Its kind."""
        return self.site.phase, self.signal, self.rank

    def plan(self) -> dict[str, Any]:
        """For the injection."""
        return {
            "action": "signal from outside" if self.from_outside else "signal",
            "site": self.site.name,
            "occurrence": self.occurrence,
            "place": self.place,
            "delay_seconds": self.delay_seconds,
            "signal": int(self.signal),
            "awaits_stop": self.from_outside,
            "rank": self.rank or 0,
        }

    def __str__(self) -> str:
        where = f"{self.place} of call {self.occurrence} of '{self.site.name}'"
        later = f" {1000 * self.delay_seconds:.1f} ms after its begin" if self.place == "inside" else ""
        worker = "worker" if self.rank is None else f"rank {self.rank}"
        return f"{self.signal.name} to the {'supervisor' if self.from_outside else worker} at the {where}{later}"


@dataclass
class Outcome:
    """What came of one kill."""

    cell: Cell
    text: str  # the plan, to repeat it
    faults: list[str]
    end_seconds: float = 0.0  # from the kill to the end of all processes
    lost_steps: int = 0
    resumed_exactly: bool = False


@dataclass
class Chain:
    """One training under way, over all its processes."""

    step: int = 0  # that the next process must continue from
    at_the_end: int = 0
    finished: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


def sites_of(rank: int | None) -> list[Site]:
    """Where a training process can be hit."""
    if rank is None:
        return list(SITES)
    every = [site for site in (*SITES, *OF_RANKS) if site.name not in NOT_OF_RANKS]
    return [site for site in every if rank == 0 or site.name in ON_ALL_RANKS or site in OF_RANKS]


def deck(count: int, ranks: int, source: random.Random) -> list[Cell]:
    """At least ``count`` kinds of kills, all of them equally often, shuffled."""
    numbers = SIGNALS if ranks == 1 else SIGNALS_OF_RANKS
    cells = [
        (phase, number, rank)
        for rank in ([None] if ranks == 1 else range(ranks))
        for phase in dict.fromkeys(site.phase for site in sites_of(rank))
        for number in numbers
    ]
    drawn = cells * -(-count // len(cells))
    source.shuffle(drawn)
    return drawn


def draw(cell: Cell, step: int, source: random.Random) -> Kill | None:
    """A kill of this kind in a process that starts at ``step``; None if such a process has no such phase."""
    phase, number, rank = cell
    calls = {site: calls_of(site, step, rank) for site in sites_of(rank) if site.phase == phase}
    possible = [site for site, count in calls.items() if count]
    if not possible:
        return None
    site, outside = source.choice(possible), number in STOPS and source.random() < 0.5
    place, delay = source.choice(("entry", "exit", "inside", "inside")), source.random() * MOST_DELAY_SECONDS
    return Kill(site, source.randint(1, calls[site]), place, delay, number, outside, rank)


def calls_of(site: Site, step: int, rank: int | None) -> int:
    """How often a process that starts at ``step`` calls it in its first few updates, at least."""
    steps = range(step + 1, min(UPDATES, step + AHEAD_STEPS) + 1)
    saves = sum(each % SAVE_STEPS == 0 for each in steps)
    validations = sum(each % EVAL_STEPS == 0 for each in steps)
    match site.name:
        case "read checkpoint":
            return min(1, step)
        case "discard":
            return int(step == 0)
        case "read rows":
            return 2 if rank is None else 1
        case "open adapter":  # when the last update is made
            return int(step + AHEAD_STEPS >= UPDATES)
        case "keep best":  # a better one is not sure
            return min(1, validations) if step == 0 else 0
        case "prune":  # the newest two and the best one are kept
            return max(0, saves - 1) if step >= 2 * SAVE_STEPS else 0
        case "sum":
            return LEAST_EXCHANGES + len(steps)
    counts = {"gradient": len(steps), "optimizer": len(steps), "evaluate": validations + (step == 0)}
    counts["exchange"] = LEAST_EXCHANGES
    by_file = site.name == "write arrays"
    return (counts | {"save": saves * (ARRAY_FILES if by_file else 1)}).get(site.phase, 1)


def faults_of(kill: Kill, began_at: int, truth: dict[str, Any], done: Done, told: dict[str, Any]) -> list[str]:
    """What is wrong with the end of a killed training and with what was said of it; empty if nothing."""
    step, stops = max(began_at, truth["step"]), kill.signal in STOPS
    if done.code == 0:  # everything was written, or a stop that came too late
        late = step >= UPDATES - 1 if stops else truth["phase"] == "finish"
        return [] if late else ["the training went on"]
    expected: dict[str, object] = {"is_memory": False, "exit_code": 128 + kill.signal}
    expected |= {"cause": "stopped"} if stops else {"cause": CAUSES[kill.signal], "phase": truth["phase"]}
    if kill.rank is not None:
        expected |= {"ranks": RANKS, "rank": None if stops else kill.rank}
    if not stops and truth["phase"] in ("gradient", "optimizer"):
        expected["step"] = truth["step"] + 1
    elif not stops and truth["phase"] in ("evaluate", "save") and kill.rank is None:
        expected["step"] = truth["step"]
    found = [
        f"{key} is {told.get(key)!r} and not {value!r}" for key, value in expected.items() if told.get(key) != value
    ]
    if done.code != 128 + kill.signal:
        found.append(f"exit code {done.code} and not {128 + kill.signal}")
    if kill.rank is not None and not stops and f"rank {kill.rank} of {RANKS}, on this machine" not in done.out:
        found.append("the rank is not named")
    if stops and kill.rank is None and told.get("phase") not in phases_of_stop(step):
        found.append(f"phase is {told.get('phase')!r} and not one of {phases_of_stop(step)}")
    lost = step - told.get("resumes_from_step", 0)
    if lost > (0 if stops else SAVE_STEPS):
        found.append(f"{lost} steps are lost")
    return found


def phases_of_stop(step: int) -> set[str]:
    """In which phases a stop can end a training; one that comes while all is loaded finds nothing new to save."""
    early = {"evaluate", "after evaluate", "gradient", "after gradient"}  # there is nothing to be saved yet
    late = {"verify"} if step >= UPDATES - 1 else set()
    return {"after save", "after resume"} | late | (early if step <= 1 else set())


def make_reference(project: Project) -> Fingerprint:
    """What a training comes to that nobody kills; raises RuntimeError unless two end alike."""
    found = undisturbed(project)
    if undisturbed(project) != found:
        raise RuntimeError("two trainings that nobody killed differ")
    return found


def undisturbed(project: Project) -> Fingerprint:
    """Train once; raises RuntimeError when that ends badly."""
    done = project.train(anew=True)
    if done.code:
        raise RuntimeError(f"the training does not run at all: {done.out[-3000:]}")
    return project.fingerprint()


def run_chains(
    project: Project, reference: Fingerprint, kills: int, seed: int, say: Callable[[str], None], ranks: int = 1
) -> list[Outcome]:
    """Kill trainings until every kind of kill has had its turns; at least ``kills`` of them."""
    source, outcomes = random.Random(seed), list[Outcome]()
    waiting = deck(kills, ranks, source)
    wanted = len(waiting)
    while waiting:
        chain = Chain()
        while waiting and not chain.finished and len(chain.outcomes) < MOST_KILLS and _may_go_on(chain):
            kill = _next(waiting, chain, source)
            if kill is None:
                break
            if kill_once(project, chain, kill):
                waiting.remove(kill.cell)
        finish_chain(project, reference, chain)
        outcomes += chain.outcomes
        wrong = sum(bool(outcome.faults) for outcome in chain.outcomes)
        made = f"{len(outcomes)} of {wanted} made"
        say(f"{len(chain.outcomes)} kills of one training (seed {seed}), {wrong} wrong; {made}")
        for line in chain.history if wrong else []:
            say(f"    {line}")
    return outcomes


def _may_go_on(chain: Chain) -> bool:
    return chain.step < UPDATES or chain.at_the_end < MOST_AT_THE_END


def _next(waiting: list[Cell], chain: Chain, source: random.Random) -> Kill | None:
    """The first in the deck that this training can have now; the end of a training is killed last."""
    early = chain.step < UPDATES - AHEAD_STEPS + 1 and any(phase != "finish" for phase, *_ in waiting)
    kills = (draw(cell, chain.step, source) for cell in waiting if cell[0] != "finish" or not early)
    return next((kill for kill in kills if kill is not None), None)


def kill_once(project: Project, chain: Chain, kill: Kill) -> bool:
    """One process of the training; returns whether the kill took place."""
    process = project.start_training(plan=kill.plan(), anew=not chain.outcomes)
    if kill.from_outside:
        project.wait_until_hit(process)
        if process.poll() is None:
            os.kill(process.pid, kill.signal)
    done = project.finish(process)
    truth = project.read_truth()
    chain.finished = done.code == 0
    if truth is None:
        chain.history.append(f"{kill}: not reached, exit {done.code}")
        if done.code:
            chain.outcomes.append(Outcome(kill.cell, str(kill), [f"ended before the kill: {done.last_line}"]))
            chain.finished = True
        return False
    ended = time.time() - project.truth.stat().st_mtime
    told = project.json("postmortem.json") if done.code else {}
    faults = faults_of(kill, chain.step, truth, done, told) + _resumed_wrong(chain, done)
    if kill.rank is not None and kill.signal not in STOPS and ended > END_SECONDS:
        faults.append(f"took {ended:.1f} s to end")
    if left := left_over(project.folder):
        faults.append(f"still there: {left}")
    resumes = told.get("resumes_from_step", 0)
    lost = max(0, truth["step"] - resumes) if done.code else 0
    chain.outcomes.append(Outcome(kill.cell, str(kill), faults, ended, lost))
    chain.history.append(f"{kill}: {truth['phase']} after step {truth['step']}, exit {done.code}, {faults or 'right'}")
    chain.at_the_end += chain.step >= UPDATES
    chain.step = resumes
    return True


def _resumed_wrong(chain: Chain, done: Done) -> list[str]:
    """Whether a process continued where the post-mortem before it had promised."""
    if done.continued_from is None or done.continued_from == chain.step:
        return []
    return [f"continued from step {done.continued_from} and not {chain.step}"]


def finish_chain(project: Project, reference: Fingerprint, chain: Chain) -> None:
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
    exact = chain.finished and project.fingerprint() == reference
    if not exact:
        faults.append("other results than those of a training that nobody killed")
        chain.history.append(faults[-1])
    for outcome in chain.outcomes:
        outcome.resumed_exactly = exact
    if chain.outcomes:
        chain.outcomes[-1].faults += faults
