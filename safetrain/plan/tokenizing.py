"""The rows of a file as tokens with labels, block by block, with findings about them."""

import collections
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.column_guess import ColumnGuess
from safetrain.core.data.foreign_rows import Columns, UnknownKeysError, key_names
from safetrain.core.data.jsonl import COLUMN, Fault, decoded, located, parse_raw
from safetrain.core.data.layouts import RenderError
from safetrain.core.data.places import Place
from safetrain.core.data.plain_text import PLAIN, text_blocks
from safetrain.core.data.rendering import Labelling, RenderedRow
from safetrain.core.data.row_blocks import Raw, RowBlock, blocks_of
from safetrain.core.data.rows import Row, RowError
from safetrain.core.data.token_rows import TokenRow
from safetrain.core.data.tokenizer import ChatTokenizer, Tokenized
from safetrain.core.errors import NoRowsError
from safetrain.core.formatting import counted
from safetrain.core.records.schema import Data
from safetrain.plan.email_addresses import EmailAddresses
from safetrain.plan.findings import KINDS, Findings, Severities
from safetrain.plan.shared_reasons import remedy_for_all
from safetrain.plan.sources import SPLIT_NAMES, suffix_of
from safetrain.plan.text_checks import TextChecks

MOST_FAULTS = 10_000  # bad lines that are remembered
SPLIT_WORDS = frozenset(name for names in SPLIT_NAMES.values() for name in (*names, "training", "eval"))
AHEAD = 2  # blocks that are tokenized while the next one is rendered


def rules_of(data: Data) -> tuple[Labelling, Severities]:
    """What is a label and which findings are errors, by the section data of params.yaml."""
    labelling = Labelling(data.append_end, data.train_empty_thinking, data.opening)
    return labelling, Severities(tuple(data.downgrade or ()), tuple(data.upgrade or ()))


