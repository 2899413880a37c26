"""Checks that need all rows: leaks between splits, near-duplicates, and questions with different answers.

A row takes about 80 bytes of memory, and 4 more for each run of five words in its question. Two questions are
near-duplicates if the Jaccard similarity of their runs reaches a threshold. Runs that many questions have are an
instruction and do not count: they would make one cluster of all rows with it. Two sets with a similarity of 0.8 share
a member among the first fifth of each, in any fixed order of members. So the search sorts the rarest runs first; texts
that share one of these are candidates. It compares each pair of candidates in full, unless both are in one cluster
already, so the clusters are exact.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.formatting import counted
from safetrain.core.text.words import RUN_WORDS, Words, folded, hashed, mixed, runs_of, words_of
from safetrain.data.checks import cut_answers, ending
from safetrain.data.findings import Findings, Place, Spot
from safetrain.data.folders import SPLITS
from safetrain.data.rows import Row
from safetrain.data.split import TEST, TRAIN, VALID
from safetrain.data.tokenize import ReadRow

TEXT_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
NUMBERS = np.dtype([  # one record for each row
    ("files", "u4"),
    ("lines", "u4"),
    ("table_rows", "u4"),  # 0 if the format has only lines
    ("identities", "u8"),  # digest of the whole row
    ("questions", "u8"),  # digest of normalised words
    ("asked", "u8"),  # digest without case, white space and a final mark: code that differs is a different question
    ("contexts", "u8"),  # digest of system prompt, tools and earlier answers
    ("answers", "u8"),  # 0 if there is no answer
    ("answer_words", "u4"),
    ("answer_letters", "u4"),
    ("endings", "u1"),
    ("rejected", "u8"),  # the rejected answer of a pair, or 0
])  # fmt: skip
COMMON_SHARE, LEAST_COMMON = 0.02, 20  # of all different texts, and in texts: a run that so many have is common
MOST_TEXTS = 2_000_000  # with more, only exact duplicates are found
MOST_CANDIDATES = 20_000_000  # the most pairs to compare
COUNTERS = 2**22  # several runs share one
MASK = np.uint32(COUNTERS - 1)
BLOCK = 2**20  # runs, or candidates, that are processed together
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)
LONG_ANSWER, SAME_SHARE, LEAST_SAME = 6, 0.05, 20  # in words; a share of all rows; in rows


class RowFacts:
    """Collects the digests and the place of each row that can be trained on, and finds duplicate questions.

    ``groups`` and ``clusters`` have shape (rows,): the index of the first row with the same question as each row, and
    of the first row in its cluster of near-duplicates.
    """

    def __init__(self, files: Sequence[Path], findings: Findings) -> None:
        self._files, self._numbers, self._shingles, self.findings = files, bytearray(), Shingles(), findings
        self.groups = self.clusters = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers) // NUMBERS.itemsize

    def add(self, reads: Sequence[ReadRow], file: int) -> None:
        trainable = [
            (each.spot.place, each.row) for each in reads
            if each.row is not None and each.tokens is not None and not each.row.is_rejected
        ]  # fmt: skip
        texts = [_compared_text(row) for _, row in trainable]
        words = words_of(texts)
        self._shingles.add(words)
        numbers = [
            (file, *place, plain_digest(row.identity()), own or plain_digest(text), strict_digest(text),
             _context(row), *_answer(row), _answer(row.divided()[1])[0] if row.rejected else 0)
            for (place, row), text, own in zip(trainable, texts, digests(words).tolist(), strict=True)
        ]  # fmt: skip
        self._numbers += np.array(numbers, dtype=NUMBERS).tobytes()

    def column(self, name: str) -> np.ndarray:
        """Return one column of NUMBERS, with shape (rows,)."""
        return np.frombuffer(self._numbers, dtype=NUMBERS)[name]

    def tell(self, identifier: str, rows: np.ndarray, partners: np.ndarray, detail: str = "") -> None:
        """Add a finding about ``rows``; ``partners`` are the rows that they match, or ``rows`` if there are none."""
        most = self.findings.most_places
        pairs = zip(rows[:most].tolist(), partners[:most].tolist(), strict=True)
        spots = [self._spot(row, None if other == row else self._spot(other)) for row, other in pairs]
        if len(rows):
            self.findings.add(identifier, detail, len(rows), spots)

    def _spot(self, row: int, beside: Spot | None = None) -> Spot:
        file, *place = np.frombuffer(self._numbers, dtype=NUMBERS)[row].tolist()[:3]
        return Spot(str(self._files[file]), Place(*place), beside)

    def asked_in_context(self) -> np.ndarray:
        """Hash each row's question together with its context; returns shape (rows,)."""
        return mixed(self.column("asked") + mixed(self.column("contexts")))

    def find_duplicates(self, similarity: float) -> None:
        """Find duplicate questions; a ``similarity`` of 1 finds only those with the same words in the same order."""
        self.groups = self.clusters = first_alike(self.column("questions"))
        if similarity < 1:
            clusters, left_out = self._shingles.clusters(similarity, self.groups)
            self.clusters = clusters[self.groups]
            if left_out:
                self.findings.add("NEAR-COPIES", f"; {left_out}", 0)


