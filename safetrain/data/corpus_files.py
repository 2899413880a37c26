"""Files of tokens as datatrove writes them: which a folder has, of which split, whether each is whole, what is in it.

`NAME.ds` are token ids, 2 or 4 bytes each, little-endian; `NAME.ds.index` says where each document ends, in tokens, as
uint64; `NAME.ds.loss`, if there, has a byte for each token, 0 where it is not a label; `NAME.ds.metadata`, if there,
names the tokenizer and the bytes of a token (datatrove, src/datatrove/pipeline/tokens/tokenizer.py, TokenizedFile).
"""

import collections
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.token_files import OpenFiles, TokenFile, loss_path, sampled_digest
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.data.folders import files_by_split

SUFFIX = ".ds"
INDEX, METADATA = ".index", ".metadata"
UNNAMED = "Unknown Tokenizer"  # as datatrove writes
TOKEN_BYTES = (2, 4)
SAY_EVERY_SECONDS = 10.0
PIECE = 2**21  # tokens that are looked at together
SPACE = "▁"  # what SentencePiece writes for one
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTINUES = "##"  # WordPiece


@dataclass(frozen=True)
class TokenizedFile:
    """A whole file of tokens. ``tokenizer`` is what its metadata names, empty where nothing does."""

    file: TokenFile
    ends: np.ndarray  # (documents,) int64, ascending
    tokenizer: str


def corpus_of(source: Path) -> dict[str, tuple[Path, ...]]:
    """The files of tokens of ``source`` by split, none where it has none; those of no named split are train's.

    A file is of a split whose name stands in its own name or that of a folder below ``source``. Raises DataError where
    some files are named train and others are of no split, or a part of the corpus cannot be read.
    """
    found = files_by_split(source, (SUFFIX,))
    unnamed = found.pop("", ())
    if unnamed and "train" in found:
        what, do = "Some files of tokens are named train, and others are of no split.", "put them into a folder train"
        raise DataError(what, where=str(unnamed[0]), do=do)
    found = {"train": unnamed, **found} if unnamed else found
    if found and "train" not in found:
        raise DataError("The corpus has nothing to train on.", where=str(source), expected="a folder train")
    return found


def read_tokenized(path: Path) -> TokenizedFile:
    """Look at a file and those beside it; raises DataError where they do not fit each other."""
    ends = _read_index(path)
    tokens, size = int(ends[-1]) if len(ends) else 0, path.stat().st_size
    name, said = _read_metadata(path)
    width = size // tokens if tokens and size % tokens == 0 else 0
    if (tokens and width not in TOKEN_BYTES) or (not tokens and size):
        expected = " or ".join(f"{each * tokens} bytes" for each in TOKEN_BYTES) + f" for {tokens} tokens"
        what = "A file of tokens and its index do not fit: one of them is cut off, or of another file."
        raise _not_whole(what, path, expected, f"{size} bytes")
    if tokens and said and said != width:
        what = "The metadata of a file of tokens says another size of a token than the file has."
        raise _not_whole(what, path.with_name(path.name + METADATA), f"{width} bytes", f"{said} bytes")
    mask = loss_path(path)
    masked = mask.exists()
    if masked and mask.stat().st_size != tokens:
        what = "The mask of a file of tokens is not as long as the file."
        raise _not_whole(what, mask, f"{tokens} bytes", f"{mask.stat().st_size} bytes")
    return TokenizedFile(TokenFile(str(path), tokens, width or 2, masked, sampled_digest(path, masked)), ends, name)


def _not_whole(what: str, path: Path, expected: str, got: str) -> DataError:
    do = "copy the file again, with those beside it, or tokenize it again"
    return DataError(what, where=str(path), expected=expected, got=got, do=do)


def _read_index(path: Path) -> np.ndarray:
    """(documents,) where each ends."""
    index = path.with_name(path.name + INDEX)
    try:
        size = index.stat().st_size
        ends = np.fromfile(index, dtype="<u8", count=size // 8)
    except FileNotFoundError:
        what, do = "A file of tokens has no index: nothing says where its documents end.", "copy it too (save_index)"
        raise DataError(what, where=str(path), expected=index.name, do=do) from None
    if size % 8 or np.any(ends[1:] < ends[:-1]) or (len(ends) and int(ends[-1]) >= 2**62):
        descent = int(np.argmax(ends[1:] < ends[:-1])) + 2 if len(ends) > 1 else 1
        got = f"{size} bytes" if size % 8 else f"document {descent} ends before the one before it"
        raise _not_whole("The index of a file of tokens is damaged.", index, "numbers of 8 bytes that ascend", got)
    lengths = np.diff(ends.view("<i8"), prepend=0)
    if len(lengths) and int(lengths.max()) >= 2**31:
        raise DataError("A document has 2 147 483 648 tokens or more.", where=str(index), do="divide it")
    return ends.view("<i8")


def _read_metadata(path: Path) -> tuple[str, int]:
    """The tokenizer's name and the bytes of a token as the metadata says them: nothing and 0 where it does not."""
    try:
        first = path.with_name(path.name + METADATA).read_text(encoding="utf-8", errors="replace").split("\n")[0]
    except OSError:
        return "", 0
    name, bar, size = first.strip().rpartition("|")
    if not bar or not size.isdecimal():  # as older versions wrote it, of 2 bytes always
        name, size = first.strip(), "0"
    return "" if name.startswith(UNNAMED) else name, int(size)  # of such a one the size stands there twice


@dataclass(frozen=True)
class DocumentRun:
    """Documents of a file that stand one after the other."""

    file: int
    first: int
    stop: int


@dataclass(frozen=True)
class Known:
    """What the model knows: how many ids, which of them end a text, and the bytes of text of each."""

    vocabulary: int
    closing: np.ndarray  # (vocabulary,) bool
    text_bytes: np.ndarray  # (vocabulary,) int64


@dataclass
class SplitTally:
    """What was found in a split."""

    documents: int = 0
    labels: int = 0  # tokens that are labels, the first of a document too
    label_bytes: int = 0
    open_ends: collections.Counter[int] = field(default_factory=collections.Counter)  # last ids of open documents
    state: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))


