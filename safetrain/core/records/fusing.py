"""How much of the training a fused or exported model keeps: its report and the limits. Pure functions."""

import math
from dataclasses import dataclass

from safetrain.core.errors import ModelError
from safetrain.core.formatting import size_text
from safetrain.core.records.metrics import NO_CHANGE

REPORT, EXPORT_REPORT = "fuse_report.json", "export_report.json"  # of fuse; of PEFT
Z95 = 1.959964  # two-sided 95 % of a normal distribution


@dataclass(frozen=True)
class Likeness:
    """A model compared with the tuned one on the validation rows. An answer is a whole row's labels, read greedily."""

    loss: float  # nats per label
    divergence: float  # KL(tuned || this model), nats per label
    same_answers: float  # share of rows in which both choose the same token at every label
    right_answers: int  # rows in which this model chooses every label
    lost_answers: int  # rows that only the tuned model has right
    won_answers: int  # rows that only this model has right


@dataclass(frozen=True)
class ExportReport:
    """fuse_report.json, export_report.json or OUT.gguf.json: what was written, loaded again and compared."""

    type: str  # of the changed weights: 8 bits, float, q8_0, peft
    size_bytes: int
    base_model: str
    base_fingerprint: str
    adapter_fingerprint: str
    rows: int
    labels: int
    base: Likeness
    tuned: Likeness
    written: Likeness
    kept: float  # share of the improvement
    stop_ids: tuple[int, ...]  # tokens that end an answer after training


def require_effect(base: Likeness, adapter: str) -> None:
    """Raise ModelError if base and tuned model are the same on every label."""
    if base.divergence < NO_CHANGE:
        raise ModelError(
            "The adapter changes nothing: tuned and base model are the same on every validation row.",
            where=adapter,
            got=f"a divergence of {base.divergence:.1e} nats per label",
            do="train it with a higher train.learning_rate or more steps",
        )


def kept_share(base: Likeness, tuned: Likeness, other: Likeness) -> float:
    """Share kept of the loss improvement, if any, or of the KL from base to tuned model: the smaller one.

    Rounding may lower the loss by chance, even if nothing of the training is left.
    """
    gained, way = base.loss - tuned.loss, 1 - other.divergence / base.divergence
    return min((base.loss - other.loss) / gained, way) if gained > 0 else way


def refusal(share: float, other: Likeness, may_lose: float) -> str:
    """Say why a fused or exported model fails; empty if it passes. With ``may_lose`` 1, only its loss must be a number.

    It also fails if it loses more right answers than the 95 % interval of chance allows.
    """
    if not math.isfinite(other.loss):
        return "has a loss that is not a number"
    if may_lose >= 1:
        return ""
    if share < 1 - may_lose:
        return f"loses more than {100 * may_lose:g} % of the improvement"
    fall = other.lost_answers - other.won_answers
    if fall > Z95 * math.sqrt(other.lost_answers + other.won_answers):
        return f"answers {fall} fewer rows correctly"
    return ""


HEADER = f"{'':<28}{'size':>10}{'keeps':>9}{'loss':>9}{'same answers':>15}"


def describe(name: str, size_bytes: int, share: float, other: Likeness, rows: int, verdict: str = "") -> str:
    """Make one line of the table below ``HEADER``."""
    same = f"{round(other.same_answers * rows)} of {rows}"
    line = f"{name:<28}{size_text(size_bytes):>10}{f'{100 * share:.1f} %':>9}{other.loss:>9.4f}{same:>15}  {verdict}"
    return line.rstrip()