def compare(facts: RowFacts, parts: np.ndarray) -> None:
    """Run every check that needs all rows; ``parts`` (rows,): the split of each row, as an index into SPLITS."""
    train = np.flatnonzero(parts == TRAIN)
    firsts = train[first_alike(facts.column("identities")[train])]
    facts.tell("REPEATED-ROWS", train[firsts != train], firsts[firsts != train])
    facts.tell("ANSWERS-CUT", cut := cut_answers(facts.column("endings"), facts.column("answer_letters")), cut)
    _overlaps(facts, parts)
    groups, clusters = facts.groups[train], facts.clusters[train]
    firsts = first_alike(clusters)  # the first row of a cluster is not a copy
    near = groups != groups[firsts]
    facts.tell("NEAR-COPIES", train[near], train[firsts[near]])
    if facts.column("rejected").any():
        _opposed(facts)  # several pairs for a question are usual
    else:
        _answers(facts)


def _overlaps(facts: RowFacts, parts: np.ndarray) -> None:
    """Find rows whose question, or nearly the same one, also occurs in an earlier split."""
    for later, earlier in ((TEST, TRAIN), (VALID, TRAIN), (TEST, VALID)):
        rows, earlier_rows = (np.flatnonzero(parts == part) for part in (later, earlier))
        detail = f"question as a row in {SPLITS[earlier]}"
        checks = [
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with the same {detail}", facts.column("asked")),
            ("SPLITS-OVERLAP", f"{SPLITS[later]} with nearly the same {detail}", facts.clusters),
        ]
        if (later, earlier) == (TEST, TRAIN):
            checks.insert(0, ("QUESTION-IN-TEST", "", facts.asked_in_context()))
        for identifier, about, keys in checks:
            firsts = first_alike(keys[np.concatenate([earlier_rows, rows])])[len(earlier_rows) :]
            alike = firsts < len(earlier_rows)
            facts.tell(identifier, rows[alike], earlier_rows[firsts[alike]], about)
            rows = rows[~alike]


def _answers(facts: RowFacts) -> None:
    """Find questions with several answers, and answers that many questions share."""
    keys = facts.column("answers")
    rows = np.flatnonzero(keys)
    firsts = rows[first_alike(facts.asked_in_context()[rows])]
    differ = keys[rows] != keys[firsts]
    facts.tell("ANSWERS-DIFFER", rows[differ], firsts[differ])
    long = rows[facts.column("answer_words")[rows] >= LONG_ANSWER]
    _, places, counts = np.unique(keys[long], return_inverse=True, return_counts=True)
    many = counts >= max(LEAST_SAME, SAME_SHARE * len(rows))
    same = long[many[places]]
    if len(same):
        detail = f"{counted(int(many.sum()), 'answer')} ({100 * len(same) // len(rows)} % of all rows)"
        facts.tell("ANSWER-DOMINATES", same, same, detail)


def _opposed(facts: RowFacts) -> None:
    """Find pairs whose answers are in an earlier pair for the same question, preferred the other way round."""
    chosen, rejected = mixed(facts.column("answers")), mixed(facts.column("rejected"))
    asked, rows = facts.asked_in_context(), np.arange(len(facts))
    keys = [mixed(mixed(asked + better) + worse) for better, worse in ((chosen, rejected), (rejected, chosen))]
    firsts = first_alike(np.concatenate(keys))[len(rows) :]
    facts.tell("PAIRS-OPPOSED", rows[firsts < rows], firsts[firsts < rows])


def first_alike(keys: np.ndarray) -> np.ndarray:
    """Find, for each row, the index of the first row with the same key; returns shape (rows,)."""
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    return np.asarray(firsts[places])


def digests(words: Words) -> np.ndarray:
    """Hash each text's words in their order; returns shape (texts,), with 0 for a text without words."""
    values = np.zeros(len(words.counts), dtype=np.uint64)
    some = words.counts > 0
    values[some] = hashed(words.hashes, words.bounds[:-1][some], TEXT_BASE) | np.uint64(1)
    return values


