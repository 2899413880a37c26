"""Writes corpora in datatrove's layout for tests: tokens, index and metadata, as its writer does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer
from tests.conftest import EMBEDDED

TEXTS = [
    f"The river number {number} is {number + 3} km long, and flows from the mountains of the north to the sea. "
    f"A town of {number * 7} people lies at its mouth." for number in range(60)
]  # fmt: skip


def write_ds(
    path: Path, documents: Sequence[Sequence[int]], *, token_bytes: int = 2, tokenizer: str | None = None
) -> Path:
    """One file of tokens with its index; with metadata where they are given."""
    ids = np.array([number for document in documents for number in document], dtype=f"<u{token_bytes}")
    write_ids(path, ids, np.cumsum([len(document) for document in documents]))
    if tokenizer is not None:
        path.with_name(f"{path.name}.metadata").write_text(f"{tokenizer}|{token_bytes}\n{len(ids)}\n{len(ids)} T")
    return path


def write_ids(path: Path, ids: np.ndarray, ends: np.ndarray) -> None:
    """The same from arrays: all ids, in the type that they have, and where each document ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids.tofile(path)
    ends.astype("<u8").tofile(path.with_name(f"{path.name}.index"))


def tokenized(texts: Sequence[str] = TEXTS, model: Path = EMBEDDED, *, closed: bool = True) -> list[list[int]]:
    """Texts as the model's ids, each with its end token where ``closed``."""
    tokenizer = ChatTokenizer(model)
    end = [tokenizer.end_id] if closed and tokenizer.end_id is not None else []
    return [[*tokenizer.encode_chat(text), *end] for text in texts]
