"""Texts that are near copies end in one cluster, and no others: beside a comparison of all with all."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from safetrain.core.data.words import words_of
from safetrain.data import compare
from safetrain.data.compare import Shingles, shingles

WORDS = some.lists(some.sampled_from("abcdefghijklmnopqrst"), min_size=1, max_size=30).map(" ".join)


def found_in(texts: list[str], similarity: float) -> tuple[list[int], str]:
    """The first text that each is connected to, and why not all were compared."""
    known = Shingles()
    known.add(words_of(texts[: len(texts) // 2]))
    known.add(words_of(texts[len(texts) // 2 :]))
    clusters, left_out = known.clusters(similarity)
    return clusters.tolist(), left_out


def connected(texts: list[str], similarity: float) -> list[int]:
    """The first text that each is connected to, by a comparison of all with all."""
    sets, first = [set(shingles(words_of([text]))[0].tolist()) for text in texts], list(range(len(texts)))
    for a, b in itertools.combinations(range(len(texts)), 2):
        if len(sets[a] & sets[b]) >= similarity * len(sets[a] | sets[b]) - 1e-9:
            low, high = sorted((first[a], first[b]))
            first = [low if number == high else number for number in first]
    return first


def require_right(texts: list[str], similarity: float) -> None:
    assert found_in(texts, similarity) == (connected(texts, similarity), "")


@given(some.lists(WORDS, min_size=2, max_size=9), some.data(), some.sampled_from([0.5, 0.7, 0.8, 0.95]))
@settings(deadline=None, database=None, max_examples=40)
def test_clusters_are_exact(texts: list[str], draw: some.DataObject, similarity: float) -> None:
    words = draw.draw(some.sampled_from(texts)).split()
    place = draw.draw(some.integers(0, len(words) - 1))
    require_right([*texts, " ".join([*words[:place], "another", *words[place + 1 :]])], similarity)


@pytest.mark.parametrize("block", [2**20, 100])
def test_families_are_connected_as_all_pairs_would_be(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Words are replaced anywhere in two long questions, so that some are near by what all share, some by rare runs."""
    monkeypatch.setattr(compare, "BLOCK", block)
    chance = random.Random(block)
    questions = [[f"{name}{number}" for number in range(40)] for name in "ab"]
    texts = []
    for number in range(160):
        words = [*chance.choice(questions), *["more"] * chance.randrange(2)]
        for place in chance.choices(range(40), k=chance.randrange(4)):
            words[place] = chance.choice(["x", "y", f"only{number // 3}", f"only{number}"])
        texts.append(" ".join(words))
    require_right(texts, 0.8)


def test_a_large_family_of_near_copies_is_one_cluster() -> None:
    texts = [" ".join([*(f"w{word}" for word in range(44)), f"last{number}"]) for number in range(3000)]
    assert found_in(texts, 0.8) == ([0] * 3000, "")


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{n} one two three four five six seven eight nine ten {n}" for n in "abcdefgh"]
    monkeypatch.setattr(compare, "MOST_CANDIDATES", 5)
    assert "pairs of questions resemble" in found_in(texts, 0.5)[1]
    monkeypatch.setattr(compare, "MOST_TEXTS", 5)
    clusters, left_out = found_in(texts, 0.5)
    assert "only identical questions were found" in left_out
    assert clusters == list(range(8))
