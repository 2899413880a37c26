"""Assigns rows to train, valid and test by a hash of their question, and writes the splits with their statistics.

Tokenized rows wait in a scratch file until the split of each is known.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from safetrain.core.data.store import Provenance, StoreWriter, store_path
from safetrain.core.data.token_rows import Question, TokenRow
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.data.words import mixed
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.records.reports import LengthQuantiles, SplitReport
from safetrain.data.files import PLAIN
from safetrain.data.folders import SPLITS, suffix_of
from safetrain.data.tokenize import Prompt, ReadRow

MIN_GROUPS = 3  # different questions that a split needs
TRAIN, VALID, TEST = range(3)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.995)
_encode = json.JSONEncoder(ensure_ascii=False).encode


def split_off(
    names: Sequence[str],
    files: np.ndarray,
    clusters: np.ndarray,
    digests: np.ndarray,
    shares: dict[str, float],
    path: Path,
) -> tuple[np.ndarray, str]:
    """Assign a split to each row, as an index into SPLITS, and describe how.

    ``names`` are the splits of the files; ``files`` (rows,) is the file of each row; ``clusters`` (rows,) is a row's
    number, equal for rows that must stay together; ``digests`` (rows,) uint64 hashes their questions. Only a split
    without a file takes its share of train. A cluster stays in train if a given file has some of its rows, unless too
    few are left. Its split depends only on its smallest digest and on the shares, so other rows never move it. Rows
    move only to fill a split that would be empty, and the text says so. Raises DataError if there are too few clusters;
    ``path`` is named in it.
    """
    parts = np.array([SPLITS.index(name) for name in names], dtype=np.uint8)[files]
    missing = {name: share for name, share in shares.items() if name not in names}
    if not missing:
        return parts, "using the given train, valid and test files"
    in_train = parts == TRAIN
    smallest = np.full(len(parts), np.iinfo(np.uint64).max, dtype=np.uint64)  # digest of each cluster
    np.minimum.at(smallest, clusters[in_train], digests[in_train])
    there = np.zeros(len(parts), dtype=np.bool_)
    there[clusters[in_train]] = True
    if there.sum() < MIN_GROUPS:
        divide = "; lines of <|endoftext|> separate the documents in a text" if suffix_of(path) in PLAIN else ""
        raise DataError(
            "Too few different rows to split.",
            where=str(path),
            expected=f"at least {MIN_GROUPS} rows with different questions",
            got=str(there.sum()),
            do=f"add rows, or name a folder with train, valid and test files{divide}",
        )
    free = there.copy()  # clusters without a row in a given file
    free[clusters[~in_train]] = False
    if free.sum() <= len(missing):
        free = there
    of_cluster = np.full(len(parts), TRAIN, dtype=np.uint8)
    of_cluster[free], changed = _deal(mixed(smallest[free]), missing)  # mixed: the smallest of many digests is small
    parts[in_train] = of_cluster[clusters[in_train]]
    sizes = [f"{name} ({counted(int((parts == SPLITS.index(name)).sum()), 'row')})" for name in missing]
    text = f"{' and '.join(sizes)} split off train by content"
    if changed:
        text += f"; {' and '.join(changed)} would have been empty and got the nearest rows; adding rows can move these"
    return parts, text


def _deal(places: np.ndarray, shares: dict[str, float]) -> tuple[np.ndarray, list[str]]:
    """Split the groups, (groups,), by place (uint64); also return the splits whose size differs from their share.

    Valid takes the lowest places and test the highest, so that changing one share does not move the other's rows.
    """
    count, place = len(places), places.astype(np.float64) / 2.0**64
    by_share = {"valid": place < shares.get("valid", 0.0), "test": place >= 1 - shares.get("test", 0.0)}
    expected = {name: int(by_share[name].sum()) if name in shares else 0 for name in by_share}
    counts = {name: max(number, int(name in shares)) for name, number in expected.items()}
    while sum(counts.values()) >= count:  # train would be empty
        counts[max(counts, key=lambda name: counts[name])] -= 1
    of_group, ordered = np.full(count, TRAIN, dtype=np.uint8), np.sort(places)  # no two are equal
    of_group[places < ordered[counts["valid"]]] = VALID
    if counts["test"]:
        of_group[places >= ordered[-counts["test"]]] = TEST
    changed = [name for name, number in expected.items() if counts[name] > number]
    return of_group, changed + ["train"] * any(counts[name] < number for name, number in expected.items())


class SplitFigures:
    """Collects a split's statistics: numbers of rows, tokens and labels, and row lengths."""

    def __init__(self) -> None:
        self._lengths, self._trained = Counter[int](), 0

    def add(self, lengths: np.ndarray, label_counts: np.ndarray) -> None:
        """Count rows by their lengths and labels; both (rows,)."""
        self._lengths.update(lengths.tolist())
        self._trained += int(label_counts.sum(dtype=np.int64))

    def report(self, label_bytes: int = 0) -> SplitReport:
        """Statistics of the rows added so far, at least one; ``label_bytes``: UTF-8 bytes of their answers."""
        lengths, numbers = np.array(sorted(self._lengths.items())).T
        rows, tokens = int(numbers.sum()), int(lengths @ numbers)
        quantiles = np.quantile(lengths, QUANTILES, weights=numbers, method="inverted_cdf")
        quantile_lengths = LengthQuantiles(*map(int, (*quantiles, lengths[-1])))
        return SplitReport(rows, tokens, self._trained, quantile_lengths, label_bytes)


