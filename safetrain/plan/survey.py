"""What is remembered of every row while rows are read, so that they can be compared when all are known.

It lies on the disk: 68 bytes a row, and 4 for each run of words.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.endings import Endings
from safetrain.core.data.messages import Message
from safetrain.core.data.places import Place
from safetrain.core.data.rows import Row
from safetrain.core.data.words import digests, mixed, plain_digest, strict_digest, words_of
from safetrain.plan.language import LanguageSample
from safetrain.plan.near_copies import NearPairs, ShingleFile, clusters, find
from safetrain.plan.row_columns import RowColumns, first_alike
from safetrain.plan.splits import MIN_GROUPS
from safetrain.plan.tokenizing import ReadRow

AT_ONCE = 256  # rows whose words are found at a time: what that takes stays in the processor's cache


@dataclass(frozen=True)
class DuplicateGroups:
    """Which rows ask in the same words, and which nearly. A row stands for those like it that come after it.

    ``by_context``: the questions are so few that each counts with its system text and whatever else stands before it.
    """

    groups: np.ndarray  # (rows,) uint32: the first row that asks in the same words
    pairs: np.ndarray  # (pairs, 2) of such first rows that are near copies
    clusters: np.ndarray  # (rows,) uint32: the first row that is connected to it by these
    complete: bool  # whether all were compared
    by_context: bool


@dataclass(frozen=True)
class RowFacts:
    """What is known of each row, on the disk; keys, uint64, come some thousand rows at a time."""

    columns: RowColumns
    by_context: bool

    def keys(self, name: str) -> Iterator[np.ndarray]:
        """What rows ask ("questions" or "asked"), with their contexts where these count."""
        for numbers, contexts in self.columns.chunks(name, "contexts"):
            yield mixed(numbers + mixed(contexts)) if self.by_context else numbers

    def in_context(self) -> Iterator[np.ndarray]:
        """What rows ask, always with their contexts."""
        for asked, (contexts,) in zip(self.keys("asked"), self.columns.chunks("contexts"), strict=True):
            yield mixed(asked + mixed(contexts))

    def by_file(self, values: np.ndarray) -> np.ndarray:
        """(rows,) what ``values`` (files,) says of the file of each."""
        return np.concatenate([values[:0], *(values[files] for files in self.columns.pieces("files"))])

    def place(self, row: int) -> Place:
        """Where a row stands in its file."""
        return Place(self.columns.one("lines", row), self.columns.one("table_rows", row))


class Survey(contextlib.AbstractContextManager["Survey"]):
    """Collects what is known of each row."""

    def __init__(self, folder: Path) -> None:
        self.shingles = ShingleFile(folder)
        self.languages = LanguageSample()
        self.endings = Endings()
        self._columns = RowColumns(
            folder,
            files="u4",
            lines="u4",
            table_rows="u4",  # where they are counted; else 0
            lengths="u4",  # tokens
            identities="u8",  # digests of all that a row says
            questions="u8",  # digests of normalised words
            asked="u8",  # stricter digests, for which signs of code and mathematics count
            exact="u8",  # digests of the very text
            contexts="u8",  # of what stands before an answer besides questions
            answers="u8",  # 0 where there is none
            answer_words="u4",
        )
        self._different, self._in_context = set[int](), set[tuple[int, int]]()  # questions, until there are enough

    def __exit__(self, *_ended: object) -> None:
        self.shingles.__exit__()
        self._columns.__exit__()

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Those that can be trained."""
        kept = [(each.place, each.row, len(each.tokens)) for each in reads if each.row and each.tokens is not None]
        for start in range(0, len(kept), AT_ONCE):
            places, rows, lengths = zip(*kept[start : start + AT_ONCE], strict=True)
            self._compare(rows, file, places, lengths)

    def facts(self) -> RowFacts:
        """Of all rows so far. The questions may be too few to split by, and more with what stands before them."""
        few = len(self._different) < MIN_GROUPS
        return RowFacts(self._columns, few and len(self._in_context) > len(self._different))

    def likeness(self, similarity: float, sides: np.ndarray) -> DuplicateGroups:
        """Compare the questions of all rows; ``sides``: a number for each split that a file is given for, by file."""
        facts = self.facts()
        groups = first_alike(len(self), lambda: facts.keys("questions"))
        near = NearPairs(np.zeros((0, 2), dtype=np.uint32), True)
        if similarity < 1 and not facts.by_context:  # else only the same words in the same order count
            firsts = np.flatnonzero(groups == np.arange(len(self), dtype=np.uint32)).astype(np.uint32)
            near = find(self.shingles, firsts, similarity, facts.by_file(sides))
        together = clusters(len(self), near.pairs)[groups]
        return DuplicateGroups(groups, near.pairs, together, near.complete, facts.by_context)

    def _compare(self, rows: Sequence[Row], file: int, places: Sequence[Place], lengths: Sequence[int]) -> None:
        asked, answers = [asked_text(row) for row in rows], [answer_text(row) for row in rows]
        said = [question or answer for question, answer in zip(asked, answers, strict=True)]
        words = words_of(said)
        self.shingles.add(words)
        questions = [digest or plain_digest(text) for digest, text in zip(digests(words).tolist(), said, strict=True)]
        replies = [_reply(row, answer) for row, answer in zip(rows, answers, strict=True)]
        contexts, exact = [_context(row) for row in rows], list[int]()
        for index, (row, question, answer) in enumerate(zip(rows, asked, answers, strict=True)):
            exact.append(plain_digest(_all_but_answers(row) if question else row.identity()))
            self.endings.add(len(self) + index, answer)
            self.languages.add(questions[index] ^ replies[index][0], len(self) + index, question, answer)
        if len(self._different) < MIN_GROUPS:
            self._different.update(questions)
        if len(self._in_context) < MIN_GROUPS:
            self._in_context.update(zip(questions, contexts, strict=True))
        self._columns.add(
            files=[file] * len(rows),
            lines=[place.line for place in places],
            table_rows=[place.row for place in places],
            lengths=lengths,
            identities=[plain_digest(_identity(row)) for row in rows],
            questions=questions,
            asked=[strict_digest(text) for text in said],
            exact=exact,
            contexts=contexts,
            answers=[number for number, _ in replies],
            answer_words=[count for _, count in replies],
        )


