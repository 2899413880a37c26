"""The report next to an exported file: how it compares with the tuned model."""

from dataclasses import dataclass

from safetrain.core.records.fusing import Likeness


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's own results with the file, on some of the rows."""

    version: str  # of llama-cpp-python
    texts: int  # that were split
    same_splits: int  # of these: into the training's own tokens
    explained_splits: int  # of the others: those that a note of the file is about
    chats: int  # that were rendered
    same_chats: int
    rows: int
    labels: int
    likeness: Likeness


@dataclass(frozen=True)
class GgufReport:
    """OUT.gguf.json: what the file is, and what it keeps of the tuned model on the validation rows."""

    file: str
    type: str  # of most weights
    size_bytes: int
    architecture: str  # as llama.cpp calls it
    tokenizer: str
    base_model: str
    base_fingerprint: str
    adapter_fingerprint: str  # empty without an adapter
    rows: int
    labels: int
    base: Likeness | None  # None without an adapter
    tuned: Likeness
    read_back: Likeness | None  # the file's weights, read again and computed by mlx; None where memory is too small
    kept: float | None  # share of what was learnt; None without an adapter, or where nothing was read back
    llama_cpp: LlamaCpp | None  # None where it is not installed
    notes: tuple[str, ...]
