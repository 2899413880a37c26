"""A few of the deaths that benchmarks/bench_chaos.py stages by the hundred: said right, continued bit for bit."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attached import attach_and_kill
from tests.support.chaos.chains import Chain, Reference, finish_chain, kill_once, undisturbed
from tests.support.chaos.disk import damaged
from tests.support.chaos.ending import Ground
from tests.support.chaos.inject.chaos_sites import SITES
from tests.support.chaos.kills import Kill
from tests.support.chaos.project import SAVE_STEPS, Project, scratch_folder

DELAY_SECONDS = 0.002
KILLS = (  # site, call, place, signal, whether to the supervisor; one after the other, in one training
    ("open base", 1, "exit", signal.SIGSEGV, False),
    ("micro-batch", 12, "inside", signal.SIGKILL, False),
    ("validate", 2, "inside", signal.SIGTERM, True),
    ("rename", 1, "entry", signal.SIGBUS, False),
    ("update", 6, "exit", signal.SIGINT, False),
    ("open adapter", 1, "exit", signal.SIGKILL, False),
    ("write summary", 1, "exit", signal.SIGKILL, False),
)


@pytest.fixture(scope="module")
def ground(shared_cache: Path) -> Iterator[Ground]:
    with scratch_folder() as folder:
        project = Project(folder / "main", cache=shared_cache)
        project.plan()
        yield Ground(project, Reference(undisturbed(project), {}), folder, random.Random(1))


def test_a_training_killed_in_every_way_ends_as_if_nothing_had_happened(ground: Ground) -> None:
    chain = Chain(1)
    for name, occurrence, place, number, outside in KILLS:
        site = next(each for each in SITES if each.name == name)
        kill = Kill(site, occurrence, place, DELAY_SECONDS, number, outside)
        assert kill_once(ground.project, chain, kill, (site.phase, number)), chain.history
    finish_chain(ground.project, ground.reference, chain)
    assert [outcome.faults for outcome in chain.outcomes] == [[]] * len(KILLS), chain.history
    assert all(outcome.resumed_exactly for outcome in chain.outcomes)
    assert max(outcome.lost_steps for outcome in chain.outcomes) <= SAVE_STEPS


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(ground: Ground) -> None:
    assert damaged(ground, most_cases=2).faults == []


def test_a_training_that_is_watched_ends_as_one_that_is_not(ground: Ground) -> None:
    process = ground.project.start_training(anew=True)
    seen = list(attach_and_kill(ground.project, process, 4, 0.1))
    done = ground.project.finish(process)
    assert done.code == 0, done.out
    assert all(each.drawn_bytes for each in seen)
    assert seen
    assert ground.project.fingerprint() == ground.reference.fingerprint
