"""A corpus of files of tokens, as datatrove writes them: checked, divided into splits; the tokens stay in their files.

`NAME.ds` has token ids, 2 or 4 bytes each, little-endian; `NAME.ds.index` the end of each document, in tokens, as
uint64; `NAME.ds.loss`, if there, a byte for each token, 0 where it is not a label; `NAME.ds.metadata`, if there, names
the tokenizer (datatrove, src/datatrove/pipeline/tokens/tokenizer.py, TokenizedFile).
"""

import collections
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.corpus_store import Corpus, DocumentWriter
from safetrain.core.data.store import Provenance, metadata_of, store_path
from safetrain.core.data.token_files import OpenFiles, Stretch, TokenFile, loss_path, sampled_digest
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import SplitReport
from safetrain.data.findings import Findings
from safetrain.data.folders import SPLITS, corpus_of
from safetrain.data.split import SplitFigures

FORMAT = "tokens of documents (datatrove)"
INDEX, METADATA = ".index", ".metadata"
UNNAMED = "Unknown Tokenizer"  # as datatrove writes
TOKEN_BYTES = (2, 4)
PIECE = 2**21  # tokens that are read together, or one document
MOST_TOKENS = 2_000_000  # of valid and of test: a pass over more tells no more
RUNS = 64  # of neighbouring documents, at most, that valid and test have each
SAMPLED, SAMPLE_TOKENS, LEAST_TOKENS = 64, 256, 8  # documents, and tokens of each; shorter ones say little
TAIL = 4  # tokens at the end of a sample, which were joined with what follows
LEAST_SAME = 0.5  # of the sampled documents; with another tokenizer hardly one is
MOST_TOLD = 3  # ids that open documents end with
SPACE, CONTINUES = "▁", "##"  # a space in SentencePiece; the beginning of a piece that continues a word in WordPiece
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class TokenizedFile:
    """A whole file of tokens. ``tokenizer`` is what its metadata names, empty where nothing does."""

    file: TokenFile
    ends: np.ndarray  # (documents,) int64, ascending
    tokenizer: str

    def begin(self, document: int) -> int:
        """The first token of a document."""
        return int(self.ends[document - 1]) if document else 0


@dataclass(frozen=True)
class DocumentRun:
    """Documents of a file that follow each other."""

    file: int
    first: int
    stop: int


def read_tokenized(path: Path) -> TokenizedFile:
    """Check a file and those next to it; raises DataError where they do not fit each other."""
    ends = _read_index(path)
    tokens, size = int(ends[-1]) if len(ends) else 0, path.stat().st_size
    width = size // tokens if tokens and size % tokens == 0 else 0
    if (tokens and width not in TOKEN_BYTES) or (not tokens and size):
        expected = " or ".join(f"{each * tokens} bytes" for each in TOKEN_BYTES) + f" for {tokens} tokens"
        what = "A file of tokens and its index do not fit: one of them is cut off, or of another file."
        raise _not_whole(what, path, expected, f"{size} bytes")
    mask = loss_path(path)
    masked = mask.exists()
    if masked and mask.stat().st_size != tokens:
        what = "The mask of a file of tokens is not as long as the file."
        raise _not_whole(what, mask, f"{tokens} bytes", f"{mask.stat().st_size} bytes")
    metadata, name = path.with_name(path.name + METADATA), ""
    if metadata.is_file():  # its first line is TOKENIZER|BYTES, in older versions TOKENIZER
        name = metadata.read_text(encoding="utf-8", errors="replace").split("\n")[0].split("|")[0].strip()
    file = TokenFile(str(path), tokens, width or 2, masked, sampled_digest(path, masked))
    return TokenizedFile(file, ends, "" if name == UNNAMED else name)


