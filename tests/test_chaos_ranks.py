"""A few of the deaths of one rank among two that benchmarks/bench_chaos_ranks.py stages by the dozen."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos.chains import Reference, undisturbed
from tests.support.chaos.ending import Ground
from tests.support.chaos.inject.chaos_sites import OF_RANKS, SITES
from tests.support.chaos.project import SAVE_STEPS, Project, scratch_folder
from tests.support.chaos.ranks import RANKS, RankKill, kill, through_mlx_launch

KILLS = (  # site, call, signal, rank; one after the other, in one training
    ("sum", 14, signal.SIGKILL, 1),
    ("rename", 1, signal.SIGSEGV, 0),
    ("update", 4, signal.SIGTERM, 1),
)


@pytest.fixture(scope="module")
def ground(shared_cache: Path) -> Iterator[Ground]:
    with scratch_folder() as folder:
        project = Project(folder / "main", train={"ranks": RANKS, "max_steps": 12}, cache=shared_cache)
        project.plan()
        yield Ground(project, Reference(undisturbed(project), {}), folder, random.Random(1))


def test_a_training_of_which_either_rank_is_killed_ends_as_if_nothing_had_happened(ground: Ground) -> None:
    project, step = ground.project, 0
    for name, occurrence, number, rank in KILLS:
        site = next(each for each in (*SITES, *OF_RANKS) if each.name == name)
        outcome, step = kill(project, RankKill(site, occurrence, "entry", 0.0, number, False, rank), step)
        assert outcome is not None
        assert outcome.faults == []
        assert outcome.lost_steps <= SAVE_STEPS
    done = project.train()
    assert (done.code, done.continued_from) == (0, step)
    assert project.fingerprint() == ground.reference.fingerprint


def test_ranks_that_mlx_launch_starts_are_watched_too(ground: Ground) -> None:
    """As on several machines, all of which are this one."""
    assert through_mlx_launch(ground, 1).faults == []
