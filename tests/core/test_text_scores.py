"""How near an answer comes: values by sacrebleu, by hand, and intervals that hold what they say."""

import pytest

from safetrain.core.records.text_scores import chrf, token_f1


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [  # sacrebleu.sentence_chrf(answer, [expected]).score / 100
        ("The capital of Japan is Tokyo.", "The capital of Japan is Tokyo.", 1.0),
        ("The capital of Japan is Kyoto.", "The capital of Japan is Tokyo.", 0.77234),
        ("O símbolo é Fe.", "O símbolo químico do elemento ferro é Fe.", 0.28300),
        ("x", "abcdef", 0.0),
        ("日本の首都", "日本の首都は東京", 0.52501),
        ("a b", "ab", 1.0),
    ],
)
def test_chrf_is_sacrebleu_s(answer: str, expected: str, value: float) -> None:
    assert chrf(answer, expected) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("is Tokyo, the capital", "The capital is Tokyo.", 1.0),
        ("Tokyo", "The capital is Tokyo.", 0.4),  # precision 1, recall 1/4
        ("Kyoto", "The capital is Tokyo.", 0.0),
        ("a a a b", "a b b", 4 / 7),  # a and b once each in common
        ("東京です", "東京", 2 / 3),  # a script without spaces: each letter is a word
        ("", "", 1.0),
        ("", "something", 0.0),
        ("!", "?", 0.0),
    ],
)
def test_token_f1_counts_words(answer: str, expected: str, value: float) -> None:
    assert token_f1(answer, expected) == pytest.approx(value)
