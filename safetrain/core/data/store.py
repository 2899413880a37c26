"""Token stores: the tokenized rows of each split in one file, written by validate_data and read in parts.

A store is a safetensors file (8 bytes of header length, JSON, little-endian arrays), so other tools can open it. It has
the ``ids`` of all rows in sequence, ``trained`` (whether a token is a label), ``row_ends``, ``label_counts``, the
source ``files`` and ``lines`` of each row, and for each question ``question_rows``, the ids of prompt and answer,
and the text. The metadata has the provenance.
"""

import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safetrain.core.data.token_rows import Question, TokenRows
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.model.files import read_header, tokenizer_hash
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json

VERSION = 3
KINDS = {"u1": "U8", "?": "BOOL", "<u4": "U32", "<u8": "U64"}  # names of types in the file
OF_ROWS = {"ids": "<u4", "trained": "?", "prompt_ids": "<u4", "answer_ids": "<u4", "question_texts": "u1",
           "row_ends": "<u8", "question_rows": "<u8", "prompt_ends": "<u8", "answer_ends": "<u8", "text_ends": "<u8",
           "label_counts": "<u4", "files": "<u4", "lines": "<u4"}  # fmt: skip
OF_QUESTIONS = {"prompt_ends": "prompt_ids", "answer_ends": "answer_ids", "text_ends": "question_texts"}
PAIRS = "pairs"  # the metadata key of preference data: each two rows are a pair (TokenRows.rows_per_pair)


@dataclass(frozen=True)
class Provenance:
    """The origin of a store; train refuses a store that was made with another model's tokenizer."""

    tokenizer: str  # hash of the files of tokenizer and chat template
    source: str  # hash of the data files
    made_on: str  # ISO date that templates used as today
    stop_ids: tuple[int, ...]  # stop ids that training teaches, and the model's own
    opening: str  # appended to the generation prompt, so that it ends as in training
    asked: str = ""  # removed from the end of the generation prompt before ``opening`` is appended
    system: str = ""  # the system prompt of all rows; empty if they differ or have none


class FileValues:
    """Numbers of one type that begin at an offset in a file. They stay readable if the file is replaced."""

    def __init__(self, path: Path, dtype: str, offset: int, count: int) -> None:
        """Raises OSError if the file cannot be opened."""
        self._dtype, self._offset, self._count = np.dtype(dtype), offset, count
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read the numbers of a slice; raises OSError if the disk fails."""
        start, stop, _ = place.indices(self._count)
        width = self._dtype.itemsize
        content = os.pread(self._descriptor, width * max(0, stop - start), self._offset + width * start)
        return np.frombuffer(content, self._dtype)


@dataclass(frozen=True)
class Store:
    """An open store. Its tokens and questions stay on the disk until they are needed."""

    made: Provenance
    digest: str  # of ids, labels and row boundaries
    label_bytes: float  # mean UTF-8 bytes of a label; 0: unknown
    files: tuple[str, ...]
    rows: TokenRows
    arrays: Mapping[str, FileValues]
    question_rows: np.ndarray  # (questions,) the row of each question
    question_bounds: tuple[np.ndarray, ...]  # (questions + 1,) in each array of OF_QUESTIONS

    def where(self, row: int) -> str:
        """``file:line`` of a row in the source data; ``file:row`` in a binary table."""
        file, line = (int(self.arrays[name][row : row + 1][0]) for name in ("files", "lines"))
        return f"{self.files[file]}:{line}"

    def line(self, row: int) -> int:
        """The line of data/validated that has a row, from 0."""
        return row // self.rows.rows_per_pair

    def question(self, number: int) -> Question:
        places = zip(OF_QUESTIONS.values(), self.question_bounds, strict=True)
        prompt, answer, text = (self.arrays[name][bounds[number] : bounds[number + 1]] for name, bounds in places)
        words = text.tobytes().decode("utf-8")
        return Question(int(self.question_rows[number]), tuple(prompt.tolist()), tuple(answer.tolist()), words)


def store_path(folder: Path, split: str) -> Path:
    """The token store of a split, next to its canonical rows."""
    return folder / f"{split}.tokens.safetensors"


def open_split(split: str, base: Path) -> Store:
    """Open a split's store in data/validated, for the model ``base``; raises as ``open_store`` does."""
    return open_store(store_path(paths.VALIDATED, split), tokenizer_hash(base))


