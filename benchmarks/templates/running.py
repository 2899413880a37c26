"""All conversations of one template through safetrain, in one file, and the judgement of each."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.templates.conversations import Conversation
from benchmarks.templates.expectation import Answer, answers
from benchmarks.templates.families import Model, model_of
from benchmarks.templates.folder import write_folder
from benchmarks.templates.judge import WRONG, Said, Verdict, judge
from benchmarks.templates.material import Published
from benchmarks.templates.writing import FAILURES, Template
from safetrain.core.errors import SafetrainError
from safetrain.data.command import pieces_of

Validate = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One template with one conversation."""

    template: str
    conversation: Conversation
    said: Said | None
    verdict: Verdict
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Result:
    """One template with every conversation."""

    template: Published
    model: Model
    cases: tuple[Case, ...]


def run_template(template: Published, conversations: Sequence[Conversation], validate: Validate) -> Result:
    """Judge what ``validate`` says of every conversation."""
    model = model_of(template.name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch) / "model", template, model)
        rows = Path(scratch) / "rows.jsonl"
        lines = [json.dumps(conversation.row, ensure_ascii=False) for conversation in conversations]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        said, failure = _said(validate, rows, folder, len(lines))
        cases = [
            _case(template, conversation, Template(tokenizer), model, said, failure, line)
            for line, conversation in enumerate(conversations, 1)
        ]
        return Result(template, model, tuple(cases))


def _said(validate: Validate, rows: Path, folder: Path, count: int) -> tuple[dict[int, Said], str]:
    try:
        report = validate([rows], folder, shown_rows=-1, most_places=1000)
    except (SafetrainError, *FAILURES, RuntimeError) as error:
        return {}, f"{type(error).__name__}: {error}"
    found: dict[int, dict[str, tuple[Any, ...]]] = {line: {} for line in range(1, count + 1)}
    spans: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for row in report.rows:
        line = _line(row.spot.text())
        labels = [(text, stop) for text, stop in pieces_of(row) if stop is not None]
        spans[line] = (tuple(text for text, _ in labels), tuple(stop for _, stop in labels))
        found[line] = {name: _of_row(report.findings, name, row.spot.text()) for name in row.findings}
    return {line: Said(*spans.get(line, ((), ())), found[line]) for line in found}, ""


def _of_row(findings: Sequence[Any], name: str, where: str) -> tuple[Any, ...]:
    """The findings of that id that name this row; all of that id if none does, since a report names only a few rows."""
    named = [finding for finding in findings if finding.id == name]
    return tuple([finding for finding in named if where in finding.where] or named)


def _line(where: str) -> int:
    return int(where.rsplit(":", 1)[1])


def _case(
    template: Published, conversation: Conversation, writer: Template, model: Model,
    said: dict[int, Said], failure: str, line: int,
) -> Case:  # fmt: skip
    right = answers(conversation, writer, model)
    one = said.get(line)
    verdict = judge(right, one) if one else Verdict(WRONG, (failure or "the row is not reported",))
    return Case(template.name, conversation, one, verdict, tuple(right))
