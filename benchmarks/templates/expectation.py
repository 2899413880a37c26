"""What is right for a template and a conversation: from what the template writes, and from the hand-written table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.templates.conversations import TOOL_NEVER_CALLED, Conversation, Turn
from benchmarks.templates.families import Model
from benchmarks.templates.spans import Expected, expected_turns
from benchmarks.templates.writing import Template, Written, forms

ERRORS = {"ANSWER-LOST", "NO-LABELS", "TEMPLATE-REFUSES"}
ENCODED_TWICE = re.compile(r'\\"(?:ort|nacht)\b|\{\'(?:ort|nacht)\'|\{\{"|None')
PYTHON = "{'type': 'text'"  # a list of parts, printed as Python writes it
NOT_MEANT = (  # an error inside a template, and what has to be named instead
    ("'NoneType' object is not iterable", r"\btools\b"),
    ("'str object' has no attribute 'text'", r"parts|\blist\b|tool"),
    ("str object has no element 0", r"parts|\blist\b|tool"),
    ("generator is not JSON serializable", r"(?i)tool|generator|serializ"),
)
DESCRIBED = ("Dulmexa", "Dulmexc")


@dataclass(frozen=True)
class Finding:
    """A finding that has to be there: any of the ids, and what its words have to name."""

    ids: frozenset[str]
    names: str = ""


@dataclass(frozen=True)
class Answer:
    """One right outcome: the spans, the findings that have to be there, and those that may."""

    written: Written
    turns: tuple[Expected, ...] = ()
    required: tuple[Finding, ...] = ()
    permitted: frozenset[str] = frozenset()

    @property
    def fatal(self) -> bool:
        """Whether the row cannot be trained."""
        return any(finding.ids & ERRORS for finding in self.required)


def answers(conversation: Conversation, template: Template, model: Model) -> list[Answer]:
    """Every right outcome: of the forms that are the same data, those that lose least."""
    every = list(forms(conversation))
    chosen = _best([template.write(form) for form in every if form.asked], conversation)
    if chosen[0].refused or losses(conversation, chosen[0]):
        more = [template.write(form) for form in every if not form.asked]
        least = _worth(conversation, chosen[0])
        chosen += [one for one in more if not one.refused and _worth(conversation, one) < least]
    distinct = {(written.text, written.complaint): written for written in chosen}.values()
    return [_answer(conversation, written, template, model) for written in distinct]


def losses(conversation: Conversation, written: Written) -> list[Finding]:
    """What of the conversation is not in what was written."""
    if written.refused:
        return [_refusal(conversation, written)]
    lost = [finding for turn in conversation.turns for finding in _lost_of(turn, written.text)]
    system, text = Finding(frozenset({"TEXT-LOST"}), "system"), written.text
    lost += [system] * any(word not in text for word in conversation.systems)
    lost += [Finding(frozenset({"TEXT-LOST"}))] * any(word not in text for word in conversation.others)
    lost += [Finding(frozenset({"TEXT-LOST"}), "tools that are offered")] * _tools_lost(conversation, text)
    return list(dict.fromkeys(lost))


def _best(candidates: list[Written], conversation: Conversation) -> list[Written]:
    worth = [_worth(conversation, written) for written in candidates]
    return [written for written, value in zip(candidates, worth, strict=True) if value == min(worth)]


def _worth(conversation: Conversation, written: Written) -> tuple[bool, int, int, int]:
    """Less is better: refused, errors, warnings, arguments encoded twice."""
    lost = losses(conversation, written)
    fatal = sum(bool(finding.ids & ERRORS) for finding in lost)
    twice = 0
    if not written.refused and any(turn.calls for turn in conversation.turns):
        places = [written.text.find(call.value) for turn in conversation.turns for call in turn.calls]
        twice = sum(len(ENCODED_TWICE.findall(written.text[max(at - 60, 0) : at])) for at in places if at >= 0)
    return written.refused or PYTHON in written.text, fatal, len(lost) - fatal, twice


def _lost_of(turn: Turn, text: str) -> Iterator[Finding]:
    if turn.calls and any(call.value not in text for call in turn.calls):
        yield Finding(frozenset({"ANSWER-LOST"}))
    if turn.answer and turn.answer not in text:
        yield Finding(frozenset({"ANSWER-LOST", "TEXT-LOST"} if turn.calls else {"ANSWER-LOST"}))
    if turn.thinking and turn.thinking not in text:
        yield Finding(frozenset({"TEXT-LOST"}))


def _tools_lost(conversation: Conversation, text: str) -> bool:
    if not conversation.tools:
        return False
    called = [text.find(call.value) for turn in conversation.turns for call in turn.calls if call.value in text]
    before = text[: min(called, default=len(text))]
    names = before.count(TOOL_NEVER_CALLED) - (len(conversation.turns[0].calls) > 1 and not _described(text))
    return not _described(text) and names < 1


def _described(text: str) -> bool:
    return all(word in text for word in DESCRIBED)


def _refusal(conversation: Conversation, written: Written) -> Finding:
    """A refusal has to say whose fault it is."""
    if written.sandbox:
        return Finding(frozenset({"TEMPLATE-REFUSES"}), "not at fault")
    unknown = re.search(r"'(\w+)' is undefined", written.complaint)
    if unknown:
        return Finding(frozenset({"TEMPLATE-REFUSES"}), unknown[1])
    if written.complaint.startswith("TemplateError"):
        return Finding(frozenset({"TEMPLATE-REFUSES"}), _cause(conversation))
    named = next((words for complaint, words in NOT_MEANT if complaint in written.complaint), _cause(conversation))
    return Finding(frozenset({"TEMPLATE-REFUSES"}), named)


def _cause(conversation: Conversation) -> str:
    """What the words of a refusal have to name."""
    if any(message["role"] == "tool" for message in conversation.messages):
        return r"(?i)tool|call"
    if conversation.messages[0]["role"] == "system":
        return r"(?i)system"
    if conversation.letter in ("d1", "d2"):
        return r"(?i)alternat|in turns|first|begin|order|two user|in a row"
    return r"(?i)tools|template"


def _answer(conversation: Conversation, written: Written, template: Template, model: Model) -> Answer:
    lost = losses(conversation, written)
    if written.refused or any(finding.ids <= ERRORS for finding in lost):
        told = frozenset({"STOP-MISSING", "THINKING-EMPTY", "NO-LABELS"})  # beside the reason
        told = told.union(*(finding.ids - {"TEMPLATE-REFUSES"} for finding in lost))
        return Answer(written, (), tuple(finding for finding in lost if finding.ids <= ERRORS), told)
    turns = tuple(expected_turns(conversation, written, template, model))
    required = [*lost]
    if any(turn.thinks_empty for turn in turns):
        required.append(Finding(frozenset({"THINKING-EMPTY"})))
    permitted = {"THINKING-EMPTY"} if any(turn.may_think_empty for turn in turns) else set()
    return Answer(written, turns, tuple(required), frozenset(permitted))
