"""What is remembered of every row, and what all rows show together: leaks between splits, copies, other answers.

It takes some 70 bytes a row, and 4 for each run of words of its question.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.words import Words, folded, hashed, mixed, words_of
from safetrain.core.formatting import counted
from safetrain.data.containers import Place
from safetrain.data.findings import Findings, Spot
from safetrain.data.folders import SPLITS
from safetrain.data.near_copies import Shingles
from safetrain.data.rows import Row
from safetrain.data.split import MIN_GROUPS, TEST, TRAIN, VALID
from safetrain.data.tokenize import ReadRow

FEW_QUESTIONS = MIN_GROUPS
TEXT_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
NUMBERS = np.dtype([  # of a row
    ("files", "u4"),
    ("lines", "u4"),
    ("table_rows", "u4"),  # where they are counted; else 0
    ("identities", "u8"),  # a digest of all that it says
    ("questions", "u8"),  # of normalised words
    ("asked", "u8"),  # of the text without case, white space and a final mark: other code is another question
    ("contexts", "u8"),  # of what comes before the answer besides questions
    ("answers", "u8"),  # 0 where there is none
    ("answer_words", "u4"),
])  # fmt: skip
LATER_SPLITS = ((TEST, TRAIN), (VALID, TRAIN), (TEST, VALID))
LONG_ANSWER, SAME_SHARE, LEAST_SAME = 6, 0.05, 20  # words; of all rows; rows


@dataclass(frozen=True)
class DuplicateGroups:
    """Which rows have a question in the same words, and which nearly: (rows,) the first row of each group or cluster.

    ``left_out``: why not all were compared. ``by_context``: the questions are so few that each counts with its system
    text and what else comes before it.
    """

    groups: np.ndarray
    clusters: np.ndarray
    left_out: str
    by_context: bool


class RowFacts:
    """Collects what is known of each row that can be trained."""

    def __init__(self) -> None:
        self._numbers, self._shingles = bytearray(), Shingles()

    def __len__(self) -> int:
        return len(self._numbers) // NUMBERS.itemsize

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Add those rows of a file that can be trained."""
        kept = [(each.place, each.row) for each in reads if each.row is not None and each.tokens is not None]
        texts = [asked_text(row) or _answer_text(row) for _, row in kept]
        words = words_of(texts)
        self._shingles.add(words)
        numbers = [
            (file, *place, plain_digest(row.identity()), own or plain_digest(text), strict_digest(text),
             _context(row), *_answer(row))
            for (place, row), text, own in zip(kept, texts, digests(words).tolist(), strict=True)
        ]  # fmt: skip
        self._numbers += np.array(numbers, dtype=NUMBERS).tobytes()

    def column(self, name: str) -> np.ndarray:
        """(rows,) one number of each row."""
        return np.frombuffer(self._numbers, dtype=NUMBERS)[name]

    def place(self, row: int) -> Place:
        """Where a row is in its file."""
        return Place(int(self.column("lines")[row]), int(self.column("table_rows")[row]))

    def keys(self, name: str, *, in_context: bool = False) -> np.ndarray:
        """(rows,) what rows ask ("questions" or "asked"), perhaps with what comes before the answer."""
        return mixed(self.column(name) + mixed(self.column("contexts"))) if in_context else self.column(name)

    def likeness(self, similarity: float) -> DuplicateGroups:
        """Compare the questions of all rows; with a ``similarity`` of 1 only the same words in the same order count."""
        different = len(np.unique(self.column("questions")))
        by_context = different < FEW_QUESTIONS and len(np.unique(self.keys("questions", in_context=True))) > different
        groups = first_alike(self.keys("questions", in_context=by_context))
        if similarity == 1 or by_context:
            return DuplicateGroups(groups, groups, "", by_context)
        clusters, left_out = self._shingles.clusters(similarity)
        return DuplicateGroups(groups, clusters[groups], left_out, by_context)


@dataclass(frozen=True)
class Whole:
    """All rows, with what is known of them. ``parts`` (rows,) are indices into SPLITS, ``names`` those of the files."""

    facts: RowFacts
    likeness: DuplicateGroups
    parts: np.ndarray
    names: Sequence[str]

    def tell(
        self, findings: Findings, identifier: str, rows: np.ndarray, partners: np.ndarray, detail: str = ""
    ) -> None:
        """Add a finding of some rows, each with the row that it is compared with, if that is another."""
        most = findings.most_places
        pairs = zip(rows[:most].tolist(), partners[:most].tolist(), strict=True)
        spots = [self._spot(row, None if other == row else self._spot(other)) for row, other in pairs]
        if len(rows):
            findings.add(identifier, detail, len(rows), spots)

    def _spot(self, row: int, beside: Spot | None = None) -> Spot:
        return Spot(self.names[int(self.facts.column("files")[row])], self.facts.place(row), beside)


