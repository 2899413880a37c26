"""What is remembered of every row, and what all rows show together: leaks between splits, copies, other answers.

It takes some 70 bytes a row, and 4 for each run of words of its question. Questions are nearly the same where their
runs of five words overlap by a given share. Two sets that are similar by Jaccard's measure share one of their first few
members, whatever the order of members is: with a similarity of 0.8 one of the first fifth. With the rarest first, texts
that share one of these are candidates. Each pair of candidates is compared in full, unless both are known to be in one
cluster: so clusters of near copies are exact.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.words import Words, folded, hashed, mixed, words_of
from safetrain.core.formatting import counted
from safetrain.data.findings import Findings, Spot
from safetrain.data.folders import SPLITS
from safetrain.data.json_rows import Place
from safetrain.data.rows import Row
from safetrain.data.split import TEST, TRAIN, VALID
from safetrain.data.tokenize import ReadRow

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
SHINGLE_WORDS = 5
SHINGLE_BASE = np.uint64(0x165667B19E3779F9)
MOST_TEXTS = 2_000_000  # beyond it only equal texts are found
MOST_CANDIDATES = 20_000_000  # pairs that are compared
COUNTER_BITS = 22
BLOCK = 2**20  # runs, or candidates, that are looked at together
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)
LONG_ANSWER, SAME_SHARE, LEAST_SAME = 6, 0.05, 20  # words; of all rows; rows


@dataclass(frozen=True)
class DuplicateGroups:
    """Which rows have a question in the same words, and which nearly: (rows,) the first row of each group or cluster.

    ``left_out``: why not all were compared.
    """

    groups: np.ndarray
    clusters: np.ndarray
    left_out: str


class RowFacts:
    """Collects what is known of each row that can be trained."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names`` of the files."""
        self._names, self._numbers, self._shingles = names, bytearray(), Shingles()

    def __len__(self) -> int:
        return len(self._numbers) // NUMBERS.itemsize

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        """Add those rows of a file that can be trained."""
        trainable = [(each.spot.place, each.row) for each in reads if each.row is not None and each.tokens is not None]
        texts = [asked_text(row) or _answer_text(row) for _, row in trainable]
        words = words_of(texts)
        self._shingles.add(words)
        numbers = [
            (file, *place, plain_digest(row.identity()), own or plain_digest(text), strict_digest(text),
             _context(row), *_answer(row))
            for (place, row), text, own in zip(trainable, texts, digests(words).tolist(), strict=True)
        ]  # fmt: skip
        self._numbers += np.array(numbers, dtype=NUMBERS).tobytes()

    def column(self, name: str) -> np.ndarray:
        """(rows,) one number of each row."""
        return np.frombuffer(self._numbers, dtype=NUMBERS)[name]

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
        file, line, table_row = (int(self.column(name)[row]) for name in ("files", "lines", "table_rows"))
        return Spot(self._names[file], Place(line, table_row), beside)

    def asked_in_context(self) -> np.ndarray:
        """(rows,) what rows ask, with what comes before the answer."""
        return mixed(self.column("asked") + mixed(self.column("contexts")))

    def likeness(self, similarity: float) -> DuplicateGroups:
        """Compare the questions of all rows; with a ``similarity`` of 1 only the same words in the same order count."""
        groups = first_alike(self.column("questions"))
        if similarity == 1:
            return DuplicateGroups(groups, groups, "")
        clusters, left_out = self._shingles.clusters(similarity)
        return DuplicateGroups(groups, clusters[groups], left_out)


def compare(findings: Findings, facts: RowFacts, likeness: DuplicateGroups, parts: np.ndarray) -> None:
    """Make every check that needs all rows; ``parts`` (rows,) are indices into SPLITS."""
    train = np.flatnonzero(parts == TRAIN)
    firsts = train[first_alike(facts.column("identities")[train])]
    facts.tell(findings, "REPEATED-ROWS", train[firsts != train], firsts[firsts != train])
    _overlaps(findings, facts, likeness, parts)
    groups, clusters = likeness.groups[train], likeness.clusters[train]
    firsts = first_alike(clusters)  # the first of each cluster is the one to keep
    near = groups != groups[firsts]
    if likeness.left_out:
        findings.add("NEAR-COPIES", f"; {likeness.left_out}", 0)
    facts.tell(findings, "NEAR-COPIES", train[near], train[firsts[near]])
    _answers(findings, facts)


