"""Rows of a file as tokens with labels, one block of lines after the other, and a word on all that is found."""

import collections
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.jsonl import located, parse_line
from safetrain.core.data.layouts import RenderError
from safetrain.core.data.rendering import Labelling, RenderedRow
from safetrain.core.data.rows import Row, RowError
from safetrain.core.data.token_rows import TokenRow
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.plan.findings import Findings
from safetrain.plan.sources import Lines, blocks_of

AHEAD = 2  # blocks that are tokenized while the next one is rendered


@dataclass(frozen=True)
class Limits:
    """What the model can take. None: it does not say."""

    vocabulary: int | None
    max_positions: int | None


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row from its line to its tokens. ``tokens`` is None where it cannot be trained; ``findings`` are ids."""

    where: str  # file:line
    line: int
    row: Row | None
    rendered: RenderedRow | None
    tokens: TokenRow | None
    findings: tuple[str, ...]

    def last_answer(self) -> np.ndarray:
        """(tokens,) ids of the last run of labels."""
        if self.tokens is None:
            return np.zeros(0, dtype=np.uint32)
        labels = np.flatnonzero(self.tokens.trained)
        gaps = np.flatnonzero(np.diff(labels) > 1)
        return self.tokens.ids[labels[gaps[-1] + 1] if len(gaps) else labels[0] : labels[-1] + 1]


class RowReader:
    """Reads files for one model. The tokenizer library works on all cores beside the rendering of the next block."""

    def __init__(self, tokenizer: ChatTokenizer, labelling: Labelling, limits: Limits, findings: Findings) -> None:
        self._tokenizer, self._limits, self._findings = tokenizer, limits, findings
        self._renderer = tokenizer.renderer(labelling)
        self.closings = collections.Counter[str]()  # tokens that close the trained answers
        self._inside: set[str] = set()  # of them, those that also stand inside an answer
        self.openings = collections.Counter[tuple[str, str]]()  # what a prompt asks with, what training shows instead

    def rows(self, path: Path, name: str) -> Iterator[ReadRow]:
        """Every row of ``path``, in order; ``name`` stands for it in what is found. Raises DataError."""
        waiting = collections.deque[tuple[list[ReadRow], Future[list[TokenRow]]]]()
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            for lines in blocks_of(path):
                read = list(self._rendered(lines, name))
                texts = [item.rendered for item in read if item.rendered is not None]
                waiting.append((read, pool.submit(self._tokenizer.tokenize, texts)))
                if len(waiting) > AHEAD:
                    yield from self._checked(*_next(waiting))
            while waiting:
                yield from self._checked(*_next(waiting))

    def prompt(self, read: ReadRow) -> list[int] | None:
        """Ids that ask for a row's last answer, tokenized as any prompt is; None where it cannot be asked."""
        if read.rendered is None or read.rendered.question is None or not read.rendered.spans:
            return None
        return self._tokenizer.encode_chat(read.rendered.text[: read.rendered.spans[-1].start])

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the model's own, and the tokens that close what is trained and stand nowhere else."""
        taught = {self._tokenizer.id_of(token) for token in self.closings if token and token not in self._inside}
        return tuple(sorted(self._tokenizer.model_stop_ids | taught))

    def _rendered(self, lines: Lines, name: str) -> Iterator[ReadRow]:
        for number, text in lines.numbered():
            where = f"{name}:{number}"
            try:
                row = parse_line(text)
            except RowError as error:
                fault = located("", error).removeprefix(": ")
                yield self._refused(where, number, None, "ROW-UNREADABLE", fault)
                continue
            try:
                rendered = self._renderer.render(row)
            except RenderError as error:
                yield self._refused(where, number, row, error.id, str(error))
                continue
            yield ReadRow(where, number, row, rendered, None, self._told(row, rendered, where))

    def _refused(self, where: str, line: int, row: Row | None, identifier: str, detail: str) -> ReadRow:
        self._findings.add(identifier, detail, where=[where])
        return ReadRow(where, line, row, None, None, (identifier,))

    def _told(self, row: Row, rendered: RenderedRow, where: str) -> tuple[str, ...]:
        """Count what is remarkable about a row; the ids."""
        pairs = [(remark.id, remark.detail) for remark in rendered.remarks]
        pairs += [(identifier, "") for identifier in row.remarks]
        pairs += [("KEYS-IGNORED", key) for key in row.ignored_keys]
        for identifier, detail in dict.fromkeys(pairs):
            self._findings.add(identifier, detail, where=[where])
        for span in rendered.spans:
            self.closings[span.closing] += 1
        unsure = [token for token in self.closings if token and token not in self._tokenizer.controls.stops]
        for token in unsure:
            if any(token in rendered.text[span.start : span.end - len(span.closing)] for span in rendered.spans):
                self._inside.add(token)
        if rendered.is_chat:
            self.openings[rendered.asked, rendered.opening] += 1
        return tuple(dict.fromkeys(identifier for identifier, _ in pairs))

    def _checked(self, read: Sequence[ReadRow], tokens: Sequence[TokenRow]) -> Iterator[ReadRow]:
        """The rows with their tokens, if they can be trained."""
        made = iter(tokens)
        for item in read:
            if item.rendered is None:
                yield item
                continue
            row = next(made)
            fault = self._fault(row)
            if fault is not None:
                self._findings.add(*fault, where=[item.where])
                found = (*item.findings, fault[0])
                yield ReadRow(item.where, item.line, item.row, item.rendered, None, found)
                continue
            limit = self._limits.max_positions
            if limit is not None and len(row) > limit:
                self._findings.add("BEYOND-CONTEXT", str(limit), where=[item.where])
            yield ReadRow(item.where, item.line, item.row, item.rendered, row, item.findings)

    def _fault(self, tokens: TokenRow) -> tuple[str, str] | None:
        """Why a row cannot be trained: the id of the finding and its detail."""
        labels = tokens.trained[1:]
        if not labels.any():
            return "NO-LABELS", "nothing of it is an answer"
        vocabulary, limit = self._limits.vocabulary, self._limits.max_positions
        if vocabulary is not None and tokens.ids.max() >= vocabulary:
            number = int(tokens.ids.max())
            return "TOKEN-BEYOND-EMBEDDING", f"{self._tokenizer.token_of(number)!r} ({number} of {vocabulary})"
        if limit is not None and int(labels.argmax()) + 1 >= limit:
            return "ANSWER-BEYOND-CONTEXT", str(limit)
        return None


def _next(
    waiting: "collections.deque[tuple[list[ReadRow], Future[list[TokenRow]]]]",
) -> tuple[list[ReadRow], list[TokenRow]]:
    read, future = waiting.popleft()
    return read, future.result()


def canonical(row: Row) -> str:
    """The line of data/validated that a row becomes."""
    return json.dumps(row.as_json(), ensure_ascii=False) + "\n"
