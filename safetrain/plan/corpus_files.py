"""Files of tokens as datatrove writes them: which a folder has, of which split, and whether each is whole.

`NAME.ds` are token ids, 2 or 4 bytes each, little-endian; `NAME.ds.index` says where each document ends, in tokens, as
uint64; `NAME.ds.loss`, if there, has a byte for each token, 0 where it is no label; `NAME.ds.metadata`, if there, names
the tokenizer and the bytes of a token (datatrove, src/datatrove/pipeline/tokens/tokenizer.py, TokenizedFile).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.token_files import TokenFile, loss_path, sampled_digest
from safetrain.core.errors import DataError
from safetrain.plan.files_by_split import files_by_split

SUFFIX = ".ds"
INDEX, METADATA = ".index", ".metadata"
UNNAMED = "Unknown Tokenizer"  # as datatrove writes
TOKEN_BYTES = (2, 4)
COPY_AGAIN = "copy the file again, with those beside it, or tokenize it again"


@dataclass(frozen=True)
class TokenizedFile:
    """A whole file of tokens. ``tokenizer`` is what its metadata names, empty where nothing does."""

    file: TokenFile
    ends: np.ndarray  # (documents,) int64, ascending
    tokenizer: str


def corpus_of(source: Path, *, links: bool = True) -> dict[str, tuple[Path, ...]]:
    """The files of tokens of ``source`` by split, none where it has none; those of no named split are train's.

    A file is of a split whose name stands in its own name or that of a folder below ``source``; with ``links``, folders
    that are links are followed. Raises DataError where some files are named train and others are of no split, or a
    part of the corpus cannot be read.
    """
    found = files_by_split(source, (SUFFIX,), links=links)
    unnamed = found.pop("", ())
    if unnamed and "train" in found:
        raise DataError(
            "Some files of tokens are named train, and others are of no split.",
            where=str(unnamed[0]),
            do="put them into a folder train beside valid and test, or take them away",
        )
    if unnamed:
        found = {"train": unnamed, **found}
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
        raise DataError(
            "A file of tokens and its index do not fit: one of them is cut off, or of another file.",
            where=str(path),
            expected=" or ".join(f"{each * tokens} bytes" for each in TOKEN_BYTES) + f" for {tokens} tokens",
            got=f"{size} bytes",
            do=COPY_AGAIN,
        )
    if tokens and said and said != width:
        raise DataError(
            "The metadata of a file of tokens says another size of a token than the file has.",
            where=str(path.with_name(path.name + METADATA)),
            expected=f"{width} bytes, by the file and its index",
            got=f"{said} bytes",
            do=COPY_AGAIN,
        )
    masked = loss_path(path).exists()
    if masked and loss_path(path).stat().st_size != tokens:
        raise DataError(
            "The mask of a file of tokens is not as long as the file.",
            where=str(loss_path(path)),
            expected=f"{tokens} bytes",
            got=f"{loss_path(path).stat().st_size} bytes",
            do=COPY_AGAIN,
        )
    return TokenizedFile(TokenFile(str(path), tokens, width or 2, masked, sampled_digest(path, masked)), ends, name)


def _read_index(path: Path) -> np.ndarray:
    """(documents,) where each ends."""
    index = path.with_name(path.name + INDEX)
    try:
        size = index.stat().st_size
        ends = np.fromfile(index, dtype="<u8", count=size // 8)
    except FileNotFoundError:
        raise DataError(
            "A file of tokens has no index: nothing says where its documents end.",
            where=str(path),
            expected=index.name,
            do="copy it too; datatrove writes it beside each file (save_index)",
        ) from None
    if size % 8 or np.any(ends[1:] < ends[:-1]) or (len(ends) and int(ends[-1]) >= 2**62):
        raise DataError(
            "The index of a file of tokens is damaged.",
            where=str(index),
            expected="numbers of 8 bytes that ascend",
            got=f"{size} bytes" if size % 8 else f"document {_first_descent(ends)} ends before the one before it",
            do=COPY_AGAIN,
        )
    lengths = np.diff(ends.view("<i8"), prepend=0)
    if len(lengths) and int(lengths.max()) >= 2**31:
        raise DataError("A document has 2 147 483 648 tokens or more.", where=str(index), do="divide it")
    return ends.view("<i8")


def _first_descent(ends: np.ndarray) -> int:
    return int(np.argmax(ends[1:] < ends[:-1])) + 2 if len(ends) > 1 else 1


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