def _overlaps(findings: Findings, facts: RowFacts, likeness: DuplicateGroups, parts: np.ndarray) -> None:
    """Rows of a later split with a question of an earlier one, and with nearly one."""
    in_context, questions = facts.asked_in_context(), facts.column("asked")
    for later, earlier in LATER_SPLITS:
        rows, earlier_rows = (np.flatnonzero(parts == part) for part in (later, earlier))
        detail = f"the question of a row of {SPLITS[earlier]}"
        checks = [
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with {detail}", questions),
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with nearly {detail}", likeness.clusters),
        ]
        if (later, earlier) == (TEST, TRAIN):
            checks.insert(0, ("QUESTION-IN-TEST", "", in_context))
        for identifier, about, keys in checks:
            alike = np.isin(keys[rows], keys[earlier_rows])
            facts.tell(findings, identifier, rows[alike], _partners(keys, rows[alike], earlier_rows), about)
            rows = rows[~alike]


def _answers(findings: Findings, facts: RowFacts) -> None:
    """Questions with several answers, and answers to many questions."""
    keys = facts.column("answers")
    rows = np.flatnonzero(keys)
    firsts = rows[first_alike(facts.asked_in_context()[rows])]
    differ = keys[rows] != keys[firsts]
    facts.tell(findings, "ANSWERS-DIFFER", rows[differ], firsts[differ])
    long = rows[facts.column("answer_words")[rows] >= LONG_ANSWER]
    _, places, counts = np.unique(keys[long], return_inverse=True, return_counts=True)
    many = counts >= max(LEAST_SAME, SAME_SHARE * len(rows))
    same = long[many[places]]
    if len(same):
        detail = f"{counted(int(many.sum()), 'answer')} ({100 * len(same) // len(rows)} % of all rows)"
        facts.tell(findings, "ANSWER-DOMINATES", same, same, detail)


def _partners(keys: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each of ``rows`` the first of the ``others`` rows with the same key; each has one."""
    values, firsts = np.unique(keys[others], return_index=True)
    partners: np.ndarray = others[firsts[np.searchsorted(values, keys[rows])]]
    return partners


def first_alike(keys: np.ndarray) -> np.ndarray:
    """(rows,) the first row with the same key as each."""
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    first_rows: np.ndarray = firsts[places]
    return first_rows


def digests(words: Words) -> np.ndarray:
    """(texts,) one number for all words of each text, in order; 0 where there are none."""
    values = np.zeros(len(words.counts), dtype=np.uint64)
    some = words.counts > 0
    values[some] = hashed(words.hashes, words.bounds[:-1][some], TEXT_BASE) | np.uint64(1)
    return values


def plain_digest(text: str) -> int:
    """A number that equal texts share. Even, as no digest of words is."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") & ~1


def strict_digest(text: str) -> int:
    """A number that texts share which differ only in case, white space and the mark at the end."""
    return plain_digest(" ".join(folded(text).split()).rstrip(" .?!…。？！") or text)


def asked_text(row: Row) -> str:
    """What the user asks in a row, all of a bare text; empty where no one does: such a row counts by its answer."""
    question = "\n".join([message.content for message in row.messages if message.role == "user"])
    return row.text or ("" if question.isspace() else question)


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


# Near copies


class Shingles:
    """The different runs of five words of each text."""

    def __init__(self) -> None:
        self._values, self._ends = array("I"), array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, words: Words) -> None:
        """Add the next texts."""
        if len(self) > MOST_TEXTS:
            self._values = array("I")  # they are not compared
            return
        values, bounds = shingles(words)
        begin = self._ends[-1]
        self._values.frombytes(values.astype("<u4").tobytes())
        self._ends.extend((begin + bounds[1:]).tolist())

    def clusters(self, similarity: float) -> tuple[np.ndarray, str]:
        """(texts,) the first text that each is connected to by near copies; and why not all were compared, or ""."""
        if len(self) > MOST_TEXTS:
            return np.arange(len(self)), f"more than {MOST_TEXTS:,} rows: only equal questions were compared"
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        return _CandidateSearch(np.frombuffer(self._values, dtype=np.uint32), ends, similarity).run()