def open_store(path: Path, tokenizer: str | None = None) -> Store:
    """Open a store; raises ConfigError if it is missing, or if its tokenizer's hash is not ``tokenizer``.

    Raises DataError if it is damaged.
    """
    try:
        store = _read(path)
    except FileNotFoundError:
        do = "run the pipeline: safetrain run"
        raise ConfigError(f"{path.name} does not exist yet.", where=path, do=do) from None
    if tokenizer is not None and store.made.tokenizer != tokenizer:
        what = "data/validated was made with another tokenizer or chat template."
        do = "run validate_data with the same model.path, or safetrain run"
        raise ConfigError(what, where=path, do=do)
    return store


def _read(path: Path) -> Store:
    """Read a store's header and the sizes of its rows; raises DataError if it is damaged or has another version."""
    try:
        header, begin = read_header(path)
        metadata, arrays = header["__metadata__"], dict[str, FileValues]()
        if metadata["version"] != str(VERSION):
            raise ValueError(metadata["version"])
        for name, dtype in OF_ROWS.items():
            offset, (count,) = begin + header[name]["data_offsets"][0], header[name]["shape"]
            arrays[name] = FileValues(path, dtype, offset, count)
        made, files = from_json(Provenance, json.loads(metadata["made"])), tuple(json.loads(metadata["files"]))
        origin = made, metadata["digest"], float(metadata["label_bytes"]), files
        bounds = [np.concatenate([[0], arrays[name][:].astype(np.int64)]) for name in ("row_ends", *OF_QUESTIONS)]
        starts, lengths = bounds[0][:-1], np.diff(bounds[0])
        unit = 2 if PAIRS in metadata else 1
        rows = TokenRows(
            arrays["ids"], arrays["trained"], starts, lengths, arrays["label_counts"][:], rows_per_pair=unit
        )
        return Store(*origin, rows, arrays, arrays["question_rows"][:], tuple(bounds[1:]))
    except (ValueError, LookupError, TypeError, AttributeError):
        what, do = "The token store is damaged, or has another version.", "make it again: safetrain run"
        raise DataError(what, where=path, do=do) from None


def read_made(path: Path) -> Provenance | None:
    """The provenance of a store; None if the store is missing, unreadable or of another version."""
    try:
        return _read(path).made
    except (OSError, DataError):
        return None


# Canonical rows: data/validated as text


Canonical = Mapping[str, Any]  # a row in the form of data/validated
Call = Mapping[str, Any]  # name, and arguments: an object, or text that is none


def canonical_rows(split: str) -> Iterator[Canonical]:
    """Read the rows of a split in the order of its store, a line at a time."""
    with (paths.VALIDATED / f"{split}.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def with_options(question: str, options: Sequence[str]) -> str:
    """The question with its options below, one in a line, unless it names them all."""
    is_listed = all(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", question) for option in options)
    return question if is_listed else "\n".join([question, *(f"- {option}" for option in options)])


def judged_turn(row: Canonical) -> Mapping[str, Any]:
    """The answer that is judged: the last trained turn that calls tools, or else the last one; empty without any."""
    if "completion" in row:
        return {"content": row["completion"]}
    turns = [each for each in row.get("messages", row.get("chosen", ())) if each["role"] == "assistant"]
    turns = [each for each in turns if each.get("weight") != 0]
    return next((each for each in turns[::-1] if each.get("tool_calls")), turns[-1] if turns else {})


def calls_due(row: Canonical) -> list[Call]:
    """The calls of tools in the judged answer; empty if it is a text."""
    return [call["function"] for call in judged_turn(row).get("tool_calls") or ()]


def same_value(one: object, other: object) -> bool:
    """Whether two JSON values are equal: numbers as numbers, keys in any order, lists in order."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def same_calls(found: list[Call], due: list[Call]) -> bool:
    """Whether two lists have the same names and arguments in the same order."""
    return len(found) == len(due) and all(
        one["name"] == other["name"] and same_value(one.get("arguments"), other.get("arguments"))
        for one, other in zip(found, due, strict=True)
    )
