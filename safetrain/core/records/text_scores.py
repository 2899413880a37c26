"""How near an answer comes to the expected one, from 0 to 1. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable

from safetrain.core.data.words import words_of

CHARACTERS, RECALL_WEIGHT = 6, 2.0  # of chrF: the longest n-gram, and beta (Popović 2015, aclanthology.org/W15-3049)


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of words, whatever their order, case and punctuation."""
    words = words_of([answer, expected])
    split = int(words.bounds[1])
    if not len(words.hashes):
        return float(answer == expected)
    return _f_score(*_shares(words.hashes[:split].tolist(), words.hashes[split:].tolist()), weight=1.0)


def chrf(answer: str, expected: str) -> float:
    """Mean precision and recall of n-grams of up to six characters, white space apart; recall counts double."""
    one, other = ("".join(text.split()) for text in (answer, expected))
    orders = [size for size in range(1, CHARACTERS + 1) if min(len(one), len(other)) >= size]
    if not orders:
        return float(one == other)
    shares = [_shares(_ngrams(one, size), _ngrams(other, size)) for size in orders]
    precision, recall = (sum(each) / len(orders) for each in zip(*shares, strict=True))
    return _f_score(precision, recall, weight=RECALL_WEIGHT)


def _ngrams(text: str, size: int) -> Iterable[str]:
    return (text[start : start + size] for start in range(len(text) - size + 1))


def _shares(found: Iterable[Hashable], wanted: Iterable[Hashable]) -> tuple[float, float]:
    """Precision and recall of a bag."""
    one, other = Counter(found), Counter(wanted)
    common = (one & other).total()
    return common / max(1, one.total()), common / max(1, other.total())


def _f_score(precision: float, recall: float, *, weight: float) -> float:
    if not precision or not recall:
        return 0.0
    square = weight**2
    return (1 + square) * precision * recall / (square * precision + recall)