def _reply(row: Row, answer: str) -> tuple[int, int]:
    """A digest of the answer, but for case and a final full stop; 0 where there is none. And its words."""
    said = answer.casefold().split()
    is_answer = said and row.format != "text"
    return plain_digest(" ".join(said).rstrip(".!")) if is_answer else 0, len(said)


def asked_text(row: Row) -> str:
    """What people ask in a row, all of a bare text; empty where nobody does: such a row counts by its answer."""
    if row.format == "text":
        return row.text
    asked = "\n".join([message.content for message in row.messages if message.role == "user"])
    return "" if asked.isspace() else asked


def _identity(row: Row) -> str:
    """Equal for rows that say the same. Most are plain chats, for which no JSON is needed."""
    if row.tools or any(message.details or not message.trained for message in row.messages):
        return row.identity()
    return "\0".join([row.format, row.text, *(f"{message.role}\1{message.content}" for message in row.messages)])


def _all_but_answers(row: Row) -> str:
    """Equal for rows that ask the very same."""
    return row.text or "\0".join([message.content for message in row.messages if message.role != "assistant"])


def answer_text(row: Row) -> str:
    """The last answer, its tool calls as JSON; the whole of a bare text."""
    if row.format == "text":
        return row.text
    last = row.messages[-1] if row.messages[-1].role == "assistant" else _last_answer(row)
    return f"{last.content}\n{last.details}" if last.details else last.content


def _last_answer(row: Row) -> Message:
    return next(message for message in reversed(row.messages) if message.role == "assistant")


def _context(row: Row) -> int:
    """A digest of what an answer depends on besides what people ask; 0 where there is nothing."""
    if len(row.messages) == 2 and row.messages[0].role == "user":  # as most are
        return 0
    last = _last_answer(row) if row.messages else None
    parts = [message.content for message in row.messages if message.role != "user" and message is not last]
    if not parts and not row.tools:
        return 0
    text = "\0".join([*parts, row.tools]).encode("utf-8")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
