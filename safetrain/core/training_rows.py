"""The validated rows as tokens, cut to the length of this run, with the small check that they still can train."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from safetrain.core.chat import Rendered, render
from safetrain.core.errors import ConfigError
from safetrain.core.jsonl import bad_rows, read_rows
from safetrain.core.rows import RowError
from safetrain.core.tokenizer import ChatTokenizer


def load_rendered(path: Path, tokenizer: ChatTokenizer, max_seq_length: int | None = None) -> list[Rendered]:
    """Every row of ``path`` rendered and cut to ``max_seq_length`` tokens.

    Raises ConfigError when a row's answer is cut off entirely: it would give no label, and a batch of such rows a
    loss of 0/0.
    """
    rendered, faults, emptied = [], [], []
    for sourced in read_rows(path):
        try:
            item = render(sourced.row, tokenizer)
        except RowError as error:
            faults.append(f"{sourced.where}: {error}")
            continue
        short = item.cut(max_seq_length) if max_seq_length else item
        if short.trained_tokens == 0:
            emptied.append(sourced.where)
        rendered.append(short)
    if faults:
        raise bad_rows(faults)
    if emptied:
        raise ConfigError(
            f"With max_seq_length {max_seq_length}, {len(emptied)} rows lose their whole answer.",
            where=", ".join(emptied[:5]) + (" and more" if len(emptied) > 5 else ""),
            do="raise train.max_seq_length, or shorten these rows",
        )
    return rendered


def digest(rows: Sequence[Rendered]) -> str:
    """A fingerprint of tokens and masks."""
    state = hashlib.blake2b(digest_size=16)
    for row in rows:
        state.update(repr((row.ids, row.trained)).encode())
    return state.hexdigest()
