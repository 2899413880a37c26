"""Kills drawn from a seed: in which phase and call, how far into it, by which signal, of several ranks which one."""

import random
import signal
from collections.abc import Callable

from tests.support.chaos.inject.chaos_sites import OF_RANKS, SITES, Site
from tests.support.chaos.kills import STOPS, Cell, Chain, Kill, Outcome, finish_chain, kill_once, undisturbed
from tests.support.chaos.project import Fingerprint, Project

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, *STOPS)
SIGNALS_OF_RANKS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
ON_ALL_RANKS = ("read rows", "open base", "add adapters", "micro-batch", "update")
NOT_OF_RANKS = ("validate", "load BLAS", "keep best", "measure")  # not called there, or in another phase than its own
MOST_DELAY_SECONDS = 0.005
MOST_TRAININGS = 500  # so that every seed comes to an end


def sites_of(rank: int | None) -> list[Site]:
    """Where a training process can be hit."""
    if rank is None:
        return list(SITES)
    every = [site for site in (*SITES, *OF_RANKS) if site.name not in NOT_OF_RANKS]
    return [site for site in every if rank == 0 or site.name in ON_ALL_RANKS or site in OF_RANKS]


def draw(cell: Cell, source: random.Random) -> Kill:
    """A kill of this kind, which not every process comes to."""
    phase, number, rank = cell
    site = source.choice([each for each in sites_of(rank) if each.phase == phase])
    place, delay = source.choice(("entry", "exit", "inside", "inside")), source.random() * MOST_DELAY_SECONDS
    outside = number in STOPS and source.random() < 0.5
    return Kill(site, source.randint(1, site.calls), place, delay, number, outside, rank)


def make_reference(project: Project) -> Fingerprint:
    """What a training comes to that nobody kills; raises RuntimeError unless two end alike."""
    found = undisturbed(project)
    if undisturbed(project) != found:
        raise RuntimeError("two trainings that nobody killed differ")
    return found


def run_chains(
    project: Project, reference: Fingerprint, kills: int, seed: int, say: Callable[[str], None], ranks: int = 1
) -> list[Outcome]:
    """Kill trainings until every kind of kill has had its turns; at least ``kills`` of them."""
    source, outcomes = random.Random(seed), list[Outcome]()
    numbers = SIGNALS if ranks == 1 else SIGNALS_OF_RANKS
    who: list[int | None] = [None] if ranks == 1 else [*range(ranks)]
    phases = [(phase, rank) for rank in who for phase in dict.fromkeys(each.phase for each in sites_of(rank))]
    kinds = [(phase, number, rank) for phase, rank in phases for number in numbers]
    waiting = kinds * -(-kills // len(kinds))
    for _ in range(MOST_TRAININGS):
        chain = Chain()
        while waiting and not chain.finished:
            cell = source.choice(waiting)
            if kill_once(project, chain, draw(cell, source)):
                waiting.remove(cell)
        finish_chain(project, reference, chain)
        outcomes += chain.outcomes
        wrong = sum(bool(outcome.faults) for outcome in chain.outcomes)
        say(f"{len(chain.outcomes)} kills of one training (seed {seed}), {wrong} wrong; {len(waiting)} to be made")
        for line in chain.history if wrong else []:
            say(f"    {line}")
        if not waiting:
            break
    return outcomes
