"""Trainings that are killed, continued, killed again, to their end; which must be the end of one that nobody killed."""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.chaos.inject.chaos_sites import Site
from tests.support.chaos.project import SAVE_STEPS, UPDATES, Done, Fingerprint, Project, left_over

RANKS = 2  # where there are several
STOPS = (signal.SIGTERM, signal.SIGINT)
CAUSES = {signal.SIGKILL: "killed", signal.SIGSEGV: "crash", signal.SIGABRT: "crash", signal.SIGBUS: "crash"}
Cell = tuple[str, signal.Signals, int | None]  # a phase, a signal, a rank
END_SECONDS = 5.0  # for all ranks


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


@dataclass
class Outcome:
    """What came of one kill."""

    cell: Cell
    text: str  # the plan, to repeat it
    faults: list[str]
    lost_steps: int = 0
    resumed_exactly: bool = False


@dataclass
class Chain:
    """One training under way, over all its processes."""

    step: int = 0  # that the next process must continue from
    finished: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


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


def undisturbed(project: Project) -> Fingerprint:
    """Train once; raises RuntimeError when that ends badly."""
    done = project.train(anew=True)
    if done.code:
        raise RuntimeError(f"the training does not run at all: {done.out[-3000:]}")
    return project.fingerprint()


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
    chain.outcomes.append(Outcome(kill.cell, str(kill), faults, lost))
    chain.history.append(f"{kill}: {truth['phase']} after step {truth['step']}, exit {done.code}, {faults or 'right'}")
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
