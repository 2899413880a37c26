"""A few of the deaths of one rank among two that `benchmarks.bench_chaos --ranks` stages by the dozen."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos.ending import Ground, through_mlx_launch
from tests.support.chaos.inject.chaos_sites import SITES
from tests.support.chaos.kills import RANKS, Chain, Kill, finish_chain, kill_once, undisturbed
from tests.support.chaos.project import SAVE_STEPS, Project, scratch_folder


@pytest.fixture(scope="module")
def ground(shared_cache: Path) -> Iterator[Ground]:
    with scratch_folder() as folder:
        project = Project(folder / "main", train={"ranks": RANKS, "max_steps": 12}, cache=shared_cache)
        project.pin(preflight={"level": "quick"})
        project.plan()
        yield Ground(project, undisturbed(project), folder)


def test_a_training_of_which_a_rank_is_killed_ends_as_if_nothing_had_happened(ground: Ground) -> None:
    chain, site = Chain(), next(each for each in SITES if each.name == "rename")
    assert kill_once(ground.project, chain, Kill(site, 1, "entry", 0.0, signal.SIGSEGV, False, rank=0))
    finish_chain(ground.project, ground.reference, chain)
    (outcome,) = chain.outcomes
    assert (outcome.faults, outcome.resumed_exactly) == ([], True), chain.history
    assert outcome.lost_steps <= SAVE_STEPS


def test_ranks_that_mlx_launch_starts_are_watched_too(ground: Ground) -> None:
    """As on several machines, all of which are this one; the other rank is killed."""
    assert through_mlx_launch(ground, 1).faults == []
