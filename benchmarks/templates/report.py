"""The result as Markdown: totals, a table by template, and every wrong case."""

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.machine import show_result, write_result
from benchmarks.templates.judge import RIGHT, TOLD, WRONG
from benchmarks.templates.material import LLAMA, TRL
from benchmarks.templates.running import Case, Result

LETTERS = {RIGHT: "·", TOLD: "t", WRONG: "**W**"}
TITLE = "Chat masks on published chat templates"
SHOWN = 420  # characters of evidence


def write_report(results: Sequence[Result], digest: str, keep: bool) -> int:
    """Write and print the report; returns the number of wrong cases."""
    cases = [case for result in results for case in result.cases]
    wrong = [case for case in cases if case.verdict.grade == WRONG]
    rows: list[list[object]] = [[*map(_cell, _about(result)), *map(_letter, result.cases)] for result in results]
    letters = [case.conversation.letter for result in results[:1] for case in result.cases]
    notes = [_totals(cases, results, digest), _legend(results), _kinds(cases)]
    notes += [_evidence(case) for case in wrong]
    show = write_result if keep else show_result
    show("bench_templates", TITLE, ["template", "closes turns with", *letters], rows, notes)
    return len(wrong)


def _totals(cases: list[Case], results: Sequence[Result], digest: str) -> str:
    grades = Counter(case.verdict.grade for case in cases)
    counted = ", ".join(f"{grades[grade]} {grade}" for grade in (RIGHT, TOLD, WRONG))
    all_right = sum(all(case.verdict.grade != WRONG for case in result.cases) for result in results)
    return (
        f"**{len(results)} templates, {len(cases)} cases: {counted}.** {all_right} templates have no wrong case."
        f" Templates of `{TRL}` and `{LLAMA}` (its templates and those in its tests), each text once; digest {digest}."
    )


def _legend(results: Sequence[Result]) -> str:
    named = [f"{case.conversation.letter} {case.conversation.title}" for case in results[0].cases] if results else []
    return (
        "`·` right: every turn trained, with the token that closes it and nothing else. `t` told: the template loses"
        " or refuses something, and a finding names it. `W` wrong. Conversations: " + "; ".join(named) + "."
    )


def _kinds(cases: list[Case]) -> str:
    """How often each finding was told."""
    told = Counter(name for case in cases if case.said for name in case.said.loud)
    return "Told: " + (", ".join(f"{name} {count}" for name, count in told.most_common()) or "nothing") + "."


def _evidence(case: Case) -> str:
    return "\n".join(_evidence_lines(case))


def _evidence_lines(case: Case) -> Iterator[str]:
    yield f"**{_cell(case.template)}, {case.conversation.letter}** ({case.conversation.title}): " + "; ".join(
        _cell(reason[:SHOWN]) for reason in case.verdict.reasons
    )
    yield "```"
    if case.said is not None:
        yield f"trained: {list(case.said.trained)!r:.{SHOWN}}"
        yield f"stops:   {list(case.said.stops)!r:.{SHOWN}}"
        yield f"told:    {[(f.id, f.message[:120]) for fs in case.said.findings.values() for f in fs]!r:.{SHOWN}}"
    yield f"right:   {list(case.verdict.expected)!r:.{SHOWN}}"
    if not case.verdict.expected:
        yield f"right:   {[' or '.join(sorted(f.ids)) for f in case.answers[0].required]}"
        yield f"because: {case.answers[0].written.complaint or case.answers[0].written.text!r:.{SHOWN}}"
    yield "```"


def _about(result: Result) -> tuple[str, str]:
    """The names of a template, and every token that ends a turn; "nothing" where it writes none."""
    turns = [(answer, turn) for case in result.cases for answer in case.answers[:1] for turn in answer.turns]
    ends = [(answer.written.text, turn.ways[0][-1].ends[0]) for answer, turn in turns]
    known = result.model.family.closes + result.model.all_stops
    closes = [
        "nothing" if end.appended else next((close for close in known if text.endswith(close, 0, end.place)), "nothing")
        for text, end in ends
    ]
    names = " = ".join(name.split("/", 1)[1] for name in result.template.names)
    return names, ", ".join(dict.fromkeys(closes)) or "–"


def _letter(case: Case) -> str:
    return LETTERS[case.verdict.grade]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "\\n").replace("<", "&lt;")
