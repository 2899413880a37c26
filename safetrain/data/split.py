"""Assigns rows to train, valid and test by a hash of their question, and writes the splits with their statistics.

Tokenized rows wait in a scratch file until the split of each is known. Token stores have the format of
core/data/store.py.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from safetrain.core.data.store import KINDS, OF_QUESTIONS, OF_ROWS, PAIRS, VERSION, Provenance, store_path
from safetrain.core.data.token_rows import Question, TokenRow
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.model.files import header_of
from safetrain.core.records.reports import LengthQuantiles, SplitReport
from safetrain.core.storage.files import write_atomic
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.core.text.words import mixed
from safetrain.data.folders import SPLITS
from safetrain.data.tokenize import Prompt, ReadRow

MIN_GROUPS = 3  # different questions that a split needs
MOST_DEALT = 0.5  # of the clusters that fit into valid and test: train learns from the rest
TRAIN, VALID, TEST = range(3)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.995)
_encode = json.JSONEncoder(ensure_ascii=False).encode


def split_off(
    names: Sequence[str],
    parts: np.ndarray,
    clusters: np.ndarray,
    digests: np.ndarray,
    shares: Mapping[str, float],
    path: Path,
    noun: str = "row",
) -> tuple[np.ndarray, str]:
    """Assign a split to each row, as an index into SPLITS, and describe how.

    ``names`` are the splits that have files. The arrays have shape (rows,): ``parts`` has the split of each row's file,
    ``clusters`` equal numbers for rows that must stay together, ``digests`` uint64 hashes of questions. Only a split
    without a file takes its share of train. A cluster stays in train if a given file has some of its rows, or if it has
    more rows than a split's share, unless too few clusters are left. The other clusters fill the shares. The split of
    each depends only on its smallest digest and on the shares, so other rows never move it, unless they make a cluster
    too large. Rows move to fill a split that would be empty, and the text says so; it calls them ``noun``. Raises a
    DataError that names ``path`` if there are too few clusters.
    """
    parts = parts.copy()
    missing = {name: share for name, share in shares.items() if name not in names}
    if not missing:
        return parts, "using the given train, valid and test files"
    in_train = parts == TRAIN
    there, of_row = np.unique(clusters[in_train], return_inverse=True)  # clusters, and the index of each row's
    if len(there) < MIN_GROUPS:
        what, expected = "Too few different rows to split.", f"at least {MIN_GROUPS} rows with different questions"
        do = "add rows (lines of <|endoftext|> separate documents), or name a folder with train, valid and test files"
        raise DataError(what, where=path, expected=expected, got=f"{len(there)} different", do=do)
    smallest = np.full(len(there), np.iinfo(np.uint64).max, dtype=np.uint64)  # digest of each cluster
    np.minimum.at(smallest, of_row, digests[in_train])
    free = ~np.isin(there, clusters[~in_train])  # clusters without a row in a given file
    if free.sum() < len(missing):
        free[:] = True
    sizes, rows = np.bincount(of_row), len(of_row)
    fitting = free & (sizes <= max(min(missing.values()) * rows, np.sort(sizes[free])[len(missing) - 1]))
    growth = float(sizes[free].sum() / sizes[fitting].sum())  # of the shares: the clusters that fit fill them alone
    growth = max(1.0, min(growth, MOST_DEALT / sum(missing.values())))
    of_cluster, dealt = np.full(len(there), TRAIN, dtype=np.uint8), {name: growth * missing[name] for name in missing}
    places = mixed(smallest[fitting])  # mixed: the smallest of many digests is small
    of_cluster[fitting], changed = _deal(places, dealt, leave=int(fitting.all()))
    parts[in_train] = of_cluster[of_row]
    listed = [f"{name} ({counted(int((parts == SPLITS.index(name)).sum()), noun)})" for name in missing]
    text = f"{' and '.join(listed)} split off train by content"
    if changed:
        text += f"; {' and '.join(changed)} would have been empty and got another split's rows; more data may move them"
    return parts, text


def _deal(places: np.ndarray, shares: Mapping[str, float], leave: int) -> tuple[np.ndarray, list[str]]:
    """Assign groups to splits by their ``places``, (groups,) uint64; also return the splits larger than their share.

    Valid takes the lowest places and test the highest, so that changing one share does not move the other's rows; both
    leave ``leave`` groups to train.
    """
    count, place = len(places), places.astype(np.float64) / 2.0**64
    valid, test = place < shares.get("valid", 0.0), place >= 1 - shares.get("test", 0.0)
    expected = {"valid": int(valid.sum()), "test": int(test.sum())}
    counts = {name: max(number, int(name in shares)) for name, number in expected.items()}
    while sum(counts.values()) > count - leave:
        counts[max(counts, key=counts.__getitem__)] -= 1
    of_group, order = np.full(count, TRAIN, dtype=np.uint8), np.argsort(places)  # no two are equal
    of_group[order[: counts["valid"]]] = VALID
    of_group[order[count - counts["test"] :]] = TEST
    changed = [name for name, number in expected.items() if counts[name] > number]
    return of_group, changed + ["train"] * any(counts[name] < number for name, number in expected.items())


# Writing


class StoredRow(NamedTuple):
    """A tokenized row, with everything that is stored about it."""

    line: str  # canonical JSON; empty for the rejected row of a pair
    file: int
    number: int  # the number of its line or of its row in the file, whichever is greater
    label_bytes: int  # UTF-8 bytes of its answers
    prompt: Prompt | None
    tokens: TokenRow


def stored_rows(reads: Iterable[ReadRow], file: int) -> list[StoredRow]:
    """List the rows of a file that can be trained on; the others are already findings."""
    return [
        StoredRow(
            "" if row.is_rejected else f"{_encode(row.as_json())}\n", file, max(each.spot.place), each.label_bytes,
            each.prompt, tokens,
        )
        for each in reads if (row := each.row) is not None and (tokens := each.tokens) is not None
    ]  # fmt: skip


def add_rows(spool: IO[bytes], rows: Sequence[StoredRow]) -> None:
    """Append a few hundred rows to a scratch file: a line of JSON, then all ids, then all labels."""
    if rows:
        spool.write((_encode([(*row[:-1], len(row.tokens)) for row in rows]) + "\n").encode())
        spool.writelines(row.tokens.ids.astype("<u4").tobytes() for row in rows)
        spool.writelines(row.tokens.trained.tobytes() for row in rows)


def _next_rows(spool: IO[bytes]) -> list[StoredRow]:
    texts = json.loads(spool.readline())
    ends = np.cumsum([text[-1] for text in texts])
    ids = np.split(np.frombuffer(spool.read(4 * int(ends[-1])), "<u4"), ends[:-1])
    trained = np.split(np.frombuffer(spool.read(int(ends[-1])), np.bool_), ends[:-1])
    return [
        StoredRow(line, file, number, size, prompt, TokenRow(*tokens))
        for (line, file, number, size, prompt, _), *tokens in zip(texts, ids, trained, strict=True)
    ]


class StoreWriter(contextlib.ExitStack):
    """Writes a store atomically. Arrays wait in scratch files, so memory does not grow with the number of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._labels = path, 0
        files = {name: tempfile.TemporaryFile(dir=path.parent) for name in OF_ROWS}  # noqa: SIM115
        self._arrays = {name: self.enter_context(file) for name, file in files.items()}

    def __len__(self) -> int:
        return self._count("row_ends")

    def add(
        self, ids: np.ndarray, trained: np.ndarray, lengths: np.ndarray, label_counts: np.ndarray, files: np.ndarray,
        lines: np.ndarray,
    ) -> None:  # fmt: skip
        """Add rows: ids, whether each id is a label, and each row's length, label count, file and line (from 1)."""
        self._labels += int(np.count_nonzero(trained))
        ends = self._count("ids") + np.cumsum(lengths)
        self._put(ids=ids, trained=trained, row_ends=ends, label_counts=label_counts, files=files, lines=lines)

    def add_question(self, question: Question) -> None:
        """Add the question of a row, in the order of the rows."""
        text = np.frombuffer(question.text.encode("utf-8"), dtype=np.uint8)
        prompt, answer = np.array(question.prompt), np.array(question.answer)
        self._put(question_rows=np.array([question.row]), prompt_ids=prompt, answer_ids=answer, question_texts=text)
        self._put(**{ends: np.array([self._count(values)]) for ends, values in OF_QUESTIONS.items()})

    def finish(self, made: Provenance, files: Sequence[str], label_bytes: int = 0, *, pairs: bool = False) -> None:
        """Write the store. ``label_bytes``: UTF-8 bytes of all answers; ``pairs``: each two rows are a pair."""
        digest = self._digest("row_ends", self._digest("ids") + self._digest("trained"))
        metadata = {
            "version": str(VERSION),
            "digest": digest.hex(),
            "made": json.dumps(dataclasses.asdict(made), ensure_ascii=False),
            "files": json.dumps(list(files), ensure_ascii=False),
            "label_bytes": repr(label_bytes / max(1, self._labels)),
            **({PAIRS: "1"} if pairs else {}),
        }
        order = sorted(OF_ROWS, key=lambda name: -np.dtype(OF_ROWS[name]).itemsize)  # for alignment
        parts = [(name, KINDS[OF_ROWS[name]], [self._count(name)], self._arrays[name].tell()) for name in order]

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(header_of(parts, metadata))
                for name in order:
                    self._arrays[name].seek(0)
                    shutil.copyfileobj(self._arrays[name], file)

        write_atomic(self._path, write)

    def _put(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self._arrays[name].write(values.astype(OF_ROWS[name]).tobytes())

    def _count(self, name: str) -> int:
        """How many numbers an array has so far."""
        return self._arrays[name].tell() // np.dtype(OF_ROWS[name]).itemsize

    def _digest(self, name: str, before: bytes = b"") -> bytes:
        """Hash ``before`` and then the array ``name``."""
        self._arrays[name].seek(0)
        return hashlib.file_digest(self._arrays[name], lambda: hashlib.blake2b(before, digest_size=16)).digest()


class SplitWriter(contextlib.ExitStack):
    """Writes a split's canonical lines and token store; the stores of valid and test also have the questions."""

    def __init__(self, folder: Path, name: str, tokenizer: ChatTokenizer) -> None:
        super().__init__()
        self._lines = self.enter_context((folder / f"{name}.jsonl").open("wb"))
        self._store = self.enter_context(StoreWriter(store_path(folder, name)))
        self._lengths, self._labels, self._label_bytes = list[np.ndarray](), 0, 0
        self._pairs = 0
        self._tokenizer, self._has_questions = tokenizer, name != "train"

    def add(self, rows: Sequence[StoredRow]) -> None:
        """Append a few hundred rows."""
        if not rows:
            return
        if self._has_questions:
            self._add_questions(rows)
        lines, files, numbers, sizes, _, tokens = zip(*rows, strict=True)
        self._pairs += lines.count("")
        lengths = np.array(list(map(len, tokens)))
        label_counts = np.array([each.labels for each in tokens])
        self._lines.writelines(line.encode() for line in lines)
        ids = np.concatenate([each.ids for each in tokens])
        trained = np.concatenate([each.trained for each in tokens])
        self._store.add(ids, trained, lengths, label_counts, np.array(files), np.array(numbers))
        self._lengths.append(lengths)
        self._labels += int(label_counts.sum())
        self._label_bytes += sum(sizes)

    def finish(self, provenance: Provenance, files: Sequence[Path]) -> SplitReport:
        """Complete the store, which has at least one row; returns the statistics of the split."""
        self._store.finish(provenance, [str(path) for path in files], self._label_bytes, pairs=self._pairs > 0)
        tokens = np.concatenate(self._lengths)
        quantiles = np.quantile(tokens, QUANTILES, weights=np.ones(len(tokens)), method="inverted_cdf")
        spread = LengthQuantiles(*map(int, (*quantiles, tokens.max())))
        return SplitReport(len(tokens), int(tokens.sum()), self._labels, spread, self._label_bytes, self._pairs)

    def _add_questions(self, rows: Sequence[StoredRow]) -> None:
        """Store prompts, tokenized separately: in a row, a prompt's last token may merge with the answer's first."""
        asking = [(number, row.tokens, *row.prompt) for number, row in enumerate(rows, len(self._store)) if row.prompt]
        encodings = self._tokenizer.encode_chats([rendered for *_, rendered, _ in asking])
        for (number, tokens, first, last, _, text), encoding in zip(asking, encodings, strict=True):
            answer = tuple(tokens.ids[first : last + 1].tolist())
            self._store.add_question(Question(number, tuple(encoding.ids), answer, text))


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
                writer.add([row for row, own_part in zip(block, own, strict=True) if own_part == part])
        return {name: writer.finish(made, files) for name, writer in writers.items()}
