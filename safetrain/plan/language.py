"""Which languages the rows are written in, by a sample that does not depend on their order."""

import collections
import functools
import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SAMPLE = 2000  # rows that are looked at: those with the smallest digests
LEAST_LETTERS, MOST_LETTERS = 60, 600  # of a text; shorter ones are told apart badly
LEAST_ROWS = 50
SURE = 0.9999
CODE = re.compile(r"[{}=<>();_\\|^$#/]")
MOST_CODE = 0.04  # share of such signs in a text that is no code
NO_LANGUAGE = ("zxx", "und")  # code, numbers; none that is known


@dataclass(frozen=True)
class Languages:
    """How many rows were looked at, and those in each language, the commonest first."""

    looked_at: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]


class LanguageSample:
    """Keeps the texts with the smallest digests."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, str]] = []

    def add(self, digest: int, row: int, question: str, answer: str) -> None:
        """A row, if it is long enough and prose."""
        place = -(digest * 0x9E3779B97F4A7C15 % 2**64)
        if len(self._kept) >= SAMPLE and place <= self._kept[0][0]:
            return
        text = (answer if len(answer) >= LEAST_LETTERS else f"{question} {answer}")[:MOST_LETTERS]
        if sum(map(str.isalpha, text)) < LEAST_LETTERS or len(CODE.findall(text)) > MOST_CODE * len(text):
            return
        if len(self._kept) < SAMPLE:
            heapq.heappush(self._kept, (place, row, text))
        else:
            heapq.heapreplace(self._kept, (place, row, text))

    def languages(self) -> Languages | None:
        """What they are written in; None where there are too few to say."""
        if len(self._kept) < LEAST_ROWS:
            return None
        classify = _classifier()
        found = collections.defaultdict[str, list[int]](list)
        for _, row, text in sorted(self._kept, key=lambda kept: kept[1]):
            found[_language(classify, text)].append(row)
        found.pop("", None)
        ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
        return Languages(len(self._kept), tuple((name, tuple(rows)) for name, rows in ordered))


def _language(classify: Callable[[str], tuple[str, float]], text: str) -> str:
    name, share = classify(text)
    return name if share > SURE and name not in NO_LANGUAGE else ""


@functools.cache
def _classifier() -> Callable[[str], tuple[str, float]]:
    """py3langid brings its model with it; it takes some 100 MB, so that it is loaded here alone."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    classify: Callable[[str], tuple[str, float]] = identifier.classify
    return classify
