"""What is remembered of every row while rows are read, so that they can be compared when all are known.

Some 80 bytes a row; runs of words lie on the disk.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from safetrain.core.data.messages import Message
from safetrain.core.data.quality import CUT, SENTENCE, ending
from safetrain.core.data.rows import Row
from safetrain.core.data.words import digests, mixed, plain_digest, strict_digest, words_of
from safetrain.plan.language import LanguageSample
from safetrain.plan.near_copies import NearPairs, ShingleFile, clusters, find
from safetrain.plan.splits import MIN_GROUPS
from safetrain.plan.tokenizing import ReadRow

AT_ONCE = 256  # rows whose words are found at a time: what that takes stays in the processor's cache


@dataclass(frozen=True)
class Likeness:
    """Which rows ask in the same words (``groups``, (rows,)), which nearly (``pairs`` of groups, ``clusters`` of rows).

    ``by_context``: the questions are so few that each counts with its system text and whatever else stands before it.
    """

    groups: np.ndarray
    pairs: np.ndarray
    clusters: np.ndarray
    complete: bool  # whether all were compared
    count: int  # of groups
    by_context: bool


@dataclass(frozen=True)
class RowFacts:
    """(rows,) each. ``answers``: 0 where there is none; ``contexts``: what stands before one besides questions."""

    files: np.ndarray
    lines: np.ndarray
    questions: np.ndarray  # digests of normalised words
    asked: np.ndarray  # stricter digests, for which signs of code and mathematics count
    exact: np.ndarray  # digests of the very text
    identities: np.ndarray  # digests of all that each says
    contexts: np.ndarray
    answers: np.ndarray
    answer_words: np.ndarray
    lengths: np.ndarray  # tokens


class Survey:
    """Collects what ``RowFacts`` has."""

    def __init__(self, folder: Path) -> None:
        self.shingles = ShingleFile(folder)
        self.languages = LanguageSample()
        self.cut: list[int] = []  # rows whose answer stops inside a sentence
        self.sentences = 0  # answers that end as sentences do
        self._files, self._lines, self._lengths = array("I"), array("I"), array("I")
        self._questions, self._asked, self._exact, self._contexts, self._answers = (array("Q") for _ in range(5))
        self._identities = array("Q")
        self._answer_words = array("I")

    def __enter__(self) -> "Survey":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shingles.__exit__(kind, error, trace)

    def __len__(self) -> int:
        return len(self._files)

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Those that can be trained."""
        kept = [(each.line, each.row, len(each.tokens)) for each in reads if each.row and each.tokens is not None]
        for start in range(0, len(kept), AT_ONCE):
            some = kept[start : start + AT_ONCE]
            self._compare([row for _, row, _ in some])
            for line, row, length in some:
                self._files.append(file)
                self._lines.append(line)
                self._lengths.append(length)
                self._contexts.append(_context(row))

    def facts(self) -> RowFacts:
        """Of all rows so far."""
        by_context = self._by_context()
        return RowFacts(
            files=np.array(self._files),
            lines=np.array(self._lines),
            questions=self._counted(self._questions, by_context=by_context),
            asked=self._counted(self._asked, by_context=by_context),
            exact=np.array(self._exact),
            identities=np.array(self._identities),
            contexts=np.array(self._contexts),
            answers=np.array(self._answers),
            answer_words=np.array(self._answer_words),
            lengths=np.array(self._lengths),
        )

    def likeness(self, similarity: float, sides: np.ndarray) -> Likeness:
        """Compare the questions of all rows; ``sides``: a number for each split that a file is given for, by file."""
        by_context = self._by_context()
        questions = self._counted(self._questions, by_context=by_context)
        _, firsts, groups = np.unique(questions, return_index=True, return_inverse=True)
        order = np.argsort(firsts, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        groups, firsts = number[groups], firsts[order]
        if similarity < 1 and not by_context:
            near = find(self.shingles, firsts, similarity, sides[np.array(self._files)])
        else:  # only the same words in the same order count
            near = NearPairs(np.zeros((0, 2), dtype=np.int64), True)
        pairs = np.searchsorted(firsts, near.pairs)
        together = clusters(len(firsts), pairs)[groups]
        return Likeness(groups, pairs, together, near.complete, len(firsts), by_context)

    def _by_context(self) -> bool:
        """Whether the questions are too few to split by, and those with what stands before them are more."""
        count = len(np.unique(np.array(self._questions)))
        if count >= MIN_GROUPS:
            return False
        return len(np.unique(self._counted(self._questions, by_context=True))) > count

    def _counted(self, numbers: Sequence[int], *, by_context: bool) -> np.ndarray:
        """(rows,) of what rows ask, with their contexts where these count."""
        asked = np.array(numbers, dtype=np.uint64)
        return mixed(asked + mixed(np.array(self._contexts, dtype=np.uint64))) if by_context else asked

    def _compare(self, rows: list[Row]) -> None:
        asked, answers = [asked_text(row) for row in rows], [answer_text(row) for row in rows]
        words = words_of([question or answer for question, answer in zip(asked, answers, strict=True)])
        self.shingles.add(words)
        for row, digest, question, answer in zip(rows, digests(words).tolist(), asked, answers, strict=True):
            number = digest or plain_digest(question or answer)
            said = answer.casefold().split()
            answered = plain_digest(" ".join(said).rstrip(".!")) if said and row.format != "text" else 0
            self._questions.append(number)
            self._asked.append(strict_digest(question or answer))
            self._exact.append(plain_digest(_all_but_answers(row) if question else row.identity()))
            self._identities.append(plain_digest(_identity(row)))
            self._answers.append(answered)
            self._answer_words.append(len(said))
            index = len(self._questions) - 1
            self._see_end(index, answer)
            self.languages.add(number ^ answered, index, question, answer)

    def _see_end(self, number: int, answer: str) -> None:
        end = ending(answer)
        if end == CUT:
            self.cut.append(number)
        elif end == SENTENCE:
            self.sentences += 1


def asked_text(row: Row) -> str:
    """What people ask in a row, all of a bare text; empty where nobody does: such a row counts by its answer."""
    if row.format == "text":
        return row.text
    asked = "\n".join([message.content for message in row.messages if message.role == "user"])
    return "" if asked.isspace() else asked


def _all_but_answers(row: Row) -> str:
    """Equal for rows that ask the very same."""
    return row.text or "\0".join([message.content for message in row.messages if message.role != "assistant"])


def _identity(row: Row) -> str:
    """Equal for rows that say the same. Most are plain chats, for which no JSON is needed."""
    if row.tools or any(message.details or not message.trained for message in row.messages):
        return row.identity()
    return "\0".join([row.format, row.text, *(f"{message.role}\1{message.content}" for message in row.messages)])


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
