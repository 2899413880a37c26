"""Every pair of near copies is found, and no other: beside a comparison of all with all."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from safetrain.core.data.words import shingles, words_of
from safetrain.plan import near_copies
from safetrain.plan.near_copies import ShingleFile, clusters, find
from tests.support.made_texts import Maker

WORDS = some.lists(some.sampled_from("abcdefghijklmnopqrst"), min_size=1, max_size=30).map(" ".join)


def pairs_of(texts: list[str], similarity: float) -> set[tuple[int, int]]:
    with ShingleFile(Path()) as file:
        file.add(words_of(texts[: len(texts) // 2]))
        file.add(words_of(texts[len(texts) // 2 :]))
        found = find(file, np.arange(len(texts)), similarity)
    assert found.complete
    return {(min(pair), max(pair)) for pair in found.pairs.tolist()}


def compared(texts: list[str], similarity: float) -> set[tuple[int, int]]:
    sets = [set(shingles(words_of([text]))[0].tolist()) for text in texts]
    numbered = itertools.combinations(range(len(texts)), 2)
    return {(a, b) for a, b in numbered if len(sets[a] & sets[b]) >= similarity * len(sets[a] | sets[b]) - 1e-9}


@given(some.lists(WORDS, min_size=2, max_size=9), some.data(), some.sampled_from([0.5, 0.7, 0.8, 0.95]))
@settings(deadline=None, database=None, max_examples=80)
def test_all_near_copies_are_found_and_no_others(texts: list[str], draw: some.DataObject, similarity: float) -> None:
    words = draw.draw(some.sampled_from(texts)).split()
    place = draw.draw(some.integers(0, len(words) - 1))
    texts = [*texts, " ".join([*words[:place], "another", *words[place + 1 :]])]  # ten at most: nothing is a form
    assert pairs_of(texts, similarity) == compared(texts, similarity)


def test_many_texts_in_several_parts_give_the_same_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(3)
    texts = [maker.english()[0] for _ in range(400)]
    texts += [" ".join([*text.split()[:-1], "instead"]) for text in texts[::7]]
    whole = pairs_of(texts, 0.7)
    assert whole == compared(texts, 0.7)
    assert len(whole) >= 55
    for name, size in (("BLOCK", 100), ("LOOKED_UP", 64), ("SORTED", 20), ("AT_ONCE", 10), ("COMPARED", 3)):
        monkeypatch.setattr(near_copies, name, size)
    assert pairs_of(texts, 0.7) == whole


def test_a_form_that_is_the_smaller_part_of_the_questions_makes_them_no_copies() -> None:
    form = "Read the following text with care and say in one word whether its writer is glad or sad about it. Text:"
    maker = Maker(4)
    texts = [f"{form} {maker.english()[0]}" for _ in range(60)]
    assert pairs_of(texts, 0.8) == set()
    assert pairs_of(texts, 0.5) == compared(texts, 0.5)
    assert len(pairs_of([*texts, texts[0] + " now"], 0.8)) == 1


def test_more_pairs_than_can_be_compared_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_copies, "MOST_CANDIDATES", 5)
    monkeypatch.setattr(near_copies, "AT_ONCE", 3)
    with ShingleFile(Path()) as file:
        file.add(words_of([f"one two three four five six seven eight nine ten eleven {n}" for n in "abcdefgh"]))
        assert not find(file, np.arange(8), 0.7).complete


def test_clusters_are_what_pairs_connect() -> None:
    pairs = np.array([[5, 6], [1, 4], [4, 6], [0, 2]])
    assert clusters(8, pairs).tolist() == [0, 1, 0, 3, 1, 1, 1, 7]
    assert clusters(3, np.zeros((0, 2), dtype=np.int64)).tolist() == [0, 1, 2]


def connected(texts: list[str], similarity: float) -> list[int]:
    pairs = sorted(compared(texts, similarity))
    return clusters(len(texts), np.array(pairs).reshape(-1, 2)).tolist()


@pytest.mark.parametrize("copies", [10, 11, 51, 300])
def test_a_family_of_any_size_is_one_cluster(copies: int) -> None:
    maker = Maker(5)
    others = [maker.english()[0] for _ in range(100)]
    question = " ".join(f"w{number}" for number in range(44))
    texts = [*others[:50], *(f"{question} last{number}" for number in range(copies)), *others[50:]]
    pairs = pairs_of(texts, 0.8)
    together = clusters(len(texts), np.array(sorted(pairs)))
    assert set(together[50 : 50 + copies].tolist()) == {50}
    assert not {number for pair in pairs for number in pair} & {*range(50), *range(50 + copies, len(texts))}


@pytest.mark.parametrize("seed", range(4))
def test_families_are_connected_as_all_pairs_would_be(seed: int) -> None:
    """Words are replaced anywhere in two long questions, so that some are near by what all share, some by rare runs."""
    chance = random.Random(seed)
    questions = [[f"{name}{number}" for number in range(40)] for name in "ab"]
    texts = []
    for number in range(160):
        words = [*chance.choice(questions), *["more"] * chance.randrange(2)]
        for place in chance.choices(range(40), k=chance.randrange(4)):
            words[place] = chance.choice(["x", "y", f"only{number // 3}", f"only{number}"])
        texts.append(" ".join(words))
    found = pairs_of(texts, 0.8)
    assert found <= compared(texts, 0.8)
    assert clusters(len(texts), np.array(sorted(found))).tolist() == connected(texts, 0.8)


def test_each_member_of_a_family_has_a_partner_on_each_side() -> None:
    texts = [" ".join([*(f"w{word}" for word in range(44)), f"last{number}"]) for number in range(90)]
    sides = np.repeat([0, 1, 2], 30)
    with ShingleFile(Path()) as file:
        file.add(words_of(texts))
        pairs = find(file, np.arange(90), 0.8, sides).pairs
    both = np.concatenate([pairs, pairs[:, ::-1]])
    assert all(set(sides[both[both[:, 0] == number, 1]].tolist()) == {0, 1, 2} for number in range(90))
