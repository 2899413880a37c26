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
        return [f"{self.names[self.facts.files[row]]}:{self.facts.lines[row]}" for row in rows[:SHOWN_PLACES].tolist()]


def tell(findings: Findings, survey: Survey, whole: Whole) -> None:
    """Every check that needs all rows."""
    _repetitions(findings, whole)
    _overlaps(findings, whole)
    _near_copies(findings, whole)
    _answers(findings, whole)
    _endings(findings, survey, whole)
    _lengths(findings, whole)
    _languages(findings, survey.languages.languages(), whole)
    if not whole.likeness.complete:
        findings.add("COMPARED-IN-PART")


def tell_few(findings: Findings, train: int, test: int) -> None:
    """Of splits that are known: too few rows to learn from, or to measure by."""
    if train < FEW_TRAIN:
        findings.add("FEW-ROWS", f"there are few rows to train on ({train})", train)
    if test < FEW_TEST:
        findings.add("FEW-ROWS", f"there are few rows to test with ({test}): the result has a wide interval", test)


def _in_part(whole: Whole, part: int) -> np.ndarray:
    """(groups,) whether a row of the group is in the split."""
    found = np.zeros(whole.likeness.count, dtype=np.bool_)
    found[whole.likeness.groups[whole.parts == part]] = True
    return found


def _repetitions(findings: Findings, whole: Whole) -> None:
    """Rows that stand twice in train."""
    train = np.flatnonzero(whole.parts == TRAIN)
    _, firsts = np.unique(whole.facts.identities[train], return_index=True)
    repeated = np.delete(train, firsts)
    if len(repeated):
        findings.add("REPEATED-ROWS", "", len(repeated), whole.places(repeated))


def _overlaps(findings: Findings, whole: Whole) -> None:
    exact = whole.facts.exact
    for later, earlier in LATER_SPLITS:
        rows, before = _asked_again(whole, later, earlier), whole.parts == earlier
        if not len(rows):
            continue
        same = np.isin(exact[rows], exact[before])
        if (later, earlier) == (TEST, TRAIN) and same.any():
            findings.add("QUESTION-IN-TEST", "", int(same.sum()), whole.places(rows[same]))
            rows, same = rows[~same], same[:0]
        if len(rows):
            in_context = mixed(whole.facts.asked + mixed(whole.facts.contexts))
            alike = np.isin(in_context[rows], in_context[before])
            how = _how_alike(len(rows), int(same.sum()), int((~alike).sum()))
            detail = f"{SPLITS[later]} ask what a row of {SPLITS[earlier]} asks{how}"
            findings.add("SPLITS-OVERLAP", detail, len(rows), whole.places(rows))


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
            findings.add("NEAR-COPIES-ACROSS", detail, len(rows), _with_partner(whole, rows, both, earlier))
    repeats = np.zeros(likeness.count, dtype=np.bool_)
    trained = _in_part(whole, TRAIN)
    repeats[likeness.pairs[trained[likeness.pairs[:, 0]], 1]] = True
    rows = np.flatnonzero((whole.parts == TRAIN) & repeats[likeness.groups])
    if len(rows):
        findings.add("NEAR-COPIES", "", len(rows), _with_partner(whole, rows, likeness.pairs[:, ::-1], TRAIN))


def _with_partner(whole: Whole, rows: np.ndarray, both: np.ndarray, part: int) -> list[str]:
    """Where the first rows stand, and beside each where one stands that it resembles."""
    found = []
    for row, where in zip(rows.tolist(), whole.places(rows), strict=False):
        own = whole.likeness.groups[row]
        partners = both[both[:, 0] == own, 1]
        if whole.parts[row] != part:
            partners = np.append(partners, own)
        candidates = np.flatnonzero(np.isin(whole.likeness.groups, partners) & (whole.parts == part))
        other = whole.places(candidates[:1])
        found.append(f"{where} (near {other[0]})" if other else where)
    return found


def _answers(findings: Findings, whole: Whole) -> None:
    facts = whole.facts
    answered = np.flatnonzero(facts.answers != 0)
    if not len(answered):
        return
    asked = np.stack([facts.asked[answered], facts.contexts[answered]], axis=1)
    order = np.lexsort((answered, asked[:, 1], asked[:, 0]))
    new = np.concatenate([[True], (asked[order][1:] != asked[order][:-1]).any(axis=1)])
    firsts = answered[order][np.flatnonzero(new)[np.cumsum(new) - 1]]
    differ = np.sort(answered[order][facts.answers[answered[order]] != facts.answers[firsts]])
    if len(differ):
        findings.add("ANSWERS-DIFFER", "", len(differ), whole.places(differ))
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
