"""The validated rows as tokens, cut to the length of this run."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core import paths
from safetrain.core.data.chat import Rendered, render
from safetrain.core.data.jsonl import bad_rows, read_rows
from safetrain.core.data.rows import RowError
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import ConfigError


@dataclass(frozen=True)
class LoadedRows:
    """Rows as tokens, and what cutting them to the length of the run took away."""

    rows: list[Rendered]
    cut_rows: int
    lost_labels: int


@dataclass(frozen=True)
class TrainingRows:
    """The rows that a training will see, as tokens."""

    train: list[Rendered]
    valid: list[Rendered]


def load_training_rows(base: Path, max_examples: int | None) -> TrainingRows:
    """Every validated row that a training of this model would see, whole; raises as ``load_rendered``."""
    tokenizer = ChatTokenizer(base)
    train, valid = (paths.VALIDATED / f"{name}.jsonl" for name in ("train", "valid"))
    return TrainingRows(
        load_rendered(train, tokenizer, max_examples=max_examples).rows, load_rendered(valid, tokenizer).rows
    )


def load_rendered(
    path: Path, tokenizer: ChatTokenizer, max_seq_length: int | None = None, max_examples: int | None = None
) -> LoadedRows:
    """The first ``max_examples`` rows of ``path`` as at most ``max_seq_length`` tokens each, a label left in each."""
    if not path.is_file():
        raise ConfigError(f"{path.name} is not there yet.", where=str(path), do="run 'dvc repro validate_data' first")
    rows, faults, cut_rows, lost_labels = [], [], 0, 0
    for sourced in read_rows(path)[:max_examples]:
        try:
            whole = render(sourced.row, tokenizer)
        except RowError as error:
            faults.append(f"{sourced.where}: {error}")
            continue
        rows.append(whole.cut(max_seq_length) if max_seq_length else whole)
        cut_rows += len(rows[-1].ids) < len(whole.ids)
        lost_labels += whole.trained_tokens - rows[-1].trained_tokens
    if faults:
        raise bad_rows(faults)
    return LoadedRows(rows, cut_rows, lost_labels)


def digest(rows: Sequence[Rendered]) -> str:
    """A fingerprint of tokens and masks."""
    state = hashlib.blake2b(digest_size=16)
    for row in rows:
        state.update(repr((row.ids, row.trained)).encode())
    return state.hexdigest()