def plain_digest(text: str) -> int:
    """Hash a text. The result is even, so that it never equals a digest of words, which is odd."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") & ~1


def strict_digest(text: str) -> int:
    """Hash a text, ignoring case, white space and the punctuation at its end."""
    return plain_digest(" ".join(folded(text).split()).rstrip(" .?!…。？！") or text)


def _compared_text(row: Row) -> str:
    """The text to compare: all that the user asks in a row, or else its last answer; all of a bare text."""
    question = "\n".join([message.content for message in row.messages if message.role == "user"])
    return row.text or ("" if question.isspace() else question) or _answer_text(row)


def _answer_text(row: Row) -> str:
    """The last answer, its tool calls as JSON; empty for a bare text."""
    for message in reversed(row.messages):
        if message.role == "assistant":
            return f"{message.content}\n{message.details}" if message.details else message.content
    return ""


def _answer(row: Row) -> tuple[int, int, int, int]:
    """Hash the last answer, ignoring case, white space and a final mark (0 without one); its size and its ending."""
    words = (text := _answer_text(row)).casefold().split()
    return plain_digest(" ".join(words).rstrip(".!")) if words else 0, len(words), len(text), ending(text)


def _context(row: Row) -> int:
    """Hash what the answer depends on besides the user's turns: system prompt, tools, earlier answers; 0 if nothing."""
    last = max((place for place, message in enumerate(row.messages) if message.role == "assistant"), default=0)
    parts = [message.content for place, message in enumerate(row.messages) if message.role != "user" and place != last]
    return plain_digest("\0".join([*parts, row.tools])) if parts or row.tools else 0


# Near-duplicates


class Shingles:
    """The runs of five words in each text, in order."""

    def __init__(self) -> None:
        self._values, self._ends = array("I"), array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, words: Words) -> None:
        if len(self) > MOST_TEXTS:
            self._values = array("I")  # too many texts to compare: free the memory
            return
        values, bounds = runs_of(words)
        begin = self._ends[-1]
        self._values.frombytes(values.astype("<u4").tobytes())
        self._ends.extend((begin + bounds[1:]).tolist())

    def clusters(self, similarity: float, groups: np.ndarray) -> tuple[np.ndarray, str]:
        """Return the first text in each text's cluster, (texts,), and the reason if some pairs were not compared.

        ``groups`` (texts,) has the first text with the same words; only these are compared. This uses up the runs.
        """
        if len(self) > MOST_TEXTS:
            return np.arange(len(self)), f"more than {MOST_TEXTS:,} rows: only identical questions were found"
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        sizes = np.where(groups == np.arange(len(self)), np.diff(ends), 0)
        return _CandidateSearch(np.frombuffer(self._values, dtype=np.uint32), ends[:-1], sizes, similarity).run()