@dataclass(frozen=True)
class Limits:
    """What the model can take. None: it does not say."""

    vocabulary: int | None
    max_positions: int | None


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row from its line to its tokens. ``tokens`` is None where it cannot be trained; ``findings`` are ids."""

    where: str  # its place, with the file
    place: Place
    row: Row | None
    rendered: RenderedRow | None
    tokens: TokenRow | None
    findings: tuple[str, ...]
    asked_at: int | None = None  # the token at which its last answer begins; None where it cannot be asked
    prompt: list[int] | None = None  # that ask for it, where they are not the row's tokens up to there

    @property
    def characters(self) -> int:
        """Of its text."""
        return len(self.rendered.text) if self.rendered is not None else 0

    @property
    def label_bytes(self) -> int:
        """UTF-8 bytes of the text of its labels, without the tokens that close answers."""
        if self.rendered is None:
            return 0
        text, spans = self.rendered.text, self.rendered.spans
        return sum(len(text[span.start : span.end - len(span.closing)].encode("utf-8")) for span in spans)


class RowReader:
    """Reads files for one model. The tokenizer library works on all cores beside the rendering of the next block."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        labelling: Labelling,
        limits: Limits,
        findings: Findings,
        columns: Columns | None = None,
        *,
        documents: bool = False,
    ) -> None:
        """``documents``: files of plain text are read as documents."""
        self._documents = documents
        self.faults: list[Fault] = []  # of what is no row
        self.unreadable, self.refused = 0, 0  # what is no row; this and rows that cannot be trained
        self._guess, self._unknown, self._parsed = ColumnGuess(), "", 0  # of rows whose keys are unknown
        self.formats: set[str] = set()
        self._lost_labels, self._losing_rows = 0, 0  # labels beyond the model's context, and the rows that lose them
        self._losing: list[str] = []  # the first of these
        self._tokenizer, self._limits, self._findings = tokenizer, limits, findings
        self._renderer, self._checks = tokenizer.renderer(labelling), TextChecks(tokenizer.controls)
        self._columns, self._addresses = columns, EmailAddresses(findings)
        self._stops = tokenizer.stop_ids  # found now: it renders, which the tokenizer's thread must not
        self.closings = collections.Counter[str]()  # tokens that close the trained answers
        self._splits = collections.Counter[str]()  # what the rows of a file say of their split
        self._inside: set[str] = set()  # of them, those that also stand inside an answer
        self.openings = collections.Counter[tuple[str, str]]()  # what a prompt opens with, and what training shows
        self._systems: set[str] = set()  # system prompts, "" for none: the first two that differ

    def blocks(self, path: Path, name: str, *, only_whole: bool = False) -> Iterator[list[ReadRow]]:
        """Every row of ``path``, in order, some hundred at a time; ``name`` stands for it in what is found.

        With ``only_whole``, rows behind an unreadable one are only parsed, so that all unreadable lines are found
        quickly. A file without rows gives none. Raises DataError.
        """
        try:
            is_plain = self._documents and suffix_of(path) in PLAIN
            found = text_blocks(path) if is_plain else blocks_of(path)
        except NoRowsError:
            return
        self._splits.clear()
        waiting = collections.deque[tuple[list[ReadRow], Future[list[Tokenized]]]]()
        with ThreadPoolExecutor(1, "tokenizer") as pool:
            for block in found:
                if block.beside:
                    self._findings.add("KEYS-BESIDE-ROWS", key_names(block.beside), where=[name])
                read = list(self._rendered(block, name, only_whole=only_whole))
                texts = [item.rendered for item in read if item.rendered is not None]
                waiting.append((read, pool.submit(self._tokenizer.tokenize, texts)))
                if len(waiting) > AHEAD:
                    yield list(self._checked(*_next(waiting)))
            while waiting:
                yield list(self._checked(*_next(waiting)))
        self._tell_splits(name)

    def remedy(self) -> str:
        """Where no row could be read, all for one reason: what to do; else empty."""
        if self._parsed:
            return ""
        return (self._guess.remedy() if self._guess.rows else "") or remedy_for_all(self.faults, self._columns)

    def tell_remedy(self) -> None:
        """Once all rows are read: that remedy, for the finding about the first of them."""
        remedy = self.remedy()
        if remedy:
            self._findings.add("ROW-UNREADABLE", self._unknown or self.faults[0].text, 0, remedy=remedy)

    def tell_all(self, labels: int) -> None:
        """Once all rows are read, with ``labels`` in all: addresses, and what the model's context cuts off."""
        self._addresses.tell(self._parsed)
        if self._lost_labels:
            lost, share = counted(self._lost_labels, "token"), 100 * self._lost_labels / labels
            said = f"{lost} of answers ({share:.2g} % of all that is to be learnt)"
            self._findings.add("LABELS-LOST", said, self._losing_rows, self._losing)

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the model's own, and the tokens that close trained answers and stand nowhere else.

        Where all rows are bare text, the tokens with which the template would close an answer.
        """
        taught = {self._tokenizer.id_of(token) for token in self.closings if token and token not in self._inside}
        return tuple(sorted(self._tokenizer.model_stop_ids | taught if taught else self._stops))

    def system(self) -> str:
        """The system prompt that every row has; empty where they differ, or have none."""
        return next(iter(self._systems)) if len(self._systems) == 1 else ""

    def _rendered(self, block: RowBlock, name: str, *, only_whole: bool) -> Iterator[ReadRow]:
        for place, raw in block.rows:
            where = place.of(name)
            try:
                row = parse_raw(raw, self._columns)
            except RowError as error:
                if len(self.faults) < MOST_FAULTS:
                    self.faults.append(located(name, place, error))
                self.unreadable += 1
                if isinstance(error, UnknownKeysError):
                    self._guess.add(error.row)
                    self._unknown = self._unknown or str(error)
                yield self._refused(where, place, None, "ROW-UNREADABLE", COLUMN.sub("", str(error)))
                continue
            self._parsed += 1
            self._see_split(row, raw)
            if only_whole and self.faults:
                continue
            try:
                rendered = self._renderer.render(row)
            except RenderError as error:
                if not KINDS[error.id].fixed:  # it may be taken for a warning: that nothing is left may not
                    self._findings.add("NO-LABELS", str(error), where=[where])
                yield self._refused(where, place, row, error.id, str(error))
                continue
            yield ReadRow(where, place, row, rendered, None, self._told(row, rendered, where))

    def _see_split(self, row: Row, raw: Raw) -> None:
        """Count what a row itself says of its split, where nothing reads that."""
        key = next((key for key in row.ignored_keys if key.casefold() == "split"), None)
        value = decoded(raw) if key else None
        said = value[key] if isinstance(value, dict) and key else None
        if isinstance(said, str) and said.strip().casefold() in SPLIT_WORDS:
            self._splits[said.strip().casefold()] += 1

    def _tell_splits(self, name: str) -> None:
        """At the end of a file, where its rows say that they are of several splits."""
        if len(self._splits) > 1:
            said = ", ".join(f"{split} ({count})" for split, count in sorted(self._splits.items()))
            self._findings.add("SPLIT-KEY-UNREAD", said, self._splits.total(), [name])

    def _refused(self, where: str, place: Place, row: Row | None, identifier: str, detail: str) -> ReadRow:
        self._findings.add(identifier, detail, where=[where])
        self.refused += 1
        return ReadRow(where, place, row, None, None, (identifier,))

    def _told(self, row: Row, rendered: RenderedRow, where: str) -> tuple[str, ...]:
        """Count the findings about a row; gives their ids."""
        self.formats.add(row.format)
        if len(self._systems) < 2:
            self._systems.add(row.system)
        self._count(rendered)
        faults = list(self._checks.faults(row, self._addresses.of(row, where)))
        if not (rendered.remarks or row.remarks or row.ignored_keys or row.taken or faults):
            return ()
        pairs = [*faults]
        pairs += [(remark.id, remark.detail) for remark in rendered.remarks]
        pairs += [(identifier, "") for identifier in row.remarks]
        pairs += [("KEYS-IGNORED", key) for key in row.ignored_keys]
        pairs += [("COLUMNS-TAKEN", row.taken)] if row.taken else []
        for identifier, detail in dict.fromkeys(pairs):
            self._findings.add(identifier, detail, where=[where])
        return tuple(dict.fromkeys(identifier for identifier, _ in pairs))

    def _count(self, rendered: RenderedRow) -> None:
        """Count what closes and what opens answers."""
        for span in rendered.spans:
            self.closings[span.closing] += 1
        unsure = [token for token in self.closings if token and token not in self._tokenizer.controls.stops]
        for token in unsure:
            if any(token in rendered.text[span.start : span.end - len(span.closing)] for span in rendered.spans):
                self._inside.add(token)
        if rendered.is_chat:
            self.openings[rendered.asked, rendered.opening] += 1

    def _checked(self, read: Sequence[ReadRow], tokenized: Sequence[Tokenized]) -> Iterator[ReadRow]:
        """The rows with their tokens, if they can be trained."""
        made = iter(tokenized)
        for item in read:
            if item.rendered is None:
                yield item
                continue
            found = next(made)
            fault = self._fault(found)
            if fault is not None:
                self._findings.add(*fault, where=[item.where])
                self.refused += 1
                yield ReadRow(item.where, item.place, item.row, item.rendered, None, (*item.findings, fault[0]))
                continue
            row, limit = found.tokens, self._limits.max_positions
            if limit is not None and len(row) > limit:
                self._findings.add("BEYOND-CONTEXT", str(limit), where=[item.where])
                self._count_lost(item.where, int(np.count_nonzero(row.trained[limit:])))
            asked_at = found.runs[-1][0] if item.rendered.can_be_asked else None
            prompt = None if asked_at is None else self._other_prompt(item.rendered, row, asked_at)
            yield ReadRow(item.where, item.place, item.row, item.rendered, row, item.findings, asked_at, prompt)

    def _count_lost(self, where: str, labels: int) -> None:
        self._lost_labels += labels
        if labels:
            self._losing_rows += 1
            self._losing += [where] if len(self._losing) < self._findings.most_places else []

    def _other_prompt(self, rendered: RenderedRow, row: TokenRow, asked_at: int) -> list[int] | None:
        """The ids that ask for the last answer, where they are not the row's tokens up to there.

        They may differ where a header ends in plain text: the tokenizer then joins what it asks and what is answered.
        """
        text = rendered.text[: rendered.spans[-1].start]
        header = self._tokenizer.header_ids(text)
        if header is not None and header == row.ids[asked_at - len(header) : asked_at].tolist():
            return None
        prompt = self._tokenizer.encode_chat(text)
        return None if prompt == row.ids[:asked_at].tolist() else prompt

    def _fault(self, found: Tokenized) -> tuple[str, str] | None:
        """Why a row cannot be trained: the id of the finding and its detail."""
        if not any(last for _, last in found.runs):  # nothing stands before a row's first token
            return "NO-LABELS", "nothing of it is an answer"
        vocabulary, limit = self._limits.vocabulary, self._limits.max_positions
        if vocabulary is not None and self._tokenizer.size > vocabulary and found.tokens.ids.max() >= vocabulary:
            number = int(found.tokens.ids.max())
            return "TOKEN-BEYOND-EMBEDDING", f"{self._tokenizer.token_of(number)!r} ({number} of {vocabulary})"
        if limit is not None and found.runs[0][0] >= limit:
            return "ANSWER-BEYOND-CONTEXT", str(limit)
        return None


_encode = json.JSONEncoder(ensure_ascii=False).encode


def _next(
    waiting: "collections.deque[tuple[list[ReadRow], Future[list[Tokenized]]]]",
) -> tuple[list[ReadRow], list[Tokenized]]:
    read, future = waiting.popleft()
    return read, future.result()


def canonical(row: Row) -> str:
    """The line of data/validated that a row becomes."""
    return _encode(row.with_group()) + "\n"
