"""Kills drawn from a seed: in which phase and call, how far into it, by which signal; and what must be said of it."""

import random
import signal
from dataclasses import dataclass
from typing import Any

from tests.support.chaos.inject.chaos_sites import PHASES, SITES, Site
from tests.support.chaos.project import EVAL_STEPS, SAVE_STEPS, UPDATES, Done

STOPS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, *STOPS)
CAUSES = {signal.SIGKILL: "killed", signal.SIGSEGV: "crash", signal.SIGABRT: "crash", signal.SIGBUS: "crash"}
AHEAD_STEPS = 7  # a kill comes at most so many updates after the start, so that a run takes many
ARRAY_FILES = 3  # of a checkpoint
Cell = tuple[str, signal.Signals]  # a phase and a signal


@dataclass(frozen=True)
class Kill:
    """One kill."""

    site: Site
    occurrence: int  # of the calls since the start of the process, from 1
    place: str  # entry, exit, inside
    delay_seconds: float  # into the call, where inside
    signal: signal.Signals
    from_outside: bool  # to the supervisor

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
        }

    def __str__(self) -> str:
        where = f"{self.place} of call {self.occurrence} of '{self.site.name}'"
        later = f" {1000 * self.delay_seconds:.1f} ms after its begin" if self.place == "inside" else ""
        return f"{self.signal.name} to the {'supervisor' if self.from_outside else 'worker'} at the {where}{later}"


def deck(count: int, source: random.Random) -> list[Cell]:
    """At least ``count`` pairs of phase and signal, all of them equally often, shuffled."""
    cells = [(phase, number) for phase in PHASES for number in SIGNALS]
    rounds = -(-count // len(cells))
    drawn = cells * rounds
    source.shuffle(drawn)
    return drawn


def draw(cell: Cell, step: int, seconds: dict[str, list[float]], source: random.Random) -> Kill | None:
    """A kill of this kind in a process that starts at ``step``; None if such a process has no such phase.

    ``seconds``: how long each call took in a run without kills.
    """
    phase, number = cell
    calls = {site: calls_of(site, step) for site in SITES if site.phase == phase}
    possible = [site for site, count in calls.items() if count]
    if not possible:
        return None
    site = source.choice(possible)
    taken = sorted(seconds[site.name]) if seconds.get(site.name) else [0.001]
    return Kill(
        site,
        occurrence=source.randint(1, calls[site]),
        place=source.choice(("entry", "exit", "inside", "inside")),
        delay_seconds=source.random() * taken[len(taken) // 2],
        signal=number,
        from_outside=number in STOPS and source.random() < 0.5,
    )


def calls_of(site: Site, step: int) -> int:
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
            return 2
        case "open adapter":  # when the last update is made
            return int(step + AHEAD_STEPS >= UPDATES)
        case "keep best":  # a better one is not sure
            return min(1, validations) if step == 0 else 0
        case "prune":  # the newest two and the best one are kept
            return max(0, saves - 1) if step >= 2 * SAVE_STEPS else 0
    counts = {"gradient": len(steps), "optimizer": len(steps), "evaluate": validations + (step == 0)}
    by_file = site.name == "write arrays"
    return (counts | {"save": saves * (ARRAY_FILES if by_file else 1)}).get(site.phase, 1)


def faults_of(kill: Kill, began_at: int, truth: dict[str, Any], done: Done, told: dict[str, Any]) -> list[str]:
    """What is wrong with the end of a killed training and with what was said of it; empty if nothing."""
    if kill.signal in STOPS:
        return _faults_of_stop(kill, max(began_at, truth["step"]), done, told)
    if done.code == 0 and truth["phase"] == "finish":  # everything was written: no reason to call it dead
        return []
    expected = {
        "cause": CAUSES[kill.signal],
        "is_memory": False,
        "phase": truth["phase"],
        "exit_code": 128 + kill.signal,
    }
    if truth["phase"] in ("gradient", "optimizer"):
        expected["step"] = truth["step"] + 1
    elif truth["phase"] in ("evaluate", "save"):
        expected["step"] = truth["step"]
    found = [
        f"{key} is {told.get(key)!r} and not {value!r}" for key, value in expected.items() if told.get(key) != value
    ]
    if done.code != 128 + kill.signal:
        found.append(f"exit code {done.code} and not {128 + kill.signal}")
    lost = truth["step"] - told.get("resumes_from_step", 0)
    if truth["step"] and lost > SAVE_STEPS:
        found.append(f"{lost} steps are lost")
    return found


def _faults_of_stop(kill: Kill, step: int, done: Done, told: dict[str, Any]) -> list[str]:
    """A stop saves and ends with 128 plus the signal; when the last update is made it may come too late."""
    if done.code == 0:
        return [] if step >= UPDATES - 1 else ["the training did not stop"]
    expected = {"cause": "stopped", "is_memory": False, "exit_code": 128 + kill.signal}
    saved = {"after save", "after resume"}  # a stop that comes while everything is loaded finds nothing new to save
    if step <= 1:
        saved |= {
            "evaluate",
            "after evaluate",
            "gradient",
            "after gradient",
        }  # before the first update nothing is there to be saved
    if step >= UPDATES - 1:
        saved.add("verify")  # the adapter's folder is compared with the tuned model
    found = [] if told.get("phase") in saved else [f"phase is {told.get('phase')!r} and not one of {saved}"]
    found += [
        f"{key} is {told.get(key)!r} and not {value!r}" for key, value in expected.items() if told.get(key) != value
    ]
    if done.code != 128 + kill.signal:
        found.append(f"exit code {done.code} and not {128 + kill.signal}")
    if told.get("resumes_from_step", 0) < step:
        found.append("a stop lost steps")
    return found
