"""Answers that were cut off are told from those whose author left the full stop out, by the words of their own file."""

import random

import pytest

from safetrain.core.data.endings import CUT, ITEM, LINE, OTHER, SENTENCE, TEXT, Endings, end_of

NOUNS = ["harbour", "market", "station", "bridge", "river", "garden", "school", "tower", "forest", "theatre"]
VERBS = ["reaches", "crosses", "follows", "watches", "remembers", "describes", "surrounds", "borrows"]


def sentence(seed: int) -> str:
    draw = random.Random(seed)
    nouns = draw.sample(NOUNS, 4)
    return (
        f"Whoever {draw.choice(VERBS)} the old {nouns[0]} beside the {nouns[1]} surely {draw.choice(VERBS)} "
        f"another {nouns[2]} near this {nouns[3]}."
    )


def prose(count: int) -> list[str]:
    return [f"{sentence(2 * number)} {sentence(2 * number + 1)}" for number in range(count)]


def cut_off(answers: list[str]) -> tuple[int, list[int]]:
    endings = Endings()
    for number, answer in enumerate(answers):
        endings.add(number, answer)
    return endings.cut_off()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("The bridge was closed for repairs, so that it may need to be re", LINE),
        ("He went home. Then he took the", LINE),
        ("```python\nprint(1)", CUT),
        ("Run it: ```sh\nls", CUT),
        ("D\n\n```css", CUT),
        ("print(1)\n```", OTHER),
        ("It was so.\n\n````", OTHER),
        ("```\nShow this:\n```\nls\n```\n\nSo it is shown.", OTHER),
        ("It is closed.", SENTENCE),
        ("Is it?", SENTENCE),
        ("Iron", OTHER),
        ("- one\n- two of them all as they are in the world here", OTHER),
        ("All of it:\n- two of them all as they are in the world here", ITEM),
        ("def f(x):\n    return x", OTHER),
        ("```python\nprint(1)\n```", OTHER),
        ("the answer is 42", OTHER),
        ("See https://example.org/a/b", OTHER),
        ("", OTHER),
        ("It was long ago.\n\nThen all people of the town came to the river and sang", TEXT),
        ("Use the iron, the copper, and all the other metals,", CUT),
        ("A row of boats lies on the shore of the lake", LINE),
        ("It went well. Yours sincerely, Ada Lovelace", OTHER),
        ("We won the game today. Thank you all! #football #happy", OTHER),
        ("All of it is told there. See also www.example.org", OTHER),
        ("Sing of the sea\nand of the old ship that we sailed on to see", OTHER),
        ("Oli: I have read it, not so bad\nAda: ok, so we all meet there at one", OTHER),
        ("It is written in ``HEAD```'s history. So it is.", SENTENCE),
        ("- ```sh\n  ls\n  ```\n\nDone.", SENTENCE),
    ],
)
def test_ends(answer: str, kind: str) -> None:
    assert end_of(answer).kind == kind


@pytest.mark.parametrize(
    "stub",
    [
        "Whoever follows the old bridge beside the market surely remembers another",  # by how the file uses the word
        "Whoever follows the old bridge beside the market surely remem",  # half a word of the file
        "Whoever follows the old bridge will surely find that it leads him to the",  # by a word that asks for more
        "The old bridge is there. Whoever follows the river to it from here surely remembers another",
    ],
)
def test_one_cut_answer_is_found(stub: str) -> None:
    assert cut_off([*prose(100), stub]) == (1, [100])


def test_a_missing_full_stop_is_no_cut() -> None:
    forgotten = [answer[:-1] for answer in prose(40)]
    captions = [f"A row of boats before the {noun}" for noun in NOUNS]
    assert cut_off([*prose(200), *forgotten, *captions]) == (0, [])


def test_where_many_were_cut_those_behind_nouns_are_told_with_them() -> None:
    draw = random.Random(3)
    cut = [answer[: draw.randrange(len(answer) // 2 + 25, len(answer) - 8)] for answer in prose(60)]
    count, rows = cut_off([*prose(300), *cut])
    told = [row for row in rows if row >= 300]
    assert count == len(rows) == len(told)
    assert count >= 50


def test_a_chance_word_among_many_unstopped_is_not_told() -> None:
    captions = [f"A long row of wooden boats before the old {noun}" for noun in NOUNS * 4]
    assert cut_off([*prose(100), *captions, "A place that many people of the town like to swim in"]) == (0, [])


def test_data_that_is_cut_into_lines_is_left_alone() -> None:
    halves = [answer[: len(answer) // 2].rsplit(None, 1)[0] for answer in prose(100)]
    assert cut_off([*prose(20), *halves]) == (0, [])


def test_words_are_found_in_long_files_too() -> None:
    stub = "Whoever follows the old bridge beside the market surely remembers another"
    assert cut_off([*prose(12_000), stub]) == (1, [12_000])
