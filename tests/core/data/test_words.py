"""Words as numbers: what differs in form alone is the same, what differs in meaning is not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from safetrain.core.data.words import words_of
from safetrain.data.compare import digests, shingles, strict_digest

SAME = [
    ("Hello, World!", "hello   world"), ("don't", "DON’T"), ("**bold** word", "bold word"),
    ("well-known", "well known"), ("3-4", "3 - 4"), ("Está CÁ?", "está cá"), ("a\u200bb", "ab"),
    ("café", "cafe\u0301"),
]  # fmt: skip
DIFFERENT = [
    ("3 + 4", "3 * 4"), ("3 + 4", "3 - 4"), ("x*y", "x/y"), ("-3", "3"), ("5%", "5"), ("esta", "está"),
    ("3.5", "35"), ("ab", "a b"), ("中文", "文中"),
]  # fmt: skip


def test_form_alone_is_no_difference_and_signs_accents_and_order_are_one() -> None:
    for pairs, same in ((SAME, True), (DIFFERENT, False)):
        for pair in pairs:
            one, two = digests(words_of(pair)).tolist()
            assert (one == two) is same, pair


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Who won?", "who   won", True), ("Qui ?", "qui", True), ("café", "cafe\u0301.", True),
        ("(2 + 3) * 4", "2 + (3 * 4)", False), ("f'(2)", "f(2)", False), ("C#", "C", False), ("!a", "a", False),
        ("a ? b : c", "a b c", False),
    ],
)  # fmt: skip
def test_signs_of_code_and_mathematics_are_a_difference_to_the_strict(first: str, second: str, *, same: bool) -> None:
    assert (strict_digest(first) == strict_digest(second)) is same


TRICKY = some.text(alphabet="ab1 *-?.'\u00ad\n\u0301é中", max_size=8)


@given(some.lists(some.one_of(some.text(max_size=40), TRICKY), max_size=8))
@settings(deadline=None, database=None, max_examples=150)
def test_a_text_among_others_has_the_words_that_it_has_alone(texts: list[str]) -> None:
    together = words_of(texts)
    values, bounds = shingles(together)
    for number, text in enumerate(texts):
        alone = words_of([text])
        assert digests(alone).tolist() == [digests(together)[number]]
        assert alone.counts.tolist() == [together.counts[number]]
        assert shingles(alone)[0].tolist() == values[bounds[number] : bounds[number + 1]].tolist()


def test_a_sign_at_the_end_does_not_look_into_the_next_text() -> None:
    text = "Is this *really*"
    alone = digests(words_of([text])).tolist()[0]
    assert {digests(words_of([text, after])).tolist()[0] for after in ("What", "? x", "5", " 5", "")} == {alone}
    assert digests(words_of(["a ", "* b"])).tolist()[1] == digests(words_of(["* b"])).tolist()[0]


def test_five_words_in_a_row_are_a_run_and_no_words_are_none() -> None:
    words = words_of(["", "…", "a b c d e f g", "a b", "a a a a a a a"])
    assert words.counts.tolist() == [0, 0, 7, 2, 7]
    assert digests(words).tolist()[:2] == [0, 0]
    assert shingles(words)[1].tolist() == [0, 0, 0, 3, 4, 5]
