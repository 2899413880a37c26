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
@settings(deadline=None, database=None, max_examples=50)
def test_a_text_among_others_has_the_words_that_it_has_alone(texts: list[str]) -> None:
    together = words_of(texts)
    values, bounds = shingles(together)
    for number, text in enumerate(texts):
        alone = words_of([text])
        assert digests(alone).tolist() == [digests(together)[number]]
        assert alone.counts.tolist() == [together.counts[number]]
        assert shingles(alone)[0].tolist() == values[bounds[number] : bounds[number + 1]].tolist()
