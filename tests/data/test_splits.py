"""Splits: by the names of files, and else by what a row asks: near-duplicates stay together, other rows move none."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from safetrain.core.errors import DataError
from safetrain.core.text.words import words_of
from safetrain.data import compare
from safetrain.data.compare import Shingles, digests, first_alike
from safetrain.data.folders import data_files_of
from safetrain.data.split import TEST, TRAIN, VALID, split_off
from safetrain.data.validate import Validation, validate
from tests.conftest import EMBEDDED

SHARES = {"valid": 0.2, "test": 0.2}
SIMILARITY = 0.6
QUESTION = some.lists(some.sampled_from(("iron", "gold", "tin", "lead", "zinc")), min_size=1, max_size=14).map(" ".join)
QUESTIONS = some.lists(QUESTION, min_size=3, max_size=30)


def dealt(
    questions: list[str], shares: dict[str, float] = SHARES, similarity: float = SIMILARITY
) -> tuple[list[int], list[int], str]:
    """The split and the cluster of each question, and the words."""
    words = words_of(questions)
    numbers = digests(words)
    known = Shingles()
    known.add(words)
    groups = first_alike(numbers)
    together = known.clusters(similarity, groups)[0][groups]
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
    assume(all(max(map(marks.count, marks)) <= 0.2 * len(marks) for marks in (first_clusters, second_clusters)))
    for parts, together in ((first, first_clusters), (second, second_clusters)):
        assert {TRAIN, VALID, TEST} == set(parts), "no split is empty"
        assert len(set(zip(together, parts, strict=True))) == len(set(together)), "no near copy crosses"
    were, are = members(before, first_clusters), members(after, second_clusters)
    now = dict(zip(after, second, strict=True))
    for question, part in zip(before, first, strict=True):
        if question in now and were[question] == are[question]:
            assert now[question] == part


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


def found_in(texts: list[str], similarity: float) -> tuple[list[int], str]:
    """The first text that each is connected to, and why not all were compared."""
    known = Shingles()
    known.add(words_of(texts[: len(texts) // 2]))
    known.add(words_of(texts[len(texts) // 2 :]))
    groups = first_alike(digests(words_of(texts)))
    clusters, left_out = known.clusters(similarity, groups)
    return clusters[groups].tolist(), left_out


def runs_that_count(texts: list[str]) -> list[set[tuple[str, ...]]]:
    """Each text's runs of five words without a word of a common run, or else those that are not common."""
    split = [text.split() for text in texts]
    runs = [[tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))] for words in split]
    often = Counter(run for own in {tuple(own) for own in runs} for run in set(own))
    least, counting = max(20, 0.02 * len(set(texts))), []
    for own in runs:
        common = [at for at, run in enumerate(own) if often[run] >= least]
        clear = {run for at, run in enumerate(own) if all(abs(at - other) > 4 for other in common)}
        counting.append(clear or {run for run in own if often[run] < least})
    return counting


def connected(texts: list[str], similarity: float) -> list[int]:
    """The first text that each is connected to, by a comparison of all with all."""
    sets, first = runs_that_count(texts), [texts.index(text) for text in texts]
    for a, b in itertools.combinations(range(len(texts)), 2):
        if sets[a] and sets[b] and len(sets[a] & sets[b]) >= similarity * len(sets[a] | sets[b]) - 1e-9:
            low, high = sorted((first[a], first[b]))
            first = [low if number == high else number for number in first]
    return first


