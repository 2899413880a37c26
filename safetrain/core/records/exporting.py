"""Reports next to exported files, OUT.gguf.json and export_report.json: how they compare with the tuned model."""

from dataclasses import dataclass

from safetrain.core.records.fusing import Likeness

REPORT = "export_report.json"  # of PEFT


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
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PeftReport:
    """export_report.json: the exported adapter, read again, beside base and tuned model on the same rows."""

    base_model: str
    base_fingerprint: str
    base_bits: int | None  # that the adapter was trained on; PEFT then has a float base
    base_name: str  # in PEFT's configuration
    adapter_fingerprint: str
    rows: int
    labels: int
    base: Likeness
    tuned: Likeness
    exported: Likeness
    kept: float  # share of what was learnt
    stop_ids: tuple[int, ...]  # tokens that end an answer, by the training
