"""Token stores for tests, and the largest update of a run of which no more is known than its longest row."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from safetrain.core.data.store import Provenance, store_path
from safetrain.core.data.token_rows import Question, TokenRow
from safetrain.core.memory.terms import width_of
from safetrain.core.model.files import tokenizer_hash
from safetrain.core.records.settings import Shape
from safetrain.data.split import StoreWriter

MADE = Provenance("tokenizer", "source", "2026-01-31", (1, 2), "<think>")


def add_row(writer: StoreWriter, row: TokenRow, line: int) -> None:
    """Add one row."""
    numbers = (len(row), row.labels, 0, line)
    writer.add(row.ids, row.trained, *(np.array([number]) for number in numbers))


def write_store(
    path: Path, rows: Iterable[TokenRow], made: Provenance = MADE, questions: Sequence[Question] = ()
) -> Path:
    """A store of these rows; questions stand in the order of their rows."""
    with StoreWriter(path) as writer:
        for number, row in enumerate(rows):
            add_row(writer, row, number + 1)
            for each in questions:
                if each.row == number:
                    writer.add_question(each)
        writer.finish(made, [f"{path.stem}.jsonl"])
    return path


def write_stores(folder: Path, base: Path, train: Iterable[TokenRow], valid: Iterable[TokenRow]) -> None:
    """What a training of ``base`` reads."""
    made = Provenance(tokenizer_hash(base), "", "2026-01-31", (2,), "")
    write_store(store_path(folder, "train"), train, made)
    write_store(store_path(folder, "valid"), valid, made)


def worst_update(longest_row: int, rows: int) -> Shape:
    """Nothing but rows as long as the longest, every token a label."""
    tokens = rows * width_of(longest_row - 1, rectangles=False)
    return Shape(rows, longest_row - 1, tokens, tokens)
