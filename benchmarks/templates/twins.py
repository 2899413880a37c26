"""TRL's own training templates beside what is trained: every difference, by kind."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.templates.material import Published
from benchmarks.templates.writing import FAILURES, ChatForm, forms

if TYPE_CHECKING:
    from benchmarks.templates.running import Case

SAME = "the same, character by character"
REFUSED = "TRL's template refuses the conversation"
UNTRAINED = "safetrain refuses the row, with its reason, and TRL trains it without what is lost"
APPENDED = "safetrain trains the stop token that ends the turn, and TRL ends before it"
SHOWN = 300  # characters of evidence


@dataclass(frozen=True)
class Difference:
    """How TRL's mask differs from what is trained, in one conversation."""

    letter: str
    kind: str  # empty: none that is known
    evidence: str = ""


@dataclass(frozen=True)
class Theirs:
    """What TRL's template writes, and which pieces it trains."""

    text: str
    spans: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    """What TRL trains more at an edge of a span, and what that is called."""

    form: str  # expression for the whole of it
    published: str  # its name where the published template writes it too
    added: str = ""  # its name where it does not


HEADER = r"(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>|<\|start\|>assistant|<\|im_start\|>assistant\n)\s*"
BEFORE = (
    Edge(r"\s+", "TRL also trains the white space behind the header"),
    Edge(HEADER, "TRL also trains the header"),
    Edge(
        r"<think>\s*</think>\s*",
        "TRL also trains the empty thinking block that the generation prompt gives",
        "TRL changes the text: it adds an empty thinking block to every answer",
    ),
    Edge(
        r"<think>\s*",
        "TRL also trains the <think> that the generation prompt gives",
        "TRL changes the text: it adds a <think>",
    ),
    Edge(
        r"<think>.*</think>\s*",
        "TRL also trains the thinking",
        "TRL changes the text: it keeps the thinking of earlier answers",
    ),
)
AFTER = (
    Edge(r"\s+", "TRL also trains the white space behind the stop token"),
    Edge(r"\s*<\|endoftext\|>", "TRL also trains a second end behind the stop token"),
)


def twin_differences(template: Published, tokenizer: Any, cases: Iterable["Case"]) -> Iterator[Difference]:
    """One difference, or ``SAME``, for each conversation in which safetrain trains anything."""
    for case in cases:
        if case.said is None or not case.said.trained:
            continue
        found = [_compare(template, tokenizer, case, form) for form in forms(case.conversation)]
        taken = [one for one in found if one.kind != REFUSED] or found
        named = [one for one in taken if one.kind] or taken
        yield min(named, key=lambda one: (one.kind != SAME, len(one.kind)))


def _compare(template: Published, tokenizer: Any, case: "Case", form: ChatForm) -> Difference:
    """The difference with a row in one of its forms."""
    theirs, ours = _masked(template.twin or "", tokenizer, form), case.said.trained if case.said else ()
    if theirs is None:
        return Difference(case.conversation.letter, REFUSED)
    fatal = all(answer.fatal for answer in case.answers)
    kind = UNTRAINED if fatal else _kind(case.answers[0].written.text, ours, theirs.spans)
    evidence = f"TRL {list(theirs.spans)!r:.{SHOWN}} safetrain {list(ours)!r:.{SHOWN}}"
    return Difference(case.conversation.letter, kind, evidence)


def _masked(source: str, tokenizer: Any, form: ChatForm) -> Theirs | None:
    try:
        texts, indices = render_jinja_template(
            [copy.deepcopy(form.messages)],
            tools=form.tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except FAILURES:
        return None
    joined: list[tuple[int, int]] = []
    for start, end in indices[0]:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return Theirs(texts[0], tuple(texts[0][start:end] for start, end in joined))


def _kind(text: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """The kinds of difference between two lists of spans, joined; empty if one has no name."""
    if theirs == ours:
        return SAME
    if len(theirs) != len(ours):
        return ""
    kinds = [kind for our, their in zip(ours, theirs, strict=True) for kind in _of_spans(text, our, their)]
    return "" if "" in kinds else "; ".join(sorted(set(kinds)))


def _of_spans(text: str, our: str, their: str) -> Iterator[str]:
    """The kinds of difference between two spans of the same turn."""
    if our == their:
        return
    core = our.strip()
    if core not in their:  # without the token that closes it, which TRL may leave out
        core = next((part for part in _without_stop(core) if part in their), "")
        yield APPENDED if core else ""
    at = their.rfind(core)
    before, after = their[:at], their[at + len(core) :]
    if before != our[: our.find(core)]:
        yield from _before(before, before + core in text)
    if after and after != our[our.find(core) + len(core) :]:
        yield _named(AFTER, after, True)


def _before(more: str, published: bool) -> Iterator[str]:
    """The kinds of what TRL trains more at the beginning: a header, and what follows it."""
    header = re.match(HEADER, more)
    if header:
        yield _named(BEFORE, header[0], published)
    if not header or header.end() < len(more):
        yield _named(BEFORE, more[header.end() :] if header else more, published)


def _without_stop(span: str) -> Iterator[str]:
    yield from (span[: match.start()].rstrip() for match in re.finditer(r"<[|｜][^<>]*>$", span))


def _named(edges: tuple[Edge, ...], more: str, published: bool) -> str:
    """What the text at an edge is called."""
    edge = next((edge for edge in edges if re.fullmatch(edge.form, more, re.DOTALL)), None)
    return "" if edge is None else edge.published if published or not edge.added else edge.added
