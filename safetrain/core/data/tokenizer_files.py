"""The files that decide how a text becomes tokens, compared by a hash without loading a tokenizer."""

import hashlib
from pathlib import Path

NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",  # which ids end an answer
)
TEMPLATES = "additional_chat_templates/*.jinja"


def tokenizer_hash(folder: Path) -> str:
    """A hash of names and contents of the tokenizer's, the chat template's and the stop ids' files in ``folder``."""
    state = hashlib.blake2b(digest_size=16)
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    for path in [*found, *sorted(folder.glob(TEMPLATES))]:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b")
        state.update(f"{path.relative_to(folder).as_posix()}\0".encode() + content.digest())
    return state.hexdigest()


def make_same_tokens(first: Path, second: Path) -> bool:
    """Whether two models split texts in the same way; their stop tokens may differ."""
    return _splitting(first) == _splitting(second)


def _splitting(folder: Path) -> bytes:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return (folder / name).read_bytes()
    return b""
