"""What a fused or exported model keeps of what was learnt: the reports next to it, and what decides. Pure."""

import math
from dataclasses import dataclass

from safetrain.core.errors import ModelError
from safetrain.core.formatting import size_text
from safetrain.core.records.metrics import NO_CHANGE

REPORT, EXPORT_REPORT = "fuse_report.json", "export_report.json"  # of fuse; of PEFT
Z95 = 1.959964  # two-sided 95 % of a normal distribution


@dataclass(frozen=True)
class Likeness:
    """A model on the validation rows, beside the tuned one. An answer is a whole row: all its labels, read greedily."""

    loss: float  # nats per label
    divergence: float  # KL(tuned || this model), nats per label
    same_tokens: float  # share of labels at which both choose the same token
    same_answers: float  # share of rows in which both choose the same token at every label
    right_answers: int  # rows in which it chooses every label
    lost_answers: int  # rows that the tuned model has right, and this one has not
    won_answers: int  # the other way round


@dataclass(frozen=True)
class Candidate:
    """A fused model that was written, opened and measured."""

    name: str
    size_bytes: int  # of its weights
    kept: float  # share of what was learnt
    likeness: Likeness
    refusal: str  # why it does not hold; empty where it does


@dataclass(frozen=True)
class FuseReport:
    """fuse_report.json: what became of the tuned model, on the same rows as base and tuned."""

    base_model: str
    base_fingerprint: str
    adapter_fingerprint: str
    rows: int
    labels: int
    may_lose: float  # share of what was learnt
    base: Likeness
    tuned: Likeness
    tried: tuple[Candidate, ...]  # in the order of trying
    chosen: str  # the name of one of these


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


def require_effect(base: Likeness, adapter: str) -> None:
    """Raise ModelError where base and tuned model are the same on every label."""
    if base.divergence < NO_CHANGE:
        raise ModelError(
            "The adapter changes nothing: the tuned model is its base on every validation row.",
            where=adapter,
            got=f"a divergence of {base.divergence:.1e} nats per label",
            do="train it: a learning rate of nearly 0 or a single update leaves it as it began",
        )


def kept_share(base: Likeness, tuned: Likeness, other: Likeness) -> float:
    """The smaller of two: of the improvement in loss, if there is one, and of the way from base to tuned distribution.

    Rounding may lower the loss by chance, also where nothing of what was learnt is left.
    """
    gained, way = base.loss - tuned.loss, 1 - other.divergence / base.divergence
    return min(way, (base.loss - other.loss) / gained) if gained > 0 else way


def refusal(share: float, other: Likeness, may_lose: float) -> str:
    """Why a fused or exported model does not hold, empty where it does; if all may get lost, it need only be a model.

    Answers are compared row by row: a fall beyond the 95 % interval of what would go both ways by chance.
    """
    if not math.isfinite(other.loss):
        return "its loss is not a number"
    if may_lose >= 1:
        return ""
    if share < 1 - may_lose:
        return f"loses more than {100 * may_lose:g} % of what was learnt"
    fall = other.lost_answers - other.won_answers
    if fall > Z95 * math.sqrt(other.lost_answers + other.won_answers):
        return f"answers {fall} rows fewer"
    return ""


HEADER = f"{'':<28}{'size':>10}{'keeps':>9}{'loss':>9}{'same answers':>15}"


def describe(name: str, size_bytes: int, share: float, other: Likeness, rows: int, verdict: str = "") -> str:
    """One line below ``HEADER``."""
    same = f"{round(other.same_answers * rows)} of {rows}"
    line = f"{name:<28}{size_text(size_bytes):>10}{f'{100 * share:.1f} %':>9}{other.loss:>9.4f}{same:>15}  {verdict}"
    return line.rstrip()
