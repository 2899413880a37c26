"""What all rows say together: the same question on both sides of a split, near copies, answers that disagree, …"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from safetrain.plan.findings import SHOWN_PLACES, Findings
from safetrain.plan.language import Languages
from safetrain.plan.row_columns import ascending, first_alike, first_among, keys_of, quantile
from safetrain.plan.sources import SPLITS
from safetrain.plan.splits import TEST, TRAIN, VALID
from safetrain.plan.survey import DuplicateGroups, RowFacts, Survey

LATER_SPLITS = ((TEST, TRAIN), (VALID, TRAIN), (TEST, VALID))
LONG_ANSWER, LONG_SHARE, SHORT_SHARE, LEAST_SAME = 6, 0.05, 0.9, 20  # words; shares of all rows; rows
FEW_TRAIN, FEW_TEST = 50, 20
FAR, TIMES = 6.0, 4  # standard deviations of the logarithm; times the length that 95 % do not exceed
MAIN_LANGUAGE = 0.05


@dataclass(frozen=True)
class Whole:
    """All rows, with what is known of them. ``parts`` (rows,) are indices into SPLITS, ``names`` those of the files.

    Of a finding, ``most_places`` are told; of two rows, the partner only for the first few: to find it takes long.
    """

    facts: RowFacts
    likeness: DuplicateGroups
    parts: np.ndarray
    names: Sequence[str]
    most_places: int = SHOWN_PLACES
    documents: bool = False  # of any length: how many there are says little

    def places(self, rows: np.ndarray) -> list[str]:
        """Where the first of ``rows`` stand."""
        return [self.place(row) for row in rows[: self.most_places].tolist()]

    def place(self, row: int) -> str:
        """Where a row stands."""
        return self.facts.place(row).of(self.names[self.facts.columns.one("files", row)])

    def pairs(self, rows: np.ndarray, verb: str, keys: Callable[[], Iterator[np.ndarray]], part: int) -> list[str]:
        """Where the first of ``rows`` stand, some with the first row of ``part`` that has the same of ``keys()``."""
        return self.joined(rows, verb, first_among(keys, rows[:SHOWN_PLACES], self.parts == part))

    def joined(self, rows: np.ndarray, verb: str, partners: Sequence[int | None]) -> list[str]:
        """Where the first of ``rows`` stand, with the place of the partner where one is given."""
        both = itertools.zip_longest(self.places(rows), partners)
        return [where if other is None else f"{where} {verb} {self.place(other)}" for where, other in both]


def tell(findings: Findings, survey: Survey, whole: Whole) -> None:
    """Every check that needs all rows."""
    _repetitions(findings, whole)
    again = _again(whole, lambda: whole.facts.keys("asked"))
    if any(map(len, again)):
        _overlaps(findings, whole, again)
    _near_copies(findings, whole, again)
    _answers(findings, whole)
    _endings(findings, survey, whole)
    _lengths(findings, whole)
    _languages(findings, survey.languages.languages(), whole)
    if not whole.documents:
        _few(findings, *(int((whole.parts == part).sum()) for part in (TRAIN, TEST)))
    if not whole.likeness.complete:
        findings.add("COMPARED-IN-PART")


def _few(findings: Findings, train: int, test: int) -> None:
    """Too few rows to learn from, or to measure by; none at all are those of another file."""
    said = [f"to train on ({train})"] if 0 < train < FEW_TRAIN else []
    said += [f"to test with ({test}): the result has a wide interval"] if 0 < test < FEW_TEST else []
    if said:
        findings.add("FEW-ROWS", " and ".join(said), train * (train < FEW_TRAIN) + test * (test < FEW_TEST))


def _repetitions(findings: Findings, whole: Whole) -> None:
    """Rows that stand twice in train."""
    train = whole.parts == TRAIN
    firsts = first_alike(len(train), lambda: keys_of(whole.facts.columns.pieces("identities"), train))
    repeats = np.flatnonzero(train & (firsts != np.arange(len(train), dtype=np.uint32)))
    if len(repeats):
        places = whole.joined(repeats, "repeats", firsts[repeats[: whole.most_places]].tolist())
        findings.add("REPEATED-ROWS", "", len(repeats), places)


def _in_part(whole: Whole, part: int) -> np.ndarray:
    """(rows,) whether a row that asks the same is in the split; of rows that are the first to ask it."""
    found = np.zeros(len(whole.parts), dtype=np.bool_)
    found[whole.likeness.groups[whole.parts == part]] = True
    return found


def _again(whole: Whole, keys: Callable[[], Iterator[np.ndarray]]) -> list[np.ndarray]:
    """For each of LATER_SPLITS the rows of a split that have the key of a row of the earlier one."""
    if not np.ptp(whole.parts):  # there is one split
        return [np.zeros(0, dtype=np.int64) for _ in LATER_SPLITS]
    firsts, found = first_alike(len(whole.parts), keys), list[np.ndarray]()
    for later, earlier in LATER_SPLITS:
        known = np.zeros(len(firsts), dtype=np.bool_)
        known[firsts[whole.parts == earlier]] = True
        rows = np.flatnonzero(whole.parts == later)
        found.append(rows[known[firsts[rows]]])
    return found


def _overlaps(findings: Findings, whole: Whole, again: Sequence[np.ndarray]) -> None:
    exact, asked = partial(whole.facts.columns.pieces, "exact"), partial(whole.facts.keys, "asked")
    exactly = _again(whole, exact)
    in_context = _again(whole, whole.facts.in_context)
    for place, ((later, earlier), rows) in enumerate(zip(LATER_SPLITS, again, strict=True)):
        if not len(rows):
            continue
        same = np.isin(rows, exactly[place])
        if (later, earlier) == (TEST, TRAIN) and same.any():
            places = whole.pairs(rows[same], "asks as", exact, TRAIN)
            findings.add("QUESTION-IN-TEST", "", int(same.sum()), places)
            rows, same = rows[~same], same[:0]
        if len(rows):
            alike = np.isin(rows, in_context[place])
            how = _how_alike(len(rows), int(same.sum()), int((~alike).sum()))
            detail = f"{SPLITS[later]} ask what a row of {SPLITS[earlier]} asks{how}"
            findings.add("SPLITS-OVERLAP", detail, len(rows), whole.pairs(rows, "asks as", asked, earlier))


def _how_alike(count: int, exact: int, elsewhere: int) -> str:
    """In words how many of ``count`` overlaps are exact, and how many stand behind another system text."""
    if not exact and not elsewhere:
        return ", but for case, space or punctuation"
    said = [f"{exact} exactly"] if exact else []
    said += [f"{elsewhere} behind another system text or other turns"] if elsewhere else []
    left = count - exact - elsewhere if elsewhere else 0
    said += [f"{left} but for case, space or punctuation"] if left else []
    return f" ({', '.join(said)})"


def _near_copies(findings: Findings, whole: Whole, again: Sequence[np.ndarray]) -> None:
    likeness = whole.likeness
    both = np.concatenate([likeness.pairs, likeness.pairs[:, ::-1]])
    for (later, earlier), told in zip(LATER_SPLITS, again, strict=True):
        near = _in_part(whole, earlier)
        near[both[near[both[:, 1]], 0]] = True
        rows = np.flatnonzero((whole.parts == later) & near[likeness.groups])
        rows = np.setdiff1d(rows, told)  # by themselves
        if len(rows):
            detail = f"{SPLITS[later]} ask nearly what a row of {SPLITS[earlier]} asks"
            findings.add("NEAR-COPIES-ACROSS", detail, len(rows), _near_places(whole, rows, both, earlier))
    repeats = np.zeros(len(whole.parts), dtype=np.bool_)
    trained = _in_part(whole, TRAIN)
    repeats[likeness.pairs[trained[likeness.pairs[:, 0]], 1]] = True
    rows = np.flatnonzero((whole.parts == TRAIN) & repeats[likeness.groups])
    if len(rows):
        findings.add("NEAR-COPIES", "", len(rows), _near_places(whole, rows, likeness.pairs[:, ::-1], TRAIN))


def _near_places(whole: Whole, rows: np.ndarray, both: np.ndarray, part: int) -> list[str]:
    """Where the first rows stand, each with one of ``part`` that it resembles."""
    found = list[int | None]()
    for row in rows[:SHOWN_PLACES].tolist():
        own = whole.likeness.groups[row]
        partners = both[both[:, 0] == own, 1]
        if whole.parts[row] != part:
            partners = np.append(partners, own)
        candidates = np.flatnonzero(np.isin(whole.likeness.groups, partners) & (whole.parts == part))
        found.append(next(iter(candidates[:1].tolist()), None))
    return whole.joined(rows, "is near", found)


def _answers(findings: Findings, whole: Whole) -> None:
    facts, count = whole.facts, len(whole.parts)
    answers = first_alike(count, lambda: facts.columns.pieces("answers"))
    answered = np.concatenate([numbers != 0 for numbers in facts.columns.pieces("answers")])
    if not answered.any():
        return
    asked = first_alike(count, lambda: keys_of(facts.in_context(), answered))
    differ = np.flatnonzero(answered & (answers != answers[asked]))
    if len(differ):
        places = whole.joined(differ, "answers otherwise than", asked[differ[: whole.most_places]].tolist())
        findings.add("ANSWERS-DIFFER", "", len(differ), places)
    _domination(findings, whole, answers, answered)


def _domination(findings: Findings, whole: Whole, answers: np.ndarray, answered: np.ndarray) -> None:
    total, counts = int(answered.sum()), np.bincount(answers[answered])
    many = np.flatnonzero(counts >= max(LEAST_SAME, LONG_SHARE * total)).tolist()
    is_long = [whole.facts.columns.one("answer_words", first) >= LONG_ANSWER for first in many]
    many = [first for first, long in zip(many, is_long, strict=True) if long or counts[first] >= SHORT_SHARE * total]
    rows = np.flatnonzero(np.isin(answers, many))
    if len(rows):
        which = "one and the same answer" if len(many) == 1 else f"one of {len(many)} answers"
        percent = 100 * len(rows) // total
        findings.add("ANSWER-DOMINATES", f"{which}, {percent} % of all", len(rows), whole.places(rows))


def _endings(findings: Findings, survey: Survey, whole: Whole) -> None:
    count, rows = survey.endings.cut_off()
    if count:
        findings.add("CUT-OFF-ANSWERS", "", count, whole.places(np.array(rows)))


def _lengths(findings: Findings, whole: Whole) -> None:
    if len(whole.parts) < FEW_TRAIN:
        return
    counts = collections.Counter[int]()
    for numbers in whole.facts.columns.pieces("lengths"):
        counts.update(numbers.tolist())
    lengths, ends = ascending(counts)
    logarithms = np.log(np.maximum(lengths, 1))
    median = quantile(logarithms, ends, 0.5)
    apart = np.abs(logarithms - median)
    order = np.argsort(apart)
    spread = 1.4826 * quantile(apart[order], np.cumsum(np.diff(ends, prepend=0)[order]), 0.5)
    border = max(np.exp(median + FAR * spread), TIMES * quantile(lengths, ends, 0.95))
    rows = np.flatnonzero(np.concatenate([numbers > border for numbers in whole.facts.columns.pieces("lengths")]))
    if len(rows):
        findings.add("LENGTH-OUTLIERS", str(int(quantile(lengths, ends, 0.5))), len(rows), whole.places(rows))


def _languages(findings: Findings, languages: Languages | None, whole: Whole) -> None:
    if languages is None or not languages.rows:
        return
    total = sum(len(rows) for _, rows in languages.rows)
    main = [(name, len(rows)) for name, rows in languages.rows if len(rows) >= MAIN_LANGUAGE * total]
    if len(main) > 1:
        shares = ", ".join(f"{name} {100 * count // total} %" for name, count in main)
        findings.add("LANGUAGES", f"{shares} of {languages.looked_at} rows looked at", total)
        return
    others = [(name, rows) for name, rows in languages.rows[1:] if len(rows)]
    if others:
        names = ", ".join(name for name, _ in others[:5])
        rows = np.array(sorted(row for _, found in others for row in found))
        detail = f"{names}; {languages.looked_at} rows were looked at, most are {languages.rows[0][0]}"
        findings.add("OTHER-LANGUAGE", detail, len(rows), whole.places(rows))