class _CandidateSearch:
    """Finds the clusters of texts; ``values`` are all their runs, ``starts`` and ``sizes`` (texts,) those of each."""

    def __init__(self, values: np.ndarray, starts: np.ndarray, sizes: np.ndarray, similarity: float) -> None:
        self._values, self._starts, self._sizes, self._similarity = values, starts, sizes, similarity
        self._labels, self._frequency = np.arange(len(starts)), np.zeros(COUNTERS, dtype=np.int64)
        for start in range(0, len(values), BLOCK):
            self._frequency += np.bincount(values[start : start + BLOCK] & MASK, minlength=COUNTERS)

    def run(self) -> tuple[np.ndarray, str]:
        """Compare candidates: first neighbours in the list of texts that share a run, then texts two apart, etc."""
        self._choose_runs(self._common_runs())
        codes = np.sort(np.concatenate(list(self._prefixes())))
        runs, texts = codes >> HALF, (codes & LOW).astype(np.int64)
        _, firsts, sizes = np.unique(runs, return_index=True, return_counts=True)  # the texts of each run
        ends = np.repeat(firsts + sizes, sizes)
        budget, at, distance = MOST_CANDIDATES, np.arange(len(codes)), 0
        while len(at):
            distance += 1
            at = at[at + distance < ends[at]]
            for some in np.array_split(at, len(at) // BLOCK + 1):
                budget -= self._compare(texts[some], texts[some + distance])
            if budget <= 0:
                return self._labels, f"only {MOST_CANDIDATES:,} pairs of similar questions were compared"
            if distance.bit_count() == 1:  # a large group soon becomes one cluster: no need to compare it further
                own = self._labels[texts]
                at = at[np.repeat(np.minimum.reduceat(own, firsts) != np.maximum.reduceat(own, firsts), sizes)[at]]
        return self._labels, ""

    def _common_runs(self) -> np.ndarray:
        """Find the runs that many texts have, sorted."""
        least = max(LEAST_COMMON, COMMON_SHARE * np.count_nonzero(self._sizes))
        often, found = self._frequency >= least, [(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64))]
        for batch in _batches(self._sizes) if often.any() else ():
            values, of_text = self._runs(np.arange(batch.start, batch.stop))
            kept = often[values & MASK]
            found.append(np.unique(np.unique(_joined(values[kept], of_text[kept])) >> HALF, return_counts=True))
        runs, counts = map(np.concatenate, zip(*found, strict=True))
        there, places = np.unique(runs, return_inverse=True)
        return there[np.bincount(places, counts) >= least].astype(np.uint32)

    def _choose_runs(self, common: np.ndarray) -> None:
        """Replace the runs by those that count, each once in a text and sorted.

        They are the runs without a word of a common run. A text without any is compared by its runs around the common.
        """
        at, sizes = 0, np.zeros_like(self._sizes)
        for batch in _batches(self._sizes):
            values, of_text = self._runs(np.arange(batch.start, batch.stop))
            if len(common):
                is_common = common[np.minimum(np.searchsorted(common, values), len(common) - 1)] == values
                seen, ends = np.concatenate([[0], np.cumsum(is_common)]), np.cumsum(self._sizes[batch])[of_text]
                at_run, starts = np.arange(len(values)), ends - self._sizes[batch][of_text]
                before, after = np.maximum(at_run - RUN_WORDS + 1, starts), np.minimum(at_run + RUN_WORDS, ends)
                is_clear = seen[before] == seen[after]
                has_clear = np.bincount(of_text[is_clear], minlength=batch.stop - batch.start) > 0
                counts = np.where(has_clear[of_text], is_clear, ~is_common)
                values, of_text = values[counts], of_text[counts]
            codes = np.unique(_joined(of_text, values))
            self._values[at : at + len(codes)] = codes.astype(np.uint32)  # in place of runs that were read
            sizes[batch] = np.bincount((codes >> HALF).astype(np.int64), minlength=batch.stop - batch.start)
            at += len(codes)
        self._values, self._starts, self._sizes = self._values[:at], np.cumsum(sizes) - sizes, sizes

    def _prefixes(self) -> Iterator[np.ndarray]:
        """Yield codes of (run, text) for the rarest runs of each text."""
        for batch in _batches(self._sizes):
            sizes = self._sizes[batch]
            values, of_text = self._runs(np.arange(batch.start, batch.stop))
            prefix_sizes = np.where(sizes > 0, sizes - np.ceil(self._similarity * sizes - 1e-9).astype(np.int64) + 1, 0)
            order = np.lexsort((self._frequency[values & MASK], of_text))  # stable: equally rare ones stay sorted
            order = order[_inside(sizes) < prefix_sizes[of_text]]
            yield _joined(values[order], of_text[order] + batch.start)

    def _runs(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs of ``texts``, and the index of the text that each belongs to."""
        sizes = self._sizes[texts]
        places = np.repeat(self._starts[texts], sizes) + _inside(sizes)
        return self._values[places], np.repeat(np.arange(len(texts)), sizes)

    def _compare(self, first: np.ndarray, second: np.ndarray) -> int:
        """Compare the pairs that are in different clusters and join near-duplicates; returns how many it compared."""
        sizes = self._sizes[first], self._sizes[second]
        open_pairs = self._labels[first] != self._labels[second]
        open_pairs &= np.minimum(*sizes) >= self._similarity * np.maximum(*sizes) - 1e-9
        codes = np.unique(_joined(first[open_pairs], second[open_pairs]))
        first, second = (codes >> HALF).astype(np.int64), (codes & LOW).astype(np.int64)
        for batch in _batches(self._sizes[first] + self._sizes[second]):
            near = self._are_near(first[batch], second[batch])
            self._connect(first[batch][near], second[batch][near])
        return len(codes)

    def _are_near(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        (values, pair), (others, other_pair) = self._runs(first), self._runs(second)
        keys = np.sort(_joined(np.concatenate([pair, other_pair]), np.concatenate([values, others])))
        common = np.bincount((keys[1:][keys[1:] == keys[:-1]] >> HALF).astype(np.int64), minlength=len(first))
        together = self._sizes[first] + self._sizes[second]
        return np.asarray(common * (1 + self._similarity) >= self._similarity * together - 1e-9)

    def _connect(self, first: np.ndarray, second: np.ndarray) -> None:
        """Join the clusters of each pair: both get the smaller label, the index of their first text."""
        while not np.array_equal(one := self._labels[first], other := self._labels[second]):
            np.minimum.at(self._labels, np.maximum(one, other), np.minimum(one, other))
            while not np.array_equal(self._labels, further := self._labels[self._labels]):
                self._labels = further


def _batches(sizes: np.ndarray) -> Iterator[slice]:
    """Yield slices of members whose ``sizes`` add up to at most BLOCK; a larger member gets its own slice."""
    ends, start = np.cumsum(sizes), 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK, "right")))
        yield slice(start, stop)
        start = stop


def _inside(sizes: np.ndarray) -> np.ndarray:
    """The index of each member within its group, for groups of these ``sizes`` in sequence."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Join two 32-bit numbers into one of 64 bits."""
    return np.asarray((high.astype(np.uint64) << HALF) | low.astype(np.uint64))
