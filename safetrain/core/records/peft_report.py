"""The record of an export to PEFT: export_report.json."""

from dataclasses import dataclass

from safetrain.core.records.fusing import Likeness

REPORT = "export_report.json"
OWN_READING = "safetrain's own reading of PEFT's files"


@dataclass(frozen=True)
class PeftReport:
    """export_report.json: the exported adapter, opened again, beside base and tuned model on the same rows."""

    base_model: str
    base_fingerprint: str
    base_bits: int | None  # that the adapter was trained on; PEFT then has a float base
    base_name: str  # in PEFT's configuration
    adapter_fingerprint: str
    opened_by: str  # the programs that opened it
    rows: int
    labels: int
    base: Likeness
    tuned: Likeness
    exported: Likeness
    kept: float  # share of what was learnt
    largest_difference: float | None  # of a logit at a label, from the tuned model's; None for an own reading
    stop_ids: tuple[int, ...]  # tokens that end an answer, by the training
