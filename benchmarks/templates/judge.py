"""Right, told or wrong: what safetrain says of a row beside what is right for it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.templates.expectation import Answer, Finding
from benchmarks.templates.spans import Expected

RIGHT, TOLD, WRONG = "right", "told", "wrong"
SPANS = {"STOP-MISSING", "STOP-UNKNOWN"}
NOTHING_LOST = SPANS | {"THINKING-EMPTY"}  # told of a row whose every turn is trained


@dataclass(frozen=True)
class Said:
    """What safetrain said of one row."""

    trained: tuple[str, ...]
    stops: tuple[str, ...]
    findings: dict[str, tuple[Any, ...]]  # id: the report's findings that this row may have part in

    @property
    def loud(self) -> set[str]:
        """The ids of its errors and warnings."""
        return {name for name, told in self.findings.items() if any(one.severity != "note" for one in told)}


@dataclass(frozen=True)
class Verdict:
    """The judgement of one case, with what speaks against it."""

    grade: str
    reasons: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()


def judge(answers: list[Answer], said: Said) -> Verdict:
    """Right or told by any of the right outcomes; else wrong by the nearest of them."""
    verdicts = [_judge(answer, said) for answer in answers]
    return min(verdicts, key=lambda verdict: (verdict.grade == WRONG, len(verdict.reasons)))


def _judge(answer: Answer, said: Said) -> Verdict:
    reasons, needed = [], list(answer.required)
    permitted = set(answer.permitted)
    if not answer.fatal or answer.turns:
        matched = match(answer, said.trained)
        if matched is None:
            reasons.append("the spans are not right")
            permitted |= SPANS
        else:
            needed += [Finding(frozenset(SPANS)) for _ in sorted(matched)[:1]]
            reasons += _stops(answer, said)
    permitted |= {name for finding in needed for name in finding.ids} | _unclosed(answer.turns)
    silent = [finding for finding in needed if not finding.ids & set(said.findings)]
    if not answer.fatal or len(silent) == len(needed):  # one reason is enough for a row that cannot be trained
        reasons += [f"not told: {' or '.join(sorted(finding.ids))}" for finding in silent]
    reasons += [f"told, and not so: {name}" for name in sorted(said.loud - permitted)]
    reasons += list(_wording(needed, said))
    expected = tuple(right_text(answer, turn) for turn in answer.turns)
    lost = any(not finding.ids & NOTHING_LOST for finding in answer.required)
    grade = WRONG if reasons else TOLD if lost else RIGHT
    return Verdict(grade, tuple(reasons), expected)


def match(answer: Answer, trained: tuple[str, ...]) -> set[str] | None:
    """The findings that have to go with these spans, or None where they are not right."""
    found: list[set[str]] = []

    def follow(turns: tuple[Expected, ...], spans: tuple[str, ...], told: set[str]) -> bool:
        if not turns:
            found.append(told)
            return not spans
        for way in turns[0].ways:
            ends = [piece.end_of(answer.written.text, span) for piece, span in zip(way, spans, strict=False)]
            if len(ends) == len(way) and None not in ends:
                more = {end.finding for end in ends if end and end.finding}
                if follow(turns[1:], spans[len(way) :], told | more):
                    return True
        return False

    return found[-1] if follow(answer.turns, trained, set()) else None


def right_text(answer: Answer, turn: Expected) -> str:
    """What is to be trained of a turn, in the first of the right ways."""
    begin, end, appended = turn.right
    return answer.written.text[begin:end] + appended


def _unclosed(turns: tuple[Expected, ...]) -> set[str]:
    """Findings that are true of turns which nothing closes, also where the next header is trained as their stop."""
    findings = {end.finding for turn in turns for way in turn.ways for piece in way for end in piece.ends}
    return findings - {""}


def _stops(answer: Answer, said: Said) -> Iterator[str]:
    """The stops that are named are those that the spans end with."""
    ends = [stop for stop in said.stops if stop and not any(span.endswith(stop) for span in said.trained)]
    if ends:
        yield f"named as stops, and no span ends so: {ends}"
    closed = sum(turn.ways[0][-1].ends[0].finding == "" for turn in answer.turns)
    if len([stop for stop in said.stops if stop]) < closed:
        yield f"{closed} turns are closed, {len(said.stops)} stops are named"


def _wording(needed: list[Finding], said: Said) -> Iterator[str]:
    """Every finding has words and a remedy; a refusal names its cause."""
    for finding in needed:
        for name in finding.ids & set(said.findings):
            told = said.findings[name]
            if not all(one.message.strip() and (one.remedy or "").strip() for one in told):
                yield f"{name} has no words or no remedy"
            if finding.names and not any(re.search(finding.names, f"{one.message} {one.remedy}") for one in told):
                yield f"{name} does not name the cause ({finding.names}): {told[0].message}"