@pytest.mark.parametrize("block", [2**20, 100])
def test_families_are_connected_as_all_pairs_would_be(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Words are replaced anywhere in long questions, so that some are near by what all share, some by rare runs.

    Most have an instruction before or after them, in one of two wordings, and of some little or nothing else is left.
    """
    monkeypatch.setattr(compare, "BLOCK", block)
    chance = random.Random(block)
    questions = [[f"{name}{number}" for number in range(40)] for name in "abcdefghijkl"]
    wordings = ["", *(" ".join(f"{name}{number}" for number in range(30)) for name in "uv")]
    texts = []
    for number in range(160):
        words = [*chance.choice(questions), *["more"] * chance.randrange(2)]
        for place in chance.choices(range(40), k=chance.randrange(4)):
            words[place] = chance.choice(["x", "y", f"only{number // 3}", f"only{number}"])
        kept = " ".join(words[: chance.choice([40, 41, 7, 5, 3, 2, 0])])
        texts.append(f"{chance.choice(wordings)} {kept} {chance.choice(wordings)}".strip() or "nothing")
    found = found_in(texts, 0.8)
    assert found == (connected(texts, 0.8), "")
    assert len(set(runs_that_count(texts)[0])) < len(set(found[0])) < len(set(texts)), "some are near, most are not"


def test_a_large_family_of_near_copies_is_one_cluster() -> None:
    texts = [" ".join([*(f"w{text % 60} {word}" for word in range(22)), f"last{text}"]) for text in range(3000)]
    assert found_in(texts, 0.8) == ([text % 60 for text in range(3000)], "")


NAMES = [f"w{number}" for number in range(3000)]


def some_words(chance: random.Random, least: int, most: int) -> str:
    return " ".join(chance.choices(NAMES, k=chance.randint(least, most)))


def reviews(chance: random.Random) -> list[str]:
    """A long instruction before short texts and a few longer ones."""
    asked = some_words(chance, 20, 90)
    return [f"{asked} Review: {some_words(chance, *chance.choice([(3, 6)] * 9 + [(14, 22)]))}" for _ in range(600)]


def intents(chance: random.Random) -> list[str]:
    """Up to twelve wordings of an instruction."""
    asked = [some_words(chance, 30, 60) for _ in range(chance.randint(1, 12))]
    return [f"{chance.choice(asked)}\n{some_words(chance, 2, 11)}" for _ in range(600)]


def extractions(chance: random.Random) -> list[str]:
    """An instruction before and after long texts."""
    before, after = some_words(chance, 40, 40), some_words(chance, 20, 20)
    return [f"{before} {some_words(chance, 10, 60)} {after}" for _ in range(600)]


def few_shots(chance: random.Random) -> list[str]:
    """Three worked examples, the same in each row or drawn from a few, before the question."""
    asked = some_words(chance, 20, 20)
    pool = [
        f"In: {some_words(chance, 8, 20)} Out: {some_words(chance, 1, 4)}" for _ in range(chance.choice([3, 8, 20]))
    ]
    shown = [" ".join([asked, *chance.sample(pool, 3)]) for _ in range(600)]
    return [f"{examples} In: {some_words(chance, 4, 12)} Out:" for examples in shown]


def chats(chance: random.Random) -> list[str]:
    return [some_words(chance, 3, 40) for _ in range(600)]


@pytest.mark.parametrize("kind", [reviews, intents, extractions, few_shots, chats])
def test_a_long_instruction_leaves_the_shares_and_the_leaks_are_found(
    kind: Callable[[random.Random], list[str]],
) -> None:
    """Each part is within a factor of two of its tenth, and rows that ask the same are in one."""
    for seed in range(15):
        chance = random.Random(seed)
        questions = kind(chance)
        instruction = " ".join(questions[0].split()[:20])  # in the question of all, except in chats
        known = [some_words(chance, 7, 30) for _ in range(20)]
        pairs = [[f"{instruction} {text}", f"{instruction.upper()}: {text}!"] for text in known]
        if kind is intents:  # the same text with another wording of the instruction
            pairs += [[f"{' '.join(question.split()[:20])} {text}" for question in questions[:3]] for text in known]
        if kind is extractions:  # a word was changed
            long = [text for text in known if len(text.split()) > 25]
            pairs += [[f"{instruction} {text} {between} {text}" for between in ("so", "or")] for text in long]
        planted = [text for pair in pairs for text in pair]
        parts, together, how = dealt(questions + planted, {"valid": 0.1, "test": 0.1}, 0.8)
        for part in (VALID, TEST):
            assert 0.05 < parts.count(part) / len(parts) < 0.2, (seed, how)
        assert len(set(zip(together, parts, strict=True))) == len(set(together)), "no near copy crosses"
        of = dict(zip(questions + planted, parts, strict=True))
        assert all(len({of[text] for text in pair}) == 1 for pair in pairs), seed


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{n} one two three four five six seven eight nine ten {n}" for n in "abcdefgh"]
    monkeypatch.setattr(compare, "MOST_CANDIDATES", 5)
    assert "pairs of similar questions" in found_in(texts, 0.5)[1]
    monkeypatch.setattr(compare, "MOST_TEXTS", 5)
    clusters, left_out = found_in(texts, 0.5)
    assert "only identical questions were found" in left_out
    assert clusters == list(range(8))


def chain(length: int) -> list[str]:
    """Rows that are one cluster because each is nearly its neighbour; they have no common instruction."""
    return [" ".join(f"k{word}" for word in range(3 * number, 3 * number + 60)) for number in range(length)]


def test_a_cluster_larger_than_a_split_is_in_train_and_the_others_fill_the_splits() -> None:
    tenths, others = {"valid": 0.1, "test": 0.1}, [f"row {number} is no copy" for number in range(3500)]
    parts, together, _ = dealt(chain(500) + others[:500], tenths, 0.8)
    assert (set(parts[:500]), len(set(together[:500]))) == ({TRAIN}, 1)
    assert 80 < parts.count(VALID) < 120
    assert 80 < parts.count(TEST) < 120
    more, _, _ = dealt(chain(550) + others[:550], tenths, 0.8)
    now = [*more[:500], *more[550:1050]]
    assert sum(one != other for one, other in zip(parts, now, strict=True)) <= 10, "more rows move hardly any"
    parts, _, _ = dealt(chain(900) + others[:100], tenths, 0.8)
    assert [set(parts[:900]), 20 < parts.count(VALID) < 30, 20 < parts.count(TEST) < 30] == [{TRAIN}, True, True]
    parts, _, _ = dealt([*chain(97), *others[:2]], tenths, 0.8)
    assert sorted(parts[97:]) == [VALID, TEST], "rather small than the chain"


@pytest.mark.parametrize("kind", ["text", "alpaca", "system"])
def test_a_split_that_is_far_from_its_share_is_a_warning_with_the_key_to_set(tmp_path: Path, kind: str) -> None:
    def written(questions: list[str]) -> Validation:
        rows = [as_row(text) for text in questions]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return validate([tmp_path / "a.jsonl"], EMBEDDED, into=tmp_path / "out")

    def as_row(text: str) -> dict[str, object]:
        if kind == "alpaca":
            return {"instruction": asked, "input": text, "output": "Yes."}
        first = [{"role": "system", "content": asked}] * (kind == "system")
        text = text if kind == "system" else f"{asked} {text}"
        return {"messages": [*first, {"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}

    chance = random.Random(3)
    asked = some_words(chance, 18, 18)
    short = [some_words(chance, 2, 6) for _ in range(300)]
    done = written(short)
    assert {finding.id for finding in done.findings} & {"SPLIT-SIZE", "NEAR-COPIES"} == set()
    assert done.report.valid is not None
    assert 15 < done.report.valid.rows < 60
    done = written([*chain(270), *short[:30]])
    found = [finding for finding in done.findings if finding.id == "SPLIT-SIZE"]
    assert [finding.severity for finding in found] == ["warning", "warning"]
    assert re.match(r"test has \d+ rows instead of about 30: rows that ask nearly the same", found[0].message)
    assert "near_duplicate_similarity=1" in found[0].remedy


def folder(tmp_path: Path, *names: str) -> Path:
    """A folder with these files; a name with an arrow is a link."""
    for name in names:
        name, _, target = name.partition(" -> ")
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
        else:
            path.write_text("{}\n")
    return tmp_path / "set"


def found(source: Path) -> dict[str, list[str]]:
    files = data_files_of(source)
    by_split: dict[str, list[str]] = {}
    for name, path in zip(files.names, files.paths, strict=True):
        by_split.setdefault(name, []).append(path.relative_to(source).as_posix())
    return by_split


@pytest.mark.parametrize(("names", "files"), [
    ("Train.JSON val.csv.gz TEST.parquet", "Train.JSON | val.csv.gz | TEST.parquet"),
    ("train-1-of-2.parquet train-0-of-2.parquet validation-00000-of-00001.parquet",
     "train-0-of-2.parquet train-1-of-2.parquet | validation-00000-of-00001.parquet"),
    ("train.10.jsonl train.2.jsonl train_1.jsonl", "train.2.jsonl train.10.jsonl train_1.jsonl"),
    ("train-00001-of-00002.jsonl train-00002-of-00002.jsonl",
     "train-00001-of-00002.jsonl train-00002-of-00002.jsonl"),
    ("train/b.jsonl train/a.jsonl test/x.csv", "train/a.jsonl train/b.jsonl | | test/x.csv"),
    ("dataset_dict.json train/data-00000-of-00001.arrow train/state.json train/cache-0a.arrow",
     "train/data-00000-of-00001.arrow"),
    ("data-00000-of-00001.arrow state.json dataset_info.json", "data-00000-of-00001.arrow"),
    ("README.md .gitattributes data/train-0.parquet data/test-0.parquet",
     "data/train-0.parquet | | data/test-0.parquet"),
    ("mine/train.jsonl notes/a.txt", "mine/train.jsonl"),
    ("data/train_sft-00000-of-00002-aaaaaa.parquet data/train_sft-00001-of-00002-bbbbbb.parquet "
     "data/test_sft-00000-of-00001-cccccc.parquet", "data/train_sft-00000-of-00002-aaaaaa.parquet "
     "data/train_sft-00001-of-00002-bbbbbb.parquet | | data/test_sft-00000-of-00001-cccccc.parquet"),
    ("train_prefs/a.parquet test_prefs/a.parquet", "train_prefs/a.parquet | | test_prefs/a.parquet"),
    ("train.csv", "train.csv"),
])  # fmt: skip
def test_a_folder(tmp_path: Path, names: str, files: str) -> None:
    source = folder(tmp_path, *names.split())
    by_split = dict(zip(("train", "valid", "test"), map(str.split, files.split("|")), strict=False))
    assert found(source) == {split: paths for split, paths in by_split.items() if paths}
    assert data_files_of(source).unread == ()
    for name in ("more.csv", "test_results.json", "NOTICE.md", "dataset_infos.json"):
        (source / name).write_text("{}")
    if (source / "train.csv").exists():
        assert data_files_of(source).unread == ("more.csv", "test_results.json")


@pytest.mark.parametrize("names", [
    ["valid.jsonl", "validation.jsonl"], ["train.csv", "train.jsonl"], ["train/x.jsonl", "train.jsonl"],
])  # fmt: skip
def test_a_split_that_is_there_twice_is_refused_with_both(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(DataError, match=f"more than once(.|\n)*{' and '.join(names)}"):
        data_files_of(folder(tmp_path, "train.jsonl", *names))


def test_sets_for_several_methods_are_named_with_the_command_that_separates_one(tmp_path: Path) -> None:
    names = [f"data/{split}_{kind}.jsonl" for kind in ("sft", "prefs", "gen") for split in ("train", "test")]
    source = folder(tmp_path, *names)
    with pytest.raises(DataError, match="choose one of gen, prefs, sft"):
        data_files_of(source)


@pytest.mark.parametrize("name", ["train-00000-of-00002.jsonl", "data_1_of_2.jsonl"])
def test_one_shard_of_several_is_not_taken_for_the_whole(tmp_path: Path, name: str) -> None:
    source = folder(tmp_path, name)
    for path in (source / name, source):
        with pytest.raises(DataError, match=f"Shards of train are missing(.|\n)*set data.path={source}"):
            data_files_of(path)


@pytest.mark.parametrize(("names", "says"), [
    (["a.csv", "b.csv", "notes.txt"], "a.csv, b.csv, notes.txt\n(.|\n)*in a folder train"),
    (["test.jsonl", "val.csv"], "test.jsonl, val.csv(.|\n)*name the training rows train.jsonl"),
    (["a/train.jsonl", "b/train.jsonl"], "several data sets(.|\n)*a, b"),
    (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "Shards of train are missing(.|\n)*3 files"),
    (["train-00000-of-00002-aaaaaa.parquet", "train-00000-of-00002-bbbbbb.parquet"], "each number once(.|\n)*0, 0"),
    (["train-0-of-1.jsonl", "train-1-of-2.jsonl"], "1 or 2 files"),
    (["train.jsonl", "more -> ../set"], r"points to a folder(.|\n)*data\.path="),
    (["train.jsonl", "more -> nowhere"], "is broken"),
    (["train.jsonl", "mix.yaml"], "one train.jsonl"),
    (["notes\x1b[2J.txt"], r"'notes\\x1b\[2J.txt'"),
])  # fmt: skip
def test_a_folder_without_train_says_what_is_there(tmp_path: Path, names: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        data_files_of(folder(tmp_path, *names))


def test_the_only_file_of_a_folder_is_read_whatever_its_name(tmp_path: Path) -> None:
    found = data_files_of(folder(tmp_path, "my rows.csv", "notes.txt"))
    assert (found.names, [path.name for path in found.paths]) == (("train",), ["my rows.csv"])