def _read_index(path: Path) -> np.ndarray:
    """(documents,) where each ends."""
    index = path.with_name(path.name + INDEX)
    if not index.is_file():
        what, do = "A file of tokens has no index: nothing says where its documents end.", "copy it too (save_index)"
        raise DataError(what, where=str(path), expected=index.name, do=do)
    size = index.stat().st_size
    ends = np.fromfile(index, dtype="<i8", count=size // 8)
    lengths = np.diff(ends, prepend=0)
    wrong = np.flatnonzero((lengths < 0) | (lengths >= 2**31))
    if size % 8 or len(wrong):
        got = f"{size} bytes" if size % 8 else f"document {wrong[0] + 1} of {lengths[wrong[0]]} tokens"
        what, expected = "The index of a file of tokens is damaged.", "ascending numbers of 8 bytes"
        raise _not_whole(what, index, expected, got)
    return ends


def _not_whole(what: str, path: Path, expected: str, got: str) -> DataError:
    do = "copy the file again, with those next to it, or tokenize it again"
    return DataError(what, where=str(path), expected=expected, got=got, do=do)


def split_runs(
    ends: Sequence[np.ndarray], names: Sequence[str], shares: Mapping[str, float]
) -> dict[str, list[DocumentRun]]:
    """Divide the documents of some files, whose splits are ``names``; ``ends`` (documents,) of each.

    A split without a file gets its share of the tokens of train, at most 2 million, as runs of neighbours out of many
    places; a document is never cut. Raises DataError where there are too few documents.
    """
    counts = [len(each) for each in ends]
    parts = np.repeat(np.array([SPLITS.index(name) for name in names], dtype=np.uint8), counts)
    missing = {name: share for name, share in shares.items() if name not in names}
    if missing:
        lengths = np.concatenate([np.diff(each, prepend=0) for each in ends])
        free = np.flatnonzero((parts == 0) & (lengths > 0))
        if len(free) <= len(missing):
            expected = f"at least {len(missing) + 1}"
            raise DataError("Too few documents to split.", expected=expected, got=str(len(free)))
        before = np.concatenate([[0], np.cumsum(lengths[free])])
        edges = np.linspace(0, len(free), min(RUNS * (len(missing) + 1), len(free)) + 1).astype(np.int64).tolist()
        for place, (name, share) in enumerate(missing.items()):
            places = list(itertools.pairwise(edges))[place :: len(missing) + 1]
            for first, stop in _chosen(before, places, min(share * float(before[-1]), MOST_TOKENS)):
                parts[free[first:stop]] = SPLITS.index(name)
    runs: dict[str, list[DocumentRun]] = {name: [] for name in SPLITS}
    for file, own in enumerate(np.split(parts, np.cumsum(counts)[:-1])):
        borders = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
        for first, stop in itertools.pairwise(borders if len(own) else []):
            runs[SPLITS[own[first]]].append(DocumentRun(file, first, stop))
    return runs


def _chosen(before: np.ndarray, places: Sequence[tuple[int, int]], wanted: float) -> list[tuple[int, int]]:
    """The first documents of each place, ``wanted`` tokens in all; ``before`` (documents + 1,) tokens."""
    found, taken = list[tuple[int, int]](), 0
    for number, (first, end) in enumerate(places, 1):
        left = wanted * number / len(places) - taken  # what earlier places had no document for, this one may give
        stop = min(end, int(np.searchsorted(before, before[first] + left, side="right")) - 1)
        if stop > first:
            found.append((first, stop))
            taken += int(before[stop] - before[first])
    if found:
        return found
    first = min((first for first, _ in places), key=lambda first: before[first + 1] - before[first])
    return [(first, first + 1)]  # each is longer than the share


class CorpusReader:
    """Reads the documents of a corpus for one model, and counts what is found in them."""

    def __init__(self, source: Path, tokenizer: ChatTokenizer, tell: Callable[[str], None]) -> None:
        """``tell`` hears how many tokens are read. Raises DataError, ModelError."""
        vocabulary = read_model_files(tokenizer.folder).vocab_size
        by_split = corpus_of(source)
        self.paths = [path for paths in by_split.values() for path in paths]
        self._names = [name for name, paths in by_split.items() for _ in paths]
        self._files = [read_tokenized(path) for path in self.paths]
        self._tokenizer, self._vocabulary, self._tell, self._open = tokenizer, vocabulary, tell, OpenFiles()
        self._text_bytes = np.zeros(vocabulary, dtype=np.int64)
        known = byte_lengths(tokenizer)[:vocabulary]
        self._text_bytes[: len(known)] = known
        self._closing = np.isin(np.arange(vocabulary), list(tokenizer.stop_ids))
        self._read, self._documents = 0, 0  # tokens; documents that are not empty
        self._open_ends = collections.Counter[int]()  # last ids of documents that no stop token ends

    def digest(self) -> str:
        """A hash of all files."""
        digest = hashlib.blake2b(digest_size=16)
        for each in self._files:
            ends = hashlib.sha256(each.ends.tobytes()).hexdigest()
            digest.update(f"{each.file.path}\0{each.file.digest}\0{ends}".encode())
        return digest.hexdigest()

    def compare_tokenizers(self, findings: Findings) -> None:
        """Report where another tokenizer made the corpus: its text, tokenized again, gives other ids."""
        known = min(self._vocabulary, self._tokenizer.size)
        samples = [sample for sample in self._samples() if max(sample) < known]  # reading refuses others
        same = sum(_is_same(sample, self._tokenizer) for sample in samples)
        if same < LEAST_SAME * len(samples):
            names = sorted({each.tokenizer for each in self._files if each.tokenizer})
            named = f", {' and '.join(names)} by its metadata" if names else ""
            said = f"of {len(samples)} sampled documents, {same} give their own ids when they are tokenized again"
            findings.add("TOKENIZER-DIFFERS", said + named)

    def write_splits(
        self, folder: Path, shares: Mapping[str, float], made: Provenance, findings: Findings
    ) -> tuple[dict[str, SplitReport], str]:
        """Read all tokens and write where the documents of each split are; in words how the splits came to be."""
        runs = split_runs([each.ends for each in self._files], self._names, shares)
        bare = [name for name, found in runs.items() if not found]
        if bare:
            raise DataError(f"The corpus has no documents for {' and '.join(bare)}.", where=str(self.paths[0]))
        splits = {name: self._write(folder, name, found, made) for name, found in runs.items()}
        self._tell_open_documents(findings)
        sizes = {name: counted(splits[name].rows, "document") for name in shares if name not in self._names}
        if not sizes:
            return splits, "train, valid and test as given"
        listed = " and ".join(f"{name} ({size})" for name, size in sizes.items())
        return splits, f"{listed} split off train: runs of neighbours out of many places, always the same"

    def _write(self, folder: Path, name: str, runs: Sequence[DocumentRun], made: Provenance) -> SplitReport:
        figures, state, stretches, label_bytes = SplitFigures(), hashlib.blake2b(digest_size=16), list[Stretch](), 0
        labels = 0  # the first token of a document too
        with DocumentWriter(store_path(folder, name)) as store:
            for run in runs:
                source = self._files[run.file]
                stretch = Stretch(run.file, source.begin(run.first), source.begin(run.stop))
                stretches += [stretch] if stretch.end > stretch.begin else []
                for ids, mask, numbers, lengths, counts in self._pieces(run):
                    store.add(lengths, counts, run.file, numbers)
                    figures.add_documents(lengths, counts)
                    state.update(ids.tobytes() + mask.tobytes() + lengths.astype("<u4").tobytes())
                    labels += int(np.count_nonzero(mask))
                    label_bytes += int(self._text_bytes[ids[mask]].sum())
            if not labels:
                raise DataError(f"The documents of {name} have no labels.", where=source.file.path)
            corpus = Corpus(tuple(each.file for each in self._files), tuple(stretches))
            paths = [each.file.path for each in self._files]
            store.finish(corpus, metadata_of(made, state.hexdigest(), paths, label_bytes / labels))
        return figures.report(label_bytes)

    def _pieces(self, run: DocumentRun) -> Iterator[tuple[np.ndarray, ...]]:
        """Read some documents at a time, without empty ones.

        Gives ids and which of them are labels (tokens,); numbers from 1, lengths and labels of the documents
        (documents,). A document's first token is not counted as a label: nothing is before it to predict it from.
        """
        source, first = self._files[run.file], run.first
        while first < run.stop:
            begin = source.begin(first)
            stop = min(run.stop, max(first + 1, int(np.searchsorted(source.ends, begin + PIECE, side="right"))))
            ids, mask = self._tokens(source.file, begin, source.begin(stop))
            ends = source.ends[first:stop] - begin
            lengths = np.diff(ends, prepend=0)
            there = np.flatnonzero(lengths)
            starts, last = (ends - lengths)[there], ids[ends[there] - 1]
            if len(there):
                self._documents += len(there)
                self._open_ends.update(last[~self._closing[last]].tolist())
                counts = np.add.reduceat(mask, starts, dtype=np.int64) - mask[starts]
                yield ids, mask, first + there + 1, lengths[there], counts
            first = stop

    def _tokens(self, file: TokenFile, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Read ids and which of them are labels; raises DataError for an id that the model does not know."""
        path, width, count = Path(file.path), file.token_bytes, end - begin
        ids = np.frombuffer(self._open.read(path, begin * width, count * width), dtype=f"<u{width}")
        mask = np.ones(count, dtype=np.bool_)
        if file.masked:
            mask = np.frombuffer(self._open.read(loss_path(path), begin, count), dtype=np.uint8) != 0
        unknown = np.flatnonzero(ids >= self._vocabulary)
        if len(unknown):
            raise DataError(
                "A file of tokens has an id that the model does not know.",
                where=f"{file.path}, token {begin + int(unknown[0]) + 1}",
                expected=f"ids below {self._vocabulary}",
                got=str(int(ids[unknown[0]])),
                do="take the model whose tokenizer made the corpus, or tokenize it with this model's",
            )
        self._read += count
        self._tell(f"{self._read:,} of {sum(each.file.tokens for each in self._files):,} tokens checked")
        return ids, mask

    def _tell_open_documents(self, findings: Findings) -> None:
        """Report documents that no stop token ends, once all are read."""
        count = self._open_ends.total()
        if count:
            most = self._open_ends.most_common(MOST_TOLD)
            spelled = ", ".join(f"{self._tokenizer.token_of(number)!r} ({times})" for number, times in most)
            share = f"{count} of {self._documents} ({100 * count / self._documents:.3g} %)"
            findings.add("DOCUMENTS-OPEN", f"{share}, most with {spelled}", count)

    def _samples(self) -> Iterator[list[int]]:
        """The beginnings of documents from all over the corpus, without the token that ends them."""
        having = [each for each in self._files if len(each.ends)]
        for each in having[:: -(-len(having) // SAMPLED) or 1]:
            long = np.flatnonzero(np.diff(each.ends, prepend=0) > LEAST_TOKENS)
            wanted, width = min(max(1, SAMPLED // len(having)), len(long)), each.file.token_bytes
            for number in long[np.linspace(0, len(long) - 1, wanted).astype(np.int64)].tolist():
                begin, end = each.begin(number), each.begin(number + 1)
                size = min(SAMPLE_TOKENS, end - begin - 1) * width
                yield np.frombuffer(self._open.read(Path(each.file.path), begin * width, size), f"<u{width}").tolist()


def _is_same(ids: list[int], tokenizer: ChatTokenizer) -> bool:
    """Whether the text of these ids has them; a token at its beginning may be missing, or one more there."""
    again, kept = tokenizer.encode_chat(tokenizer.spell(ids)), ids[:-TAIL]
    return any(again[at : at + len(kept)] == kept for at in (0, 1)) or again[: len(kept) - 1] == kept[1:]


def byte_lengths(tokenizer: ChatTokenizer) -> np.ndarray:
    """(ids,) UTF-8 bytes of each, int64; special tokens, which are no text, have none.

    Added tokens that are not special are text, as the runs of spaces of GPT-NeoX's tokenizer are. A byte-level
    vocabulary spells each byte as one character; any other has the text itself.
    """
    definition = tokenizer.definition
    is_bytes = '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    added = {token["id"]: token.get("special", True) for token in definition.get("added_tokens") or ()}
    found = np.zeros(tokenizer.size, dtype=np.int64)
    for number in range(tokenizer.size):
        piece = tokenizer.token_of(number)
        if number in added:
            found[number] = 0 if added[number] else len(piece.encode("utf-8"))
        elif is_bytes or BYTE.fullmatch(piece):
            found[number] = len(piece) if is_bytes else 1
        else:
            found[number] = len(piece.removeprefix(CONTINUES).replace(SPACE, " ").encode("utf-8"))
    return found
