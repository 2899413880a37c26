"""What is remembered of every row while rows are read, so that they can be compared when all are known.

It takes some 70 bytes a row, and 4 for each run of words of its question.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.words import digests, mixed, plain_digest, strict_digest, words_of
from safetrain.data.containers import Place
from safetrain.data.messages import Message
from safetrain.data.near_copies import NearCopies, Shingles
from safetrain.data.rows import Row
from safetrain.data.tokenize import ReadRow

AT_ONCE = 256  # rows whose words are found at a time: what that takes stays in the processor's cache
FEW_QUESTIONS = 3  # fewer different questions cannot be split
NUMBERS = {
    "files": "I",
    "lines": "I",
    "table_rows": "I",  # where they are counted; else 0
    "identities": "Q",  # digests of all that a row says
    "questions": "Q",  # digests of normalised words
    "asked": "Q",  # stricter digests, for which signs of code and mathematics count
    "exact": "Q",  # digests of the very text
    "contexts": "Q",  # of what stands before an answer besides questions
    "answers": "Q",  # 0 where there is none
    "answer_words": "I",
}


@dataclass(frozen=True)
class DuplicateGroups:
    """Which rows have a question in the same words, and which nearly. A row stands for those like it after it.

    ``by_context``: the questions are so few that each counts with its system text and what else stands before it.
    """

    groups: np.ndarray  # (rows,) the first row that asks in the same words
    pairs: np.ndarray  # (pairs, 2) of such first rows that are near copies
    clusters: np.ndarray  # (rows,) the first row that is connected to it by these
    left_out: str  # why not all were compared; empty where all were
    by_context: bool


class RowFacts:
    """Collects what is known of each row that can be trained."""

    def __init__(self) -> None:
        self._numbers = {name: array(kind) for name, kind in NUMBERS.items()}
        self._shingles = Shingles()

    def __len__(self) -> int:
        return len(self._numbers["files"])

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Add those rows of a file that can be trained."""
        kept = [(each.place, each.row) for each in reads if each.row is not None and each.tokens is not None]
        for start in range(0, len(kept), AT_ONCE):
            places, rows = zip(*kept[start : start + AT_ONCE], strict=True)
            self._add(places, rows, file)

    def column(self, name: str) -> np.ndarray:
        """(rows,) one number of each row."""
        numbers = self._numbers[name]
        return np.frombuffer(numbers, dtype=np.dtype(f"u{numbers.itemsize}")) if len(numbers) else np.zeros(0, "u8")

    def place(self, row: int) -> Place:
        """Where a row stands in its file."""
        return Place(self._numbers["lines"][row], self._numbers["table_rows"][row])

    def keys(self, name: str, *, in_context: bool = False) -> np.ndarray:
        """(rows,) what rows ask ("questions", "asked" or "exact"), perhaps with what stands before the answer."""
        return mixed(self.column(name) + mixed(self.column("contexts"))) if in_context else self.column(name)

    def likeness(self, similarity: float, sides: np.ndarray) -> DuplicateGroups:
        """Compare the questions of all rows; ``sides`` (rows,) is a number for each split that a file is given for."""
        different = len(np.unique(self.column("questions")))
        by_context = different < FEW_QUESTIONS and len(np.unique(self.keys("questions", in_context=True))) > different
        groups = first_alike(self.keys("questions", in_context=by_context))
        firsts = np.flatnonzero(groups == np.arange(len(self)))
        near = NearCopies(np.arange(len(firsts)), np.zeros((0, 2), dtype=np.int64))
        if similarity < 1 and not by_context:  # else only the same words in the same order count
            near = self._shingles.find(firsts, similarity, sides)
        of_first = np.arange(len(self))
        of_first[firsts] = firsts[near.clusters]
        return DuplicateGroups(groups, firsts[near.pairs], of_first[groups], near.left_out, by_context)

    def _add(self, places: Sequence[Place], rows: Sequence[Row], file: int) -> None:
        asked, answers = [asked_text(row) for row in rows], [_answer_text(row) for row in rows]
        said = [question or answer for question, answer in zip(asked, answers, strict=True)]
        words = words_of(said)
        self._shingles.add(words)
        replies = [answer.casefold().split() for answer in answers]
        columns: dict[str, list[int]] = {
            "files": [file] * len(rows),
            "lines": [place.line for place in places],
            "table_rows": [place.row for place in places],
            "identities": [plain_digest(row.identity()) for row in rows],
            "questions": [
                digest or plain_digest(text) for digest, text in zip(digests(words).tolist(), said, strict=True)
            ],
            "asked": [strict_digest(text) for text in said],
            "exact": [
                plain_digest(_all_but_answers(row) if question else row.identity())
                for row, question in zip(rows, asked, strict=True)
            ],
            "contexts": [_context(row) for row in rows],
            "answers": [
                plain_digest(" ".join(reply).rstrip(".!")) if reply and row.format != "text" else 0
                for row, reply in zip(rows, replies, strict=True)
            ],
            "answer_words": [len(reply) for reply in replies],
        }
        for name, values in columns.items():
            self._numbers[name].extend(values)


def first_alike(keys: np.ndarray) -> np.ndarray:
    """(rows,) the first row with the same key as each."""
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    found: np.ndarray = firsts[places]
    return found


def asked_text(row: Row) -> str:
    """What the user asks in a row, all of a bare text; empty where no one does: such a row counts by its answer."""
    if row.format == "text":
        return row.text
    asked = "\n".join([message.content for message in row.messages if message.role == "user"])
    return "" if asked.isspace() else asked


def _all_but_answers(row: Row) -> str:
    """Equal for rows that ask the very same."""
    return row.text or "\0".join([message.content for message in row.messages if message.role != "assistant"])


def _answer_text(row: Row) -> str:
    """The last answer, its tool calls as JSON; the whole of a bare text."""
    if row.format == "text":
        return row.text
    last = _last_answer(row)
    return f"{last.content}\n{last.details}" if last.details else last.content


def _last_answer(row: Row) -> Message:
    return next(message for message in reversed(row.messages) if message.role == "assistant")


def _context(row: Row) -> int:
    """A digest of what an answer depends on besides what the user asks; 0 where there is nothing."""
    if len(row.messages) == 2 and row.messages[0].role == "user":  # as most are
        return 0
    last = _last_answer(row) if row.messages else None
    parts = [message.content for message in row.messages if message.role != "user" and message is not last]
    return plain_digest("\0".join([*parts, row.tools])) if parts or row.tools else 0