def shingles(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The different runs of each text, as sorted numbers of 32 bits, and (texts + 1,) where they begin.

    A text of fewer words is one run.
    """
    counts = words.counts
    runs = np.where(counts > 0, np.maximum(counts - SHINGLE_WORDS + 1, 1), 0)
    of_text = np.repeat(np.arange(len(counts)), runs)
    first = _inside(runs) + np.repeat(words.bounds[:-1], runs)
    last = np.repeat(words.bounds[1:], runs)
    sums = np.zeros(len(first), dtype=np.uint64)
    padded = np.concatenate([words.hashes, np.zeros(SHINGLE_WORDS, dtype=np.uint64)])
    for place, power in enumerate(SHINGLE_BASE ** np.arange(SHINGLE_WORDS, dtype=np.uint64)):
        sums += np.where(first + place < last, padded[first + place] * power, np.uint64(0))
    numbered = np.unique((of_text.astype(np.uint64) << HALF) | (mixed(sums) >> HALF))
    bounds = np.searchsorted(numbered, np.arange(len(counts) + 1, dtype=np.uint64) << HALF)
    return numbered.astype(np.uint32), bounds


class _CandidateSearch:
    def __init__(self, values: np.ndarray, ends: np.ndarray, similarity: float) -> None:
        self._values, self._starts, self._sizes, self._similarity = values, ends[:-1], np.diff(ends), similarity
        self._labels = np.arange(len(ends) - 1)

    def run(self) -> tuple[np.ndarray, str]:
        """Compare candidates: first those next to each other in the list of a run, then the next but one, …"""
        codes = np.sort(np.concatenate([np.zeros(0, dtype=np.uint64), *self._prefixes()]))
        runs, texts = codes >> HALF, (codes & LOW).astype(np.int64)
        _, firsts, sizes = np.unique(runs, return_index=True, return_counts=True)  # the list of each run
        ends = np.repeat(firsts + sizes, sizes)
        budget, at, distance = MOST_CANDIDATES, np.arange(len(codes)), 0
        while len(at):
            distance += 1
            at = at[at + distance < ends[at]]
            for some in np.array_split(at, len(at) // BLOCK + 1):
                budget -= self._compare(texts[some], texts[some + distance])
            if budget <= 0:
                return self._labels, f"more than {MOST_CANDIDATES:,} pairs of questions resemble each other"
            if distance.bit_count() == 1:  # a large family is soon one cluster: its lists need no more comparison
                own = self._labels[texts]
                several = np.minimum.reduceat(own, firsts) != np.maximum.reduceat(own, firsts)
                at = at[np.repeat(several, sizes)[at]]
        return self._labels, ""

    def _prefixes(self) -> Iterator[np.ndarray]:
        """Codes of (run, text) for the first runs of each text, the rarest being first."""
        mask = np.uint32(2**COUNTER_BITS - 1)
        frequency = np.zeros(2**COUNTER_BITS, dtype=np.int64)
        for start in range(0, len(self._values), BLOCK):
            frequency += np.bincount(self._values[start : start + BLOCK] & mask, minlength=len(frequency))
        for batch in _batches(self._sizes):
            sizes = self._sizes[batch]
            values, of_text = self._runs(np.arange(batch.start, batch.stop))
            prefix_sizes = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9).astype(np.int64) + 1, 0)
            order = np.lexsort((frequency[values & mask], of_text))  # stable: of equally rare ones the smaller number
            order = order[_inside(sizes) < prefix_sizes[of_text]]
            yield (values[order].astype(np.uint64) << HALF) | (of_text[order] + batch.start).astype(np.uint64)

    def _runs(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs of some texts, and which of the texts each is of."""
        sizes = self._sizes[texts]
        places = np.repeat(self._starts[texts], sizes) + _inside(sizes)
        return self._values[places], np.repeat(np.arange(len(texts)), sizes)

    def _compare(self, first: np.ndarray, second: np.ndarray) -> int:
        """Compare pairs of two clusters, and give near copies one label; returns how many were compared."""
        sizes = self._sizes[first], self._sizes[second]
        open_pairs = self._labels[first] != self._labels[second]
        open_pairs &= np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
        codes = np.unique((first[open_pairs].astype(np.uint64) << HALF) | second[open_pairs].astype(np.uint64))
        first, second = (codes >> HALF).astype(np.int64), (codes & LOW).astype(np.int64)
        for batch in _batches(self._sizes[first] + self._sizes[second]):
            near = self._are_near(first[batch], second[batch])
            self._connect(first[batch][near], second[batch][near])
        return len(codes)

    def _are_near(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        (values, pair), (others, other_pair) = self._runs(first), self._runs(second)
        keys = np.concatenate([pair, other_pair]).astype(np.uint64) << HALF | np.concatenate([values, others])
        keys.sort()
        twice = keys[1:][keys[1:] == keys[:-1]] >> HALF
        common = np.bincount(twice.astype(np.int64), minlength=len(first))
        together = self._sizes[first] + self._sizes[second]
        near: np.ndarray = common * (1 + self._similarity) >= self._similarity * together - 1e-9
        return near

    def _connect(self, first: np.ndarray, second: np.ndarray) -> None:
        """Give the clusters of each pair the smaller of their two labels, which is that of their first text."""
        while not np.array_equal(one := self._labels[first], other := self._labels[second]):
            np.minimum.at(self._labels, np.maximum(one, other), np.minimum(one, other))
            while not np.array_equal(self._labels, further := self._labels[self._labels]):
                self._labels = further


def _batches(sizes: np.ndarray) -> Iterator[slice]:
    """Neighbours whose sizes are about BLOCK together."""
    ends, start = np.cumsum(sizes), 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
        yield slice(start, stop)
        start = stop


def _inside(sizes: np.ndarray) -> np.ndarray:
    """Numbers from 0 in each of some groups of these sizes, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
