"""What all rows show together: the same question on both sides of a split, near copies, answers that disagree, …"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.data.findings import SHOWN_PLACES, Findings, Spot
from safetrain.data.folders import SPLITS
from safetrain.data.row_facts import DuplicateGroups, RowFacts, first_alike
from safetrain.data.split import TEST, TRAIN, VALID

LATER_SPLITS = ((TEST, TRAIN), (VALID, TRAIN), (TEST, VALID))
LONG_ANSWER, LONG_SHARE, SHORT_SHARE, LEAST_SAME = 6, 0.05, 0.9, 20  # words; shares of all rows; rows
FEW_TRAIN, FEW_TEST = 50, 20


@dataclass(frozen=True)
class Whole:
    """All rows, with what is known of them. ``parts`` (rows,) are indices into SPLITS, ``names`` those of the files.

    With ``documents`` rows are of any length, and how many there are says little.
    """

    facts: RowFacts
    likeness: DuplicateGroups
    parts: np.ndarray
    names: Sequence[str]
    documents: bool = False

    def spots(self, rows: np.ndarray, partners: Sequence[int | None], most: int) -> list[Spot]:
        """Where the first of ``rows`` stand, with the places of their partners where these are known."""
        both = itertools.zip_longest(rows[:most].tolist(), partners[:most])
        return [self._spot(row, None if other is None else self._spot(other)) for row, other in both]

    def _spot(self, row: int, beside: Spot | None = None) -> Spot:
        return Spot(self.names[int(self.facts.column("files")[row])], self.facts.place(row), beside)


def compare(findings: Findings, whole: Whole) -> None:
    """Make every check that needs all rows."""
    _repeated_rows(findings, whole)
    told = _overlaps(findings, whole)
    _near_copies(findings, whole, told)
    _answers(findings, whole)
    _few_rows(findings, whole)
    if whole.likeness.left_out:
        findings.add("COMPARED-IN-PART", whole.likeness.left_out)


def _few_rows(findings: Findings, whole: Whole) -> None:
    """Too few rows to learn from, or to measure by; none at all are those of another file."""
    if whole.documents:
        return
    train, test = (int((whole.parts == part).sum()) for part in (TRAIN, TEST))
    said = [f"to train on ({train})"] if 0 < train < FEW_TRAIN else []
    said += [f"to test with ({test}): the result has a wide interval"] if 0 < test < FEW_TEST else []
    if said:
        findings.add("FEW-ROWS", " and ".join(said), train * (train < FEW_TRAIN) + test * (test < FEW_TEST))


def _repeated_rows(findings: Findings, whole: Whole) -> None:
    rows = np.flatnonzero(whole.parts == TRAIN)
    firsts = rows[first_alike(whole.facts.column("identities")[rows])]
    _add(findings, whole, "REPEATED-ROWS", "", rows[firsts != rows], firsts[firsts != rows].tolist())


def _overlaps(findings: Findings, whole: Whole) -> dict[tuple[int, int], np.ndarray]:
    """Rows of a later split with a question of an earlier one; gives the rows that are found for each two splits."""
    facts, told = whole.facts, dict[tuple[int, int], np.ndarray]()
    asked, exact = (facts.keys(name, in_context=whole.likeness.by_context) for name in ("asked", "exact"))
    in_context = facts.keys("asked", in_context=True)
    for later, earlier in LATER_SPLITS:
        rows, known = (np.flatnonzero(whole.parts == part) for part in (later, earlier))
        told[later, earlier] = rows = rows[np.isin(asked[rows], asked[known])]
        if not len(rows):
            continue
        same = np.isin(exact[rows], exact[known])
        if (later, earlier) == (TEST, TRAIN) and same.any():
            partners = _partners(exact, rows[same], known)
            _add(findings, whole, "QUESTION-IN-TEST", "", rows[same], partners)
            rows, same = rows[~same], same[:0]
        elsewhere = ~np.isin(in_context[rows], in_context[known])
        how = _how_alike(len(rows), int(same.sum()), int(elsewhere.sum()))
        detail = f"{SPLITS[later]} ask what a row of {SPLITS[earlier]} asks{how}"
        _add(findings, whole, "SPLITS-OVERLAP", detail, rows, _partners(asked, rows, known))
    return told


def _how_alike(count: int, exact: int, elsewhere: int) -> str:
    """In words how many of ``count`` overlaps are exact, and how many follow another system text."""
    if not exact and not elsewhere:
        return ", except for case, space or punctuation"
    said = [f"{exact} exactly"] if exact else []
    said += [f"{elsewhere} after another system text or other turns"] if elsewhere else []
    left = count - exact - elsewhere if elsewhere else 0
    said += [f"{left} except for case, space or punctuation"] if left else []
    return f" ({', '.join(said)})"


def _near_copies(findings: Findings, whole: Whole, told: dict[tuple[int, int], np.ndarray]) -> None:
    """Rows of a later split, and of train, whose question is nearly one of an earlier split, or of another row."""
    groups, pairs = whole.likeness.groups, whole.likeness.pairs
    both = np.concatenate([pairs, pairs[:, ::-1]])
    for later, earlier in LATER_SPLITS:
        near = np.zeros(len(groups), dtype=np.bool_)
        near[groups[whole.parts == earlier]] = True
        near[both[near[both[:, 1]], 0]] = True
        rows = np.setdiff1d(np.flatnonzero((whole.parts == later) & near[groups]), told[later, earlier])
        detail = f"{SPLITS[later]} ask nearly what a row of {SPLITS[earlier]} asks"
        _add(findings, whole, "SPLITS-OVERLAP", detail, rows, _near_partners(whole, rows, both, earlier))
    in_train = whole.parts == TRAIN
    known = np.zeros(len(groups), dtype=np.bool_)
    known[groups[in_train]] = True
    linked = np.unique(both[known[both].all(axis=1)][:, 0])
    firsts = np.unique(whole.likeness.clusters[linked])  # the first of each cluster is the one to keep
    rows = np.flatnonzero(in_train & np.isin(groups, np.setdiff1d(linked, firsts)))
    _add(findings, whole, "NEAR-COPIES", "", rows, _near_partners(whole, rows, both, TRAIN))


def _near_partners(whole: Whole, rows: np.ndarray, both: np.ndarray, part: int) -> list[int | None]:
    """For the first rows one of ``part`` that each resembles."""
    groups, found = whole.likeness.groups, list[int | None]()
    for row in rows[:SHOWN_PLACES].tolist():
        own = groups[row]
        partners = both[both[:, 0] == own, 1]
        if whole.parts[row] != part:
            partners = np.append(partners, own)
        candidates = np.flatnonzero(np.isin(groups, partners) & (whole.parts == part))
        found.append(next(iter(candidates[:1].tolist()), None))
    return found


def _answers(findings: Findings, whole: Whole) -> None:
    """Questions with several answers, and answers to many questions."""
    keys = whole.facts.column("answers")
    rows = np.flatnonzero(keys)
    if not len(rows):
        return
    asked = whole.facts.keys("asked", in_context=True)
    firsts = rows[first_alike(asked[rows])]
    differ = keys[rows] != keys[firsts]
    _add(findings, whole, "ANSWERS-DIFFER", "", rows[differ], firsts[differ].tolist())
    _, first, places, counts = np.unique(keys[rows], return_index=True, return_inverse=True, return_counts=True)
    is_long = whole.facts.column("answer_words")[rows[first]] >= LONG_ANSWER
    many = counts >= max(LEAST_SAME, LONG_SHARE * len(rows))
    many &= is_long | (counts >= SHORT_SHARE * len(rows))
    dominated = rows[many[places]]
    which = "one and the same answer" if many.sum() == 1 else f"one of {many.sum()} answers"
    percent = f"{which}, {100 * len(dominated) // len(rows)} % of all"
    _add(findings, whole, "ANSWER-DOMINATES", percent, dominated, [])


def _partners(keys: np.ndarray, rows: np.ndarray, known: np.ndarray) -> list[int | None]:
    """For each of ``rows`` the first of the ``known`` rows with the same key."""
    order = np.argsort(keys[known], kind="stable")
    places = np.searchsorted(keys[known][order], keys[rows])
    return known[order[places]].tolist() if len(rows) else []


def _add(
    findings: Findings, whole: Whole, identifier: str, detail: str, rows: np.ndarray, partners: Sequence[int | None]
) -> None:
    if len(rows):
        findings.add(identifier, detail, len(rows), whole.spots(rows, partners, findings.most_places))
