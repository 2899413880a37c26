"""What PEFT gets of a tuned model: export_report.json."""

from dataclasses import dataclass

from safetrain.core.records.fusing import Likeness

REPORT = "export_report.json"


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
