"""A few of the deaths that benchmarks/bench_chaos.py stages by the hundred: said right, continued bit for bit."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos.ending import Ground, through_mlx_launch
from tests.support.chaos.inject.chaos_sites import SITES
from tests.support.chaos.kills import RANKS, Chain, Kill, finish_chain, kill_once, undisturbed
from tests.support.chaos.project import SAVE_STEPS, Project, scratch_folder

KILLS = (  # site, call, place, signal, whether to the supervisor; one after the other, in one training
    ("micro-batch", 12, "inside", signal.SIGKILL, False),
    ("validate", 2, "inside", signal.SIGTERM, True),
    ("rename", 1, "entry", signal.SIGBUS, False),
    ("update", 6, "exit", signal.SIGINT, False),
    ("open adapter", 1, "exit", signal.SIGSEGV, False),
    ("replace results", 1, "entry", signal.SIGKILL, False),
)


@pytest.fixture(scope="module")
def planned(shared_cache: Path) -> Iterator[Project]:
    with scratch_folder() as folder:
        project = Project(folder / "planned", cache=shared_cache)
        project.pin(preflight={"level": "quick"})
        project.plan()
        yield project


def ground_of(planned: Project, cache: Path, **train: int) -> Iterator[Ground]:
    with scratch_folder() as folder:
        project = Project(folder / "main", train=train, cache=cache)
        for name in ("checkpoints_qlora", "data/validated"):
            shutil.copytree(planned.folder / name, project.folder / name)
        yield Ground(project, undisturbed(project), folder)


@pytest.fixture(scope="module")
def ground(planned: Project, shared_cache: Path) -> Iterator[Ground]:
    yield from ground_of(planned, shared_cache)


@pytest.fixture(scope="module")
def ground_of_ranks(planned: Project, shared_cache: Path) -> Iterator[Ground]:
    yield from ground_of(planned, shared_cache, ranks=RANKS, max_steps=12)


def test_a_training_killed_in_every_way_ends_as_if_nothing_had_happened(ground: Ground) -> None:
    chain = Chain()
    for name, occurrence, place, number, outside in KILLS:
        site = next(each for each in SITES if each.name == name)
        assert kill_once(ground.project, chain, Kill(site, occurrence, place, 0.002, number, outside)), chain.history
    finish_chain(ground.project, ground.reference, chain)
    assert [outcome.faults for outcome in chain.outcomes] == [[]] * len(KILLS), chain.history
    assert all(outcome.resumed_exactly for outcome in chain.outcomes)
    assert max(outcome.lost_steps for outcome in chain.outcomes) <= SAVE_STEPS


def test_a_training_of_which_a_rank_is_killed_ends_as_if_nothing_had_happened(ground_of_ranks: Ground) -> None:
    chain, site = Chain(), next(each for each in SITES if each.name == "rename")
    assert kill_once(ground_of_ranks.project, chain, Kill(site, 1, "entry", 0.0, signal.SIGSEGV, False, rank=0))
    finish_chain(ground_of_ranks.project, ground_of_ranks.reference, chain)
    (outcome,) = chain.outcomes
    assert (outcome.faults, outcome.resumed_exactly) == ([], True), chain.history
    assert outcome.lost_steps <= SAVE_STEPS


def test_ranks_that_mlx_launch_starts_are_watched_too(ground_of_ranks: Ground) -> None:
    """As on several machines, all of which are this one; the other rank is killed."""
    assert through_mlx_launch(ground_of_ranks, 1).faults == []
