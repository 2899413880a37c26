"""Checks and splits a tokenized corpus in datatrove's format; the tokens stay in their files.

`NAME.ds` has token ids, 2 or 4 bytes each, little-endian; `NAME.ds.index` has the end of each document, in tokens, as
uint64 (datatrove, src/datatrove/pipeline/tokens/tokenizer.py, TokenizedFile). Every token of a document is a label.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Corpus, DocumentRange, Provenance, TokenFile, sampled_digest, store_path
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import SplitReport
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.compare import batches
from safetrain.data.findings import Findings
from safetrain.data.folders import SPLITS, corpus_of
from safetrain.data.split import split_report
from safetrain.data.store_writer import StoreWriter

FORMAT = "tokens of documents (datatrove)"
PIECE = 2**21  # tokens to read at a time, or one longer document
MOST_TOKENS = 2_000_000  # in valid and in test each: more would not make the loss more precise
RUNS = 64  # roughly how many runs of neighbouring documents valid and test have
SAMPLED, SAMPLE_TOKENS, LEAST_TOKENS = 64, 256, 8  # documents, tokens of each, and the minimum length of a document
TAIL = 4  # tokens at the end of a sample, which later text may change
LEAST_SAME = 0.5  # share of the samples; with a different tokenizer, almost no sample is the same
SPACE, CONTINUES = "▁", "##"  # SentencePiece's space; WordPiece's prefix inside a word
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
Run = tuple[int, range]  # index of a file, and a range of its documents


def read_tokenized(path: Path) -> tuple[TokenFile, np.ndarray]:
    """Check a token file and its index, and read the bounds of its documents, (documents + 1,) int64.

    Raises DataError if the two files do not match.
    """
    index, mask = (path.with_name(path.name + suffix) for suffix in (".index", ".loss"))
    if mask.exists():
        what = "Loss masks of a corpus are not supported: every token is trained on."
        do = "remove the mask, or give chats as rows, where only answers are trained on"
        raise DataError(what, where=mask, do=do)
    do = "copy the token file and its index again, or tokenize it again (datatrove: save_index)"
    if not index.is_file():
        what = "A token file has no index with the ends of its documents."
        raise DataError(what, where=path, expected=index.name, do=do)
    size, index_size = path.stat().st_size, index.stat().st_size
    ends = np.fromfile(index, dtype="<i8", count=index_size // 8)
    lengths, tokens = np.diff(ends, prepend=0), int(ends[-1]) if len(ends) else 0
    is_damaged = index_size % 8 or np.any((lengths < 0) | (lengths >= 2**31))
    if is_damaged or size not in (2 * tokens, 4 * tokens):
        what = "A token file and its index do not match: one is damaged, cut off, or belongs to a different file."
        expected = "ends of documents as ascending numbers of 8 bytes, and 2 or 4 bytes for each token"
        got = f"an index of {index_size} bytes that ends at token {tokens}, and {size} bytes of tokens"
        raise DataError(what, where=path, expected=expected, got=got, do=do)
    width = size // tokens if tokens else 2
    return TokenFile(str(path), tokens, width, sampled_digest(path)), np.concatenate([[0], ends])


def _deal(lengths: np.ndarray, shares: Mapping[str, float]) -> np.ndarray:
    """Deal blocks of neighbouring documents to splits in a fixed random order; returns the split of each document."""
    if len(lengths) <= len(shares):
        expected, got = f"at least {len(shares) + 1} documents", counted(len(lengths), "document")
        raise DataError("Too few documents to split.", expected=expected, got=got)
    total = int(lengths.sum())
    targets = {name: min(share * total, MOST_TOKENS) for name, share in shares.items()}
    blocks = min(len(lengths), int(RUNS * total / min(targets.values())) + 1)
    edges = np.linspace(0, len(lengths), blocks + 1).astype(np.int64)
    sizes, of_block = np.add.reduceat(lengths, edges[:-1]), np.zeros(blocks, dtype=np.uint8)
    order = np.random.default_rng(0).permutation(blocks)
    for name, tokens in targets.items():
        order = order[np.argsort(sizes[order] > tokens, kind="stable")]  # a block that is too large comes last
        fitting = int(np.searchsorted(np.cumsum(sizes[order]), tokens, side="right"))
        count = max(1, min(fitting, len(order) - len(targets)))
        of_block[order[:count]], order = SPLITS.index(name), order[count:]
    return np.repeat(of_block, np.diff(edges))


class CorpusReader:
    """Reads the documents of a corpus for one model and collects findings."""

    def __init__(self, source: Path, tokenizer: ChatTokenizer) -> None:
        """Raises DataError if a file cannot be used, ModelError if the model cannot."""
        self._tokenizer, self._vocabulary = tokenizer, read_model_files(tokenizer.folder).vocab_size
        self._names, paths = zip(*corpus_of(source), strict=True)
        self._files, self._bounds = zip(*map(read_tokenized, paths), strict=True)
        sizes = byte_lengths(tokenizer)[: self._vocabulary]
        self._text_bytes = np.pad(sizes, (0, self._vocabulary - len(sizes)))
        self._open = 0  # documents that do not end with a stop token

    def digest(self) -> str:
        """Hash all files of the corpus."""
        digests = [hashlib.sha256(each.tobytes()).hexdigest() for each in self._bounds]
        return hashlib.blake2b(repr(list(zip(self._files, digests, strict=True))).encode(), digest_size=16).hexdigest()

    def compare_tokenizers(self, findings: Findings) -> None:
        """Report a corpus made with a different tokenizer: its text, tokenized again, gives different ids."""
        samples, same = list(self._samples()), 0
        for ids in samples:
            again = self._tokenizer.encode_chat(self._tokenizer.decode(ids, special=True))
            middle = ids[1:-TAIL]  # a tokenizer may add or drop a token at the start
            same += any(again[at : at + len(middle)] == middle for at in range(3))
        if same < LEAST_SAME * len(samples):
            detail = f"of {len(samples)} sampled documents, {same} give the same ids when tokenized again"
            findings.add("TOKENIZER-DIFFERS", detail)

    def write_splits(
        self, folder: Path, shares: Mapping[str, float], provenance: Provenance, findings: Findings
    ) -> tuple[dict[str, SplitReport], str]:
        """Read all tokens and write the stores of the splits; also returns how the splits were chosen.

        A split without a file gets its share of train's tokens, at most 2 million, as runs of neighbouring documents
        from many places. A document is never cut. Raises DataError if there are too few documents.
        """
        starts = np.cumsum([0, *(len(each) - 1 for each in self._bounds)])  # of files, in documents
        parts = np.repeat(np.array([SPLITS.index(name) for name in self._names], dtype=np.uint8), np.diff(starts))
        missing = {name: share for name, share in shares.items() if name not in self._names}
        if missing:
            lengths = np.concatenate([np.diff(each) for each in self._bounds])
            free = np.flatnonzero((parts == 0) & (lengths > 0))
            parts[free] = _deal(lengths[free], missing)
        runs: dict[str, list[Run]] = {name: [] for name in SPLITS}
        for first, stop in itertools.pairwise(np.union1d(starts, np.flatnonzero(np.diff(parts)) + 1).tolist()):
            file = int(np.searchsorted(starts, first, side="right")) - 1
            begin = int(starts[file])
            runs[SPLITS[parts[first]]].append((file, range(first - begin, stop - begin)))
        splits = {name: self._write(folder, name, parts, provenance) for name, parts in runs.items()}
        if self._open:
            rows = sum(split.rows for split in splits.values())
            findings.add("DOCUMENTS-OPEN", f"{self._open} of {rows} ({100 * self._open / rows:.3g} %)", self._open)
        sizes = {name: counted(splits[name].rows, "document") for name in missing}
        if not sizes:
            return splits, "using the given train, valid and test files"
        listed = " and ".join(f"{name} ({size})" for name, size in sizes.items())
        return splits, f"{listed} split off train: neighbouring documents from many places, the same in every run"

    def _write(self, folder: Path, name: str, runs: Sequence[Run], provenance: Provenance) -> SplitReport:
        state, label_bytes = hashlib.blake2b(digest_size=16), 0
        stretches, kept = list[DocumentRange](), list[np.ndarray]()
        with StoreWriter(store_path(folder, name), documents=True) as store:
            for file, documents in runs:
                begin, end = (int(self._bounds[file][each]) for each in (documents.start, documents.stop))
                stretches += [DocumentRange(file, begin, end)] if end > begin else []
                for ids, numbers, lengths in self._pieces(file, documents):
                    store.add_documents(lengths, file, numbers)
                    kept.append(lengths)
                    state.update(ids.tobytes() + lengths.astype("<u4").tobytes())
                    label_bytes += int(self._text_bytes[ids].sum())
            if not stretches:
                raise DataError(f"The documents of {name} are empty.", where=self._files[0].path)
            corpus = Corpus(self._files, tuple(stretches))
            store.finish_corpus(provenance, state.hexdigest(), corpus, label_bytes / len(corpus))
        labels = len(corpus) - sum(map(len, kept))  # all but a document's first token
        return split_report(kept, labels, label_bytes)

    def _pieces(self, file: int, documents: range) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield ids, document numbers (from 1) and lengths of a few documents at a time, without empty ones."""
        bounds = self._bounds[file][documents.start : documents.stop + 1]
        for batch in batches(np.diff(bounds), PIECE):
            lengths = np.diff(bounds[batch.start : batch.stop + 1])
            there = np.flatnonzero(lengths)
            if len(there):
                ids = self._tokens(self._files[file], int(bounds[batch.start]), int(bounds[batch.stop]))
                last = ids[np.cumsum(lengths)[there] - 1]
                self._open += int(np.isin(last, list(self._tokenizer.stop_ids), invert=True).sum())
                yield ids, documents.start + batch.start + there + 1, lengths[there]

    def _tokens(self, file: TokenFile, begin: int, end: int) -> np.ndarray:
        """Read ids; raises DataError for an id beyond the model's vocabulary."""
        ids = file.ids(begin, end)
        unknown = np.flatnonzero(ids >= self._vocabulary)
        if len(unknown):
            raise DataError(
                "A token file has an id beyond the model's vocabulary.",
                where=f"{file.path}, token {begin + int(unknown[0]) + 1}",
                expected=f"ids below {self._vocabulary}",
                got=f"{ids[unknown[0]]}",
                do="use the model whose tokenizer made the corpus, or tokenize it with this model's tokenizer",
            )
        return ids

    def _samples(self) -> Iterator[list[int]]:
        """Yield the beginnings of documents from all over the corpus, without their end tokens."""
        for file, bounds in zip(self._files, self._bounds, strict=True):
            long = np.flatnonzero(np.diff(bounds) > LEAST_TOKENS)
            count = min(max(1, SAMPLED // len(self._files)), len(long))
            for number in long[np.linspace(0, len(long) - 1, count).astype(np.int64)].tolist():
                begin, end = int(bounds[number]), int(bounds[number + 1]) - 1
                yield self._tokens(file, begin, min(end, begin + SAMPLE_TOKENS)).tolist()


def byte_lengths(tokenizer: ChatTokenizer) -> np.ndarray:
    """Count the UTF-8 bytes of each token, (ids,) int64; 0 for special tokens.

    Added tokens that are not special are text, such as the runs of spaces in GPT-NeoX's tokenizer. A byte-level
    vocabulary spells each byte as one character; other vocabularies contain the text.
    """
    definition = tokenizer.definition
    is_bytes = '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    added = {token["id"]: token.get("special", True) for token in definition.get("added_tokens") or ()}
    lengths = np.zeros(tokenizer.size, dtype=np.int64)
    for number in range(tokenizer.size):
        piece = tokenizer.token_of(number)
        if number in added:
            size = 0 if added[number] else len(piece.encode())
        elif is_bytes or BYTE.fullmatch(piece):
            size = len(piece) if is_bytes else 1
        else:
            size = len(piece.removeprefix(CONTINUES).replace(SPACE, " ").encode())
        lengths[number] = size
    return lengths
