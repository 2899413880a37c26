"""What all rows say together: the same question on both sides of a split, near copies, answers that disagree, …"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.words import mixed
from safetrain.plan.findings import SHOWN_PLACES, Findings
from safetrain.plan.language import Languages
from safetrain.plan.sources import SPLITS
from safetrain.plan.splits import TEST, TRAIN, VALID
from safetrain.plan.survey import Likeness, RowFacts, Survey

LATER_SPLITS = ((TEST, TRAIN), (VALID, TRAIN), (TEST, VALID))
MOST_CUT = 0.1  # share of answers that stop inside a sentence above which that is how this data is
LEAST_SENTENCES = 20
LONG_ANSWER, LONG_SHARE, SHORT_SHARE, LEAST_SAME = 6, 0.05, 0.9, 20  # words; shares of all rows; rows
FEW_TRAIN, FEW_TEST = 50, 20
FAR, TIMES = 6.0, 4  # standard deviations of the logarithm; times the length that 95 % do not exceed
MAIN_LANGUAGE = 0.05


@dataclass(frozen=True)
class Whole:
    """All rows, with what is known of them. ``parts`` (rows,) are indices into SPLITS, ``names`` those of the files."""

    facts: RowFacts
    likeness: Likeness
    parts: np.ndarray
    names: Sequence[str]

    def places(self, rows: np.ndarray) -> list[str]:
        """Where the first of ``rows`` stand."""
        return [self.facts.place(row).of(self.names[self.facts.files[row]]) for row in rows[:SHOWN_PLACES].tolist()]

    def pairs(self, rows: np.ndarray, verb: str, same: np.ndarray, part: int) -> list[str]:
        """Where the first of ``rows`` stand, each with the first row of ``part`` that is equal in ``same``."""
        there = np.flatnonzero(self.parts == part)
        first = [there[same[there] == same[row]][:1] for row in rows[:SHOWN_PLACES]]
        return self.joined(rows, verb, first)

    def joined(self, rows: np.ndarray, verb: str, partners: Sequence[np.ndarray]) -> list[str]:
        """Where the first of ``rows`` stand, each with the place of its partner: none or one of (rows,)."""
        return [f"{where} {verb} {self.places(partner)[0]}" if len(partner) else where
                for where, partner in zip(self.places(rows), partners, strict=False)]  # fmt: skip


def tell(findings: Findings, survey: Survey, whole: Whole) -> None:
    """Every check that needs all rows."""
    _repetitions(findings, whole)
    _overlaps(findings, whole)
    _near_copies(findings, whole)
    _answers(findings, whole)
    _endings(findings, survey, whole)
    _lengths(findings, whole)
    _languages(findings, survey.languages.languages(), whole)
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
    train, identities = np.flatnonzero(whole.parts == TRAIN), whole.facts.identities
    _, firsts = np.unique(identities[train], return_index=True)
    repeats = train[np.setdiff1d(np.arange(len(train)), firsts)]
    if len(repeats):
        findings.add("REPEATED-ROWS", "", len(repeats), whole.pairs(repeats, "repeats", identities, TRAIN))


def _in_part(whole: Whole, part: int) -> np.ndarray:
    """(groups,) whether a row of the group is in the split."""
    found = np.zeros(whole.likeness.count, dtype=np.bool_)
    found[whole.likeness.groups[whole.parts == part]] = True
    return found


def _overlaps(findings: Findings, whole: Whole) -> None:
    exact = whole.facts.exact
    for later, earlier in LATER_SPLITS:
        rows, before = _asked_again(whole, later, earlier), whole.parts == earlier
        if not len(rows):
            continue
        same = np.isin(exact[rows], exact[before])
        if (later, earlier) == (TEST, TRAIN) and same.any():
            places = whole.pairs(rows[same], "asks as", exact, TRAIN)
            findings.add("QUESTION-IN-TEST", "", int(same.sum()), places)
            rows, same = rows[~same], same[:0]
        if len(rows):
            in_context = mixed(whole.facts.asked + mixed(whole.facts.contexts))
            alike = np.isin(in_context[rows], in_context[before])
            how = _how_alike(len(rows), int(same.sum()), int((~alike).sum()))
            detail = f"{SPLITS[later]} ask what a row of {SPLITS[earlier]} asks{how}"
            findings.add("SPLITS-OVERLAP", detail, len(rows), whole.pairs(rows, "asks as", whole.facts.asked, earlier))


def _how_alike(count: int, exact: int, elsewhere: int) -> str:
    """In words how many of ``count`` overlaps are exact, and how many stand behind another system text."""
    if not exact and not elsewhere:
        return ", but for case, space or punctuation"
    said = [f"{exact} exactly"] if exact else []
    said += [f"{elsewhere} behind another system text or other turns"] if elsewhere else []
    left = count - exact - elsewhere if elsewhere else 0
    said += [f"{left} but for case, space or punctuation"] if left else []
    return f" ({', '.join(said)})"


def _asked_again(whole: Whole, later: int, earlier: int) -> np.ndarray:
    """The rows of a split that ask what a row of an earlier one asks."""
    asked = whole.facts.asked
    rows = np.flatnonzero(whole.parts == later)
    return rows[np.isin(asked[rows], asked[whole.parts == earlier])]


def _near_copies(findings: Findings, whole: Whole) -> None:
    likeness = whole.likeness
    both = np.concatenate([likeness.pairs, likeness.pairs[:, ::-1]])
    for later, earlier in LATER_SPLITS:
        near = _in_part(whole, earlier)
        near[both[near[both[:, 1]], 0]] = True
        rows = np.flatnonzero((whole.parts == later) & near[likeness.groups])
        rows = np.setdiff1d(rows, _asked_again(whole, later, earlier))  # told by themselves
        if len(rows):
            detail = f"{SPLITS[later]} ask nearly what a row of {SPLITS[earlier]} asks"
            findings.add("NEAR-COPIES-ACROSS", detail, len(rows), _near_places(whole, rows, both, earlier))
    repeats = np.zeros(likeness.count, dtype=np.bool_)
    trained = _in_part(whole, TRAIN)
    repeats[likeness.pairs[trained[likeness.pairs[:, 0]], 1]] = True
    rows = np.flatnonzero((whole.parts == TRAIN) & repeats[likeness.groups])
    if len(rows):
        findings.add("NEAR-COPIES", "", len(rows), _near_places(whole, rows, likeness.pairs[:, ::-1], TRAIN))


def _near_places(whole: Whole, rows: np.ndarray, both: np.ndarray, part: int) -> list[str]:
    """Where the first rows stand, each with one of ``part`` that it resembles."""
    found = []
    for row in rows[:SHOWN_PLACES].tolist():
        own = whole.likeness.groups[row]
        partners = both[both[:, 0] == own, 1]
        if whole.parts[row] != part:
            partners = np.append(partners, own)
        found.append(np.flatnonzero(np.isin(whole.likeness.groups, partners) & (whole.parts == part))[:1])
    return whole.joined(rows, "is near", found)


def _answers(findings: Findings, whole: Whole) -> None:
    facts = whole.facts
    answered = np.flatnonzero(facts.answers != 0)
    if not len(answered):
        return
    asked = np.stack([facts.asked[answered], facts.contexts[answered]], axis=1)
    order = np.lexsort((answered, asked[:, 1], asked[:, 0]))
    new = np.concatenate([[True], (asked[order][1:] != asked[order][:-1]).any(axis=1)])
    firsts = answered[order][np.flatnonzero(new)[np.cumsum(new) - 1]]
    rows = answered[order]
    is_other = facts.answers[rows] != facts.answers[firsts]
    differ, firsts = rows[is_other], firsts[is_other]
    if len(differ):
        first = np.argsort(differ)[:SHOWN_PLACES]
        places = whole.joined(differ[first], "answers otherwise than", np.split(firsts[first], len(first)))
        findings.add("ANSWERS-DIFFER", "", len(differ), places)
    _domination(findings, whole, answered)


def _domination(findings: Findings, whole: Whole, answered: np.ndarray) -> None:
    _, firsts, of_row, counts = np.unique(
        whole.facts.answers[answered], return_index=True, return_inverse=True, return_counts=True
    )
    is_long = whole.facts.answer_words[answered[firsts]] >= LONG_ANSWER
    least = np.maximum(LEAST_SAME, np.where(is_long, LONG_SHARE, SHORT_SHARE) * len(answered))
    many = counts >= least
    rows = answered[many[of_row]]
    if len(rows):
        which = "one and the same answer" if many.sum() == 1 else f"one of {int(many.sum())} answers"
        percent = 100 * len(rows) // len(answered)
        findings.add("ANSWER-DOMINATES", f"{which}, {percent} % of all", len(rows), whole.places(rows))


def _endings(findings: Findings, survey: Survey, whole: Whole) -> None:
    cut = np.array(survey.cut, dtype=np.int64)
    if len(cut) and survey.sentences >= LEAST_SENTENCES and len(cut) <= MOST_CUT * survey.sentences:
        findings.add("CUT-OFF-ANSWERS", "", len(cut), whole.places(cut))


def _lengths(findings: Findings, whole: Whole) -> None:
    lengths = whole.facts.lengths
    if len(lengths) < FEW_TRAIN:
        return
    logarithms = np.log(np.maximum(lengths, 1))
    median = float(np.median(logarithms))
    spread = 1.4826 * float(np.median(np.abs(logarithms - median)))
    border = max(np.exp(median + FAR * spread), TIMES * float(np.quantile(lengths, 0.95)))
    rows = np.flatnonzero(lengths > border)
    if len(rows):
        findings.add("LENGTH-OUTLIERS", str(int(np.median(lengths))), len(rows), whole.places(rows))


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
