"""The rows that a training sees, as the token stores of data/validated have them. No tokenizer is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.store import Store, open_store, store_path
from safetrain.core.data.token_rows import TokenRows
from safetrain.core.data.tokenizer_files import tokenizer_hash
from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import Taught
from safetrain.core.storage import paths


@dataclass(frozen=True)
class TrainingRows:
    """The rows to train and to validate on, hashes of them, and what they teach about answers."""

    train: TokenRows
    valid: TokenRows
    train_digest: str = ""  # of all rows of the store, whole
    valid_digest: str = ""
    taught: Taught | None = None


def load_training_rows(
    base: Path,
    max_examples: int | None,
    max_seq_length: int | None = None,
    beat: Callable[[], None] = lambda: None,
) -> TrainingRows:
    """The first ``max_examples`` rows to train on and all to validate on, cut to ``max_seq_length`` tokens if given.

    Raises ConfigError where they are missing, or made with another tokenizer than that of ``base``; DataError where
    they are damaged. ``beat`` is called as ``TokenRows.cut`` does.
    """
    train, valid = _open_both(base)
    rows = [train.rows if max_examples is None else train.rows[:max_examples], valid.rows]
    if max_seq_length is not None:
        rows = [each.cut(max_seq_length, beat) for each in rows]
    made = train.made
    taught = Taught(made.stop_ids, made.opening, made.asked, made.system)
    return TrainingRows(rows[0], rows[1], train.digest, valid.digest, taught)


def load_valid_rows(base: Path, max_seq_length: int) -> TokenRows:
    """The rows that a training of ``base`` validates on, cut as there; raises ConfigError and DataError as above."""
    return open_store(store_path(paths.VALIDATED, "valid"), tokenizer_hash(base)).rows.cut(max_seq_length)


def _open_both(base: Path) -> tuple[Store, Store]:
    tokenizer = tokenizer_hash(base)
    train, valid = (open_store(store_path(paths.VALIDATED, split), tokenizer) for split in ("train", "valid"))
    if train.made.settings != valid.made.settings:
        raise ConfigError(
            "The rows to train on and those to validate on were made with different settings.",
            where=str(paths.VALIDATED),
            do="run 'dvc repro -f -s validate_data'",
        )
    return train, valid