def compare(findings: Findings, whole: Whole) -> None:
    """Make every check that needs all rows."""
    train = np.flatnonzero(whole.parts == TRAIN)
    firsts = train[first_alike(whole.facts.column("identities")[train])]
    whole.tell(findings, "REPEATED-ROWS", train[firsts != train], firsts[firsts != train])
    _overlaps(findings, whole)
    groups, clusters = whole.likeness.groups[train], whole.likeness.clusters[train]
    firsts = first_alike(clusters)  # the first of each cluster is the one to keep
    near = groups != groups[firsts]
    if whole.likeness.left_out:
        findings.add("NEAR-COPIES", f"; {whole.likeness.left_out}", 0)
    whole.tell(findings, "NEAR-COPIES", train[near], train[firsts[near]])
    _answers(findings, whole)


def _overlaps(findings: Findings, whole: Whole) -> None:
    """Rows of a later split with a question of an earlier one, and with nearly one."""
    in_context = whole.facts.keys("asked", in_context=True)
    asked = in_context if whole.likeness.by_context else whole.facts.keys("asked")
    for later, earlier in LATER_SPLITS:
        rows, known = (np.flatnonzero(whole.parts == part) for part in (later, earlier))
        detail = f"the question of a row of {SPLITS[earlier]}"
        checks = [
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with {detail}", asked),
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with nearly {detail}", whole.likeness.clusters),
        ]
        if (later, earlier) == (TEST, TRAIN):
            checks.insert(0, ("QUESTION-IN-TEST", "", in_context))
        for identifier, said, keys in checks:
            alike = np.isin(keys[rows], keys[known])
            whole.tell(findings, identifier, rows[alike], _partners(keys, rows[alike], known), said)
            rows = rows[~alike]


def _answers(findings: Findings, whole: Whole) -> None:
    """Questions with several answers, and answers to many questions."""
    keys = whole.facts.column("answers")
    rows = np.flatnonzero(keys)
    firsts = rows[first_alike(whole.facts.keys("asked", in_context=True)[rows])]
    differ = keys[rows] != keys[firsts]
    whole.tell(findings, "ANSWERS-DIFFER", rows[differ], firsts[differ])
    long = rows[whole.facts.column("answer_words")[rows] >= LONG_ANSWER]
    _, places, counts = np.unique(keys[long], return_inverse=True, return_counts=True)
    many = counts >= max(LEAST_SAME, SAME_SHARE * len(rows))
    same = long[many[places]]
    detail = f"{counted(int(many.sum()), 'answer')} ({100 * len(same) // max(1, len(rows))} % of all rows)"
    whole.tell(findings, "ANSWER-DOMINATES", same, same, detail)


def _partners(keys: np.ndarray, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
    """For each of ``rows`` the first of the ``known`` rows with the same key; each has one."""
    values, firsts = np.unique(keys[known], return_index=True)
    found: np.ndarray = known[firsts[np.searchsorted(values, keys[rows])]]
    return found


def first_alike(keys: np.ndarray) -> np.ndarray:
    """(rows,) the first row with the same key as each."""
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    found: np.ndarray = firsts[places]
    return found


def digests(words: Words) -> np.ndarray:
    """(texts,) one number for all words of each text, in order; 0 where there are none."""
    found = np.zeros(len(words.counts), dtype=np.uint64)
    some = words.counts > 0
    found[some] = hashed(words.hashes, words.bounds[:-1][some], TEXT_BASE) | np.uint64(1)
    return found


def plain_digest(text: str) -> int:
    """A number that equal texts share. Even, as no digest of words is."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") & ~1


def strict_digest(text: str) -> int:
    """A number that texts share which differ only in case, white space and the mark at the end."""
    return plain_digest(" ".join(folded(text).split()).rstrip(" .?!…。？！") or text)


def asked_text(row: Row) -> str:
    """What the user asks in a row, all of a bare text; empty where no one does: such a row counts by its answer."""
    asked = "\n".join([message.content for message in row.messages if message.role == "user"])
    return row.text or ("" if asked.isspace() else asked)


def _answer_text(row: Row) -> str:
    """The last answer, its tool calls as JSON; empty for a bare text."""
    for message in reversed(row.messages):
        if message.role == "assistant":
            return f"{message.content}\n{message.details}" if message.details else message.content
    return ""


def _answer(row: Row) -> tuple[int, int]:
    """A digest of the last answer without case, white space and a final mark, 0 for none; and how many words it has."""
    words = _answer_text(row).casefold().split()
    return plain_digest(" ".join(words).rstrip(".!")) if words else 0, len(words)


def _context(row: Row) -> int:
    """A digest of what an answer depends on besides what the user asks; 0 where there is nothing."""
    places = range(len(row.messages))
    last = max((place for place in places if row.messages[place].role == "assistant"), default=0)
    parts = [row.messages[place].content for place in places if row.messages[place].role != "user" and place != last]
    return plain_digest("\0".join([*parts, row.tools])) if parts or row.tools else 0