# Writing


class StoredRow(NamedTuple):
    """A tokenized row, with everything that is stored about it."""

    line: str  # canonical JSON
    file: int
    number: int  # of its line or its row in the file, whichever is greater
    label_bytes: int  # UTF-8 bytes of its answers
    prompt: Prompt | None
    tokens: TokenRow


def stored_rows(reads: Iterable[ReadRow], file: int) -> list[StoredRow]:
    """List the rows of a file that can be trained on; the others are already findings."""
    return [
        StoredRow(f"{_encode(row.as_json())}\n", file, max(each.spot.place), each.label_bytes, each.prompt, tokens)
        for each in reads if (row := each.row) is not None and (tokens := each.tokens) is not None
    ]  # fmt: skip


def add_rows(spool: IO[bytes], rows: Sequence[StoredRow]) -> None:
    """Append a few hundred rows to a scratch file: a line of JSON, then all ids, then all labels."""
    spool.write((_encode([(*row[:-1], len(row.tokens)) for row in rows]) + "\n").encode("utf-8"))
    spool.writelines(row.tokens.ids.astype("<u4").tobytes() for row in rows)
    spool.writelines(row.tokens.trained.tobytes() for row in rows)


def _next_rows(spool: IO[bytes]) -> list[StoredRow]:
    texts = json.loads(spool.readline())
    ends = np.cumsum([text[-1] for text in texts], dtype=np.int64)
    total = int(ends[-1]) if texts else 0
    ids, trained = np.frombuffer(spool.read(4 * total), "<u4"), np.frombuffer(spool.read(total), np.bool_)
    rows = list[StoredRow]()
    for (line, file, number, size, prompt, count), end in zip(texts, ends, strict=True):
        tokens = TokenRow(ids[end - count : end], trained[end - count : end])
        rows.append(StoredRow(line, file, number, size, Prompt(*prompt) if prompt else None, tokens))
    return rows


class SplitWriter(contextlib.ExitStack):
    """Writes a split: canonical lines, and a token store with the questions of test."""

    def __init__(self, folder: Path, name: str, tokenizer: ChatTokenizer) -> None:
        super().__init__()
        self._lines = self.enter_context((folder / f"{name}.jsonl").open("wb"))
        self._store = self.enter_context(StoreWriter(store_path(folder, name)))
        self._figures, self._label_bytes = SplitFigures(), 0
        self._tokenizer, self._has_questions = tokenizer, name == "test"

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Append a few hundred rows."""
        if not rows:
            return
        if self._has_questions:
            self._add_questions(rows)
        lengths = np.array([len(row.tokens) for row in rows])
        label_counts = np.array([row.tokens.trained_tokens for row in rows])
        self._lines.writelines(row.line.encode("utf-8") for row in rows)
        self._store.add(
            np.concatenate([row.tokens.ids for row in rows]),
            np.concatenate([row.tokens.trained for row in rows]),
            lengths,
            label_counts,
            np.array([row.file for row in rows]),
            np.array([row.number for row in rows]),
        )
        self._figures.add(lengths, label_counts)
        self._label_bytes += sum(row.label_bytes for row in rows)

    def finish(self, provenance: Provenance, files: Sequence[Path]) -> SplitReport:
        """Complete the store; returns the statistics of the split."""
        self._store.finish(provenance, [str(path) for path in files], self._label_bytes)
        return self._figures.report(self._label_bytes)

    def _add_questions(self, rows: Sequence[StoredRow]) -> None:
        """Store prompts, tokenized separately: in a row, a prompt's last token may merge with the answer's first."""
        asking = [(number, row.tokens, row.prompt) for number, row in enumerate(rows, len(self._store)) if row.prompt]
        encodings = self._tokenizer.encode_chats([prompt.rendered for _, _, prompt in asking])
        for (number, tokens, prompt), encoding in zip(asking, encodings, strict=True):
            end = prompt.begin + int(np.flatnonzero(tokens.trained[prompt.begin :])[-1]) + 1
            answer = tuple(tokens.ids[prompt.begin : end].tolist())
            self._store.add_question(Question(number, tuple(encoding.ids), answer, prompt.text))


def write_splits(
    spool: IO[bytes], folder: Path, parts: np.ndarray, files: Sequence[Path], made: Provenance, tokenizer: ChatTokenizer
) -> dict[str, SplitReport]:
    """Write each row of a scratch file into its split; ``parts`` (rows,) are indices into SPLITS."""
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, tokenizer)) for name in SPLITS}
        first = spool.seek(0)
        while first < len(parts):
            block = _next_rows(spool)
            own, first = parts[first : first + len(block)], first + len(block)
            for part, writer in enumerate(writers.values()):
                writer.add([block[row] for row in np.flatnonzero(own == part).tolist()])
        return {name: writer.finish(made, files) for name, writer in writers.items()}
