"""A row's split is a property of what it asks: other rows that come, go or change places do not move it."""

import random
from pathlib import Path

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from safetrain.core.data.words import words_of
from safetrain.core.errors import DataError
from safetrain.data.compare import Shingles, digests, first_alike
from safetrain.data.split import TEST, TRAIN, VALID, split_off

SHARES = {"valid": 0.2, "test": 0.2}
SIMILARITY = 0.6
QUESTION = some.lists(some.sampled_from(("iron", "gold", "tin", "lead", "zinc")), min_size=1, max_size=14).map(" ".join)
QUESTIONS = some.lists(QUESTION, min_size=3, max_size=30)


def dealt(questions: list[str], shares: dict[str, float] = SHARES) -> tuple[list[int], list[int], str]:
    """The split and the cluster of each question, and the words."""
    words = words_of(questions)
    numbers = digests(words)
    known = Shingles()
    known.add(words)
    together = known.clusters(SIMILARITY)[0][first_alike(numbers)]
    parts, how = split_off(["train"], np.zeros(len(questions), int), together, numbers, shares, Path("a.jsonl"))
    return parts.tolist(), together.tolist(), how


def members(questions: list[str], together: list[int]) -> dict[str, frozenset[str]]:
    return {
        question: frozenset(other for other, mark in zip(questions, together, strict=True) if mark == own)
        for question, own in zip(questions, together, strict=True)
    }


@given(QUESTIONS, QUESTIONS, some.randoms())
@settings(deadline=None, database=None, max_examples=25)
def test_only_rows_whose_cluster_changes_move(before: list[str], new: list[str], order: random.Random) -> None:
    after = [*before[1:], *new]
    order.shuffle(after)
    assume(len(set(before)) > 4)
    try:
        first, first_clusters, said = dealt(before)
        second, second_clusters, said_then = dealt(after)
    except DataError:
        assume(False)
    assume("would have been empty" not in said + said_then)
    were, are = members(before, first_clusters), members(after, second_clusters)
    now = dict(zip(after, second, strict=True))
    for question, part in zip(before, first, strict=True):
        if question in now and were[question] == are[question]:
            assert now[question] == part


@given(QUESTIONS)
@settings(deadline=None, database=None, max_examples=25)
def test_no_near_copy_crosses_and_no_split_is_empty(questions: list[str]) -> None:
    try:
        parts, together, _ = dealt(questions)
    except DataError:
        return
    assert {TRAIN, VALID, TEST} == set(parts)
    assert len({(mark, part) for mark, part in zip(together, parts, strict=True)}) == len(set(together))


def test_the_shares_are_kept_on_average() -> None:
    parts, _, how = dealt([f"row {number} is no copy" for number in range(3000)], {"valid": 0.1, "test": 0.3})
    assert 0.08 < parts.count(VALID) / 3000 < 0.12
    assert 0.27 < parts.count(TEST) / 3000 < 0.33
    assert "empty" not in how
    more = dealt([f"row {number} is no copy" for number in range(3000)], {"valid": 0.3, "test": 0.3})[0]
    assert [part == TEST for part in parts] == [part == TEST for part in more], "another share leaves the other split"
    few, _, how = dealt(["one thing", "another thing", "a third thing"], {"valid": 0.01, "test": 0.01})
    assert (sorted(few), "valid and test would have been empty" in how) == ([TRAIN, VALID, TEST], True)


def test_files_of_their_own_stay_as_they_are_and_copies_of_their_rows_in_train() -> None:
    files = np.array([0] * 200 + [1] * 100)
    together = np.concatenate([np.arange(200), np.arange(100)])
    numbers = digests(words_of([f"row {number} is no copy" for number in together]))
    parts, how = split_off(["train", "valid"], files, together, numbers, SHARES, Path("a"))
    assert (set(parts[200:].tolist()), set(parts[:100].tolist())) == ({VALID}, {TRAIN})
    assert TEST in parts[100:200]
    assert "valid (" not in how
    names, three = ["train", "valid", "test"], np.arange(3)
    parts, how = split_off(names, np.array([2, 1, 0]), three, three.astype(np.uint64), SHARES, Path("a"))
    assert (parts.tolist(), how) == ([TEST, VALID, TRAIN], "using the given train, valid and test files")