class CorpusReader:
    """Goes through runs of documents, and says how far it is."""

    def __init__(self, files: Sequence[TokenizedFile], known: Known, said: Callable[[int], None]) -> None:
        """``said`` is told now and then how many tokens have been looked at."""
        self._files, self._known, self._said, self._open = files, known, said, OpenFiles()
        self._done, self._told = 0, time.monotonic()

    def read(self, run: DocumentRun, seen: SplitTally) -> tuple[np.ndarray, np.ndarray]:
        """Look at all tokens of a run; gives (documents,) lengths and labels of each. Raises DataError."""
        each = self._files[run.file]
        bounds = np.concatenate([[each.ends[run.first - 1] if run.first else 0], each.ends[run.first : run.stop]])
        lengths = np.diff(bounds)
        before = np.zeros(len(bounds), dtype=np.int64)  # labels before each border
        first = np.ones(len(lengths), dtype=np.int64)  # is the first token of each document a label
        ends_at = np.zeros(len(lengths), dtype=np.uint32)
        labels = 0
        for begin, ids, mask in self._pieces(each.file, int(bounds[0]), int(bounds[-1])):
            self._look(each.file, begin, ids, mask, seen)
            low, high = np.searchsorted(bounds, [begin + 1, begin + len(ids) + 1])  # borders behind a token of these
            ends_at[low - 1 : high - 1] = ids[bounds[low:high] - 1 - begin]
            if mask is not None:
                sums = labels + np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
                before[low:high] = sums[bounds[low:high] - begin]
                labels = int(sums[-1])
                low, high = np.searchsorted(bounds[:-1], [begin, begin + len(ids)])  # documents that begin here
                first[low:high] = mask[bounds[:-1][low:high] - begin]
        counts = np.diff(before) - first if each.file.masked else lengths - 1
        there = lengths > 0
        seen.documents += int(there.sum())
        seen.open_ends.update(ends_at[there & ~self._known.closing[ends_at]].tolist())
        seen.state.update(lengths.astype("<u4").tobytes())
        return lengths, np.maximum(counts, 0)

    def _look(self, file: TokenFile, begin: int, ids: np.ndarray, mask: np.ndarray | None, seen: SplitTally) -> None:
        if int(ids.max()) >= self._known.vocabulary:
            place = begin + int(np.argmax(ids >= self._known.vocabulary))
            raise DataError(
                "A file of tokens has an id that the model does not know.",
                where=f"{file.path}, token {place + 1}",
                expected=f"ids below {self._known.vocabulary}",
                got=str(int(ids[place - begin])),
                do="take the model whose tokenizer made the corpus, or tokenize it with this model's",
            )
        counts = np.bincount(ids if mask is None else ids[mask], minlength=self._known.vocabulary)
        seen.labels += int(counts.sum())
        seen.label_bytes += int(counts @ self._known.text_bytes)
        seen.state.update(ids.tobytes())
        if mask is not None:
            seen.state.update(mask.tobytes())
        self._done += len(ids)
        if time.monotonic() - self._told > SAY_EVERY_SECONDS:
            self._told = time.monotonic()
            self._said(self._done)

    def _pieces(self, file: TokenFile, begin: int, end: int) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Where each piece begins, its ids, and which are labels; None: all."""
        path, width = Path(file.path), file.token_bytes
        for place in range(begin, end, PIECE):
            count = min(PIECE, end - place)
            ids = np.frombuffer(self._open.read(path, place * width, count * width), dtype=f"<u{width}")
            mask = None
            if file.masked:
                mask = np.frombuffer(self._open.read(loss_path(path), place, count), dtype=np.uint8) != 0
            yield place, ids, mask


def byte_lengths(tokenizer: ChatTokenizer) -> np.ndarray:
    """(ids,) UTF-8 bytes of each, int64; special tokens, which are no text, have none.

    Added tokens that are not special are text, as the runs of spaces of GPT-NeoX's tokenizer are. A byte-level
    vocabulary spells each byte as one character; any other has the text itself.
    """
    definition = tokenizer.definition
    is_bytes = any("ByteLevel" in _types(definition.get(part)) for part in ("pre_tokenizer", "decoder"))
    found = np.zeros(tokenizer.size, dtype=np.int64)
    for piece, number in _vocabulary(definition):
        if number < len(found):
            found[number] = len(piece) if is_bytes else _piece_bytes(piece)
    for token in definition.get("added_tokens") or ():
        if token["id"] < len(found):
            found[token["id"]] = 0 if token.get("special", True) else len(token["content"].encode("utf-8"))
    return found


def _vocabulary(definition: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Pieces with their ids: a Unigram model lists them, others name the id of each."""
    vocabulary = definition["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        return ((str(entry[0]), number) for number, entry in enumerate(vocabulary))
    return ((str(piece), int(number)) for piece, number in vocabulary.items())


def _types(part: Any) -> set[str]:
    """The types of a component of the tokenizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inside = [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return {str(part.get("type")), *(name for each in inside for name in _types(each))}


def _piece_bytes(piece: str) -> int:
    if BYTE.fullmatch(piece):
        return 1
    return len(piece.removeprefix(CONTINUES).replace(SPACE, " ").encode("utf-8"))
