"""evaluation.json: its records, how they are described, and the verdict of `safetrain result --gate`.

`dvc exp show` has a column per number in the order of the fields, the most important first.
"""

import math
from dataclasses import dataclass

from safetrain.core.errors import TrainingError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.schema import Gate
from safetrain.core.storage import paths

EVALUATION_SHARE, LEAST_EVALUATION_SECONDS = 0.06, 35.0  # share of the training's time; least time


def evaluation_seconds(training_seconds: float) -> float:
    """Time that evaluating both models may take after a training of ``training_seconds``."""
    return max(LEAST_EVALUATION_SECONDS, EVALUATION_SHARE * training_seconds)


@dataclass(frozen=True)
class Improvement:
    """Difference between the losses of base and tuned model on the same rows."""

    nats_per_label: float
    plus_minus: float | None  # half of the 95 % interval; None if one row has all labels
    rows: int  # with labels


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's scores on the test file; only the loss if the file has no questions."""

    exact_match: float | None = None  # share of the answered questions
    loss: float  # nats per label
    token_f1: float | None = None  # mean over the answered questions, 0 to 1
    perplexity: float
    exact_match_low: float | None = None  # 95 % interval
    exact_match_high: float | None = None


@dataclass(frozen=True)
class Sample:
    """A question and both models' answers. Losses are means over the row's labels, in nats."""

    question: str
    expected: str
    base: str
    tuned: str
    where: str  # file:line
    base_loss: float
    tuned_loss: float


@dataclass(frozen=True)
class PartLoss:
    """Tuned minus base on one part of the general text, in nats per token; None if not measured."""

    name: str  # English, Portuguese, code
    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval


@dataclass(frozen=True)
class Forgetting:
    """Tuned minus base on the parts of the general text that the base model knows; None if it knows none."""

    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval
    unsaid: str  # why it was not measured; empty if it was
    parts: tuple[PartLoss, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """evaluation.json: base and tuned side by side on the same rows."""

    improvement: Improvement
    tuned: Score
    base: Score
    forgetting: Forgetting
    rows: int
    rows_available: int  # in the test file; more than ``rows``: these are an evenly spread sample
    cut_rows: int  # truncated to the length of the training
    questions: int
    answered: int  # questions that both models answered: all, or a seeded sample
    adapter: str  # fingerprint of the measured adapter
    samples: tuple[Sample, ...]
    worst: tuple[Sample, ...]  # highest loss of the tuned model


def describe_evaluation(evaluation: Evaluation, more: str = "evaluate.max_examples") -> list[str]:
    """Sentences for a terminal. ``more`` is the option for more questions."""
    lines = [describe_loss(evaluation)]
    if evaluation.answered:
        lines.append(describe_exact_match(evaluation))
        lines.append(f"Token F1 {evaluation.base.token_f1:.3f} → {evaluation.tuned.token_f1:.3f}")
    lines.append(describe_forgetting(evaluation.forgetting))
    if remark := describe_answered(evaluation.answered, evaluation.questions, more):
        lines.append(remark)
    return [f"{line}." for line in lines]


def describe_answered(answered: int, questions: int, more: str) -> str:
    """Say how many questions were answered; empty if all were."""
    if not questions:
        return "Answers not measured: the test file has no questions"
    sample = f"{answered} of {questions} questions answered (seed 0): set {more} for more"
    return "" if answered == questions else sample


def describe_loss(evaluation: Evaluation) -> str:
    """``Test loss 2.677 → 0.014 nats per token: better by 2.66 ± 0.09 (95 %, 220 rows)``."""
    places = _places(evaluation.improvement.plus_minus) + 1
    losses = f"{evaluation.base.loss:.{places}f} → {evaluation.tuned.loss:.{places}f}"
    of = f" of {evaluation.rows_available:,}" if evaluation.rows < evaluation.rows_available else ""
    return f"Test loss {losses} nats per token: {describe_improvement(evaluation.improvement, of)}"


def describe_exact_match(evaluation: Evaluation) -> str:
    """``Exact match on 220 test questions: base 0.0 %, tuned 98.6 %``; requires an answered question."""
    base, tuned = (100 * (score.exact_match or 0.0) for score in (evaluation.base, evaluation.tuned))
    return f"Exact match on {counted(evaluation.answered, 'test question')}: base {base:.1f} %, tuned {tuned:.1f} %"


def describe_improvement(improvement: Improvement, of: str = "") -> str:
    """``better by 2.41 ± 0.06 (95 %, 220 rows)``, in nats per token. ``of``: `` of N`` if the rows are a sample."""
    gain, half = improvement.nats_per_label, improvement.plus_minus
    word, places = "better" if gain > 0 else "worse", _places(half)
    if half is None:
        return f"{word} by {abs(gain):.2f} on one row: no interval"
    size = f"{word} by {abs(gain):.{places}f} ± {half:.{places}f} (95 %, {improvement.rows:,}{of} rows)"
    return size if abs(gain) > half else f"no clear difference, {size}"


def describe_forgetting(forgetting: Forgetting) -> str:
    """``Forgetting: general text loss +0.31 ± 0.05 nats per token (English +0.12 ± 0.03, …)``."""
    if forgetting.nats_per_token is None or forgetting.plus_minus is None:
        return f"Forgetting not measured: {forgetting.unsaid}"
    parts = list[str]()
    for part in forgetting.parts:
        more, half = part.nats_per_token, part.plus_minus
        parts.append(f"{part.name} {'not measured' if more is None else f'{more:+.2f} ± {half:.2f}'}")
    places = _places(forgetting.plus_minus)
    size = f"{forgetting.nats_per_token:+.{places}f} ± {forgetting.plus_minus:.{places}f} nats per token"
    return f"Forgetting: general text loss {size} ({', '.join(parts)})"


def describe_sample(question: str, base: str, tuned: str) -> str:
    """Three lines for a terminal, each cut to its width."""
    return f"  {shortened(question)}\n    base:  {shortened(base)}\n    tuned: {shortened(tuned)}"


def shortened(text: str, most: int = 140) -> str:
    """One line of at most ``most`` characters that a terminal can show."""
    text = printable(" ".join(text.split()))
    return f"{text[: most - 1]}…" if len(text) > most else text or "(empty)"


def _places(half: float | None) -> int:
    return 2 if half is None or half >= 0.005 else 4


Verdict = tuple[int, str, list[str]]  # exit code: 0 better, 1 not, 2 forgets or undecided; a title; reasons


def judge(improvement: Improvement, tuned: Score, forgotten: Forgetting, limits: Gate) -> Verdict:
    """Compare intervals with thresholds: above passes, below fails, an interval across one is undecided.

    Forgetting must stay below its threshold; it is ignored if it was not measured.
    """
    measures = [
        _compare("gain in loss, nats per token", _ends(improvement.nats_per_label, improvement.plus_minus),
                 limits.least_gain)
    ]  # fmt: skip
    if limits.least_exact_match is not None:
        measures.append(_compare("exact match", (tuned.exact_match_low, tuned.exact_match_high),
                                 limits.least_exact_match))  # fmt: skip
    undecided = "could not be determined"
    if limits.most_forgotten is not None and forgotten.plus_minus is None:
        measures.append((0, describe_forgetting(forgotten)))
    elif limits.most_forgotten is not None:
        ends = _ends(forgotten.nats_per_token, forgotten.plus_minus)
        code, reason = _compare("forgetting, nats per token", ends, limits.most_forgotten)
        measures.append((0 if code == 1 else 2, reason))
        undecided = "forgets" if code == 0 else undecided
    codes = [code for code, _ in measures]
    code = 1 if 1 in codes else max(codes)
    return code, ("better", "not better", undecided)[code], [reason for _, reason in measures]


def _ends(middle: float | None, half: float | None) -> tuple[float | None, float | None]:
    return (None, None) if middle is None or half is None else (middle - half, middle + half)


def _compare(name: str, ends: tuple[float | None, float | None], limit: float) -> tuple[int, str]:
    """Compare an interval with ``limit``: 0 above, 1 not above, 2 undecided; and a sentence about it."""
    low, high = ends
    if low is None or high is None:
        return 2, f"{name}: no interval to compare with {limit:g}"
    code = 0 if low > limit else 1 if high <= limit else 2
    word = ("is above", "is not above", "may be above or below")[code]
    return code, f"{name}: {low:.4g} to {high:.4g} {word} {limit:g}"


def require_number(loss: float, name: str, rows: str) -> float:
    """Return the loss of the ``name`` model (base, tuned) on ``rows``; raise TrainingError if it is not a number."""
    if math.isfinite(loss):
        return loss
    where, do = "", "check the model: safetrain selftest MODEL (damaged files, or numbers that overflow their type)"
    if name == "tuned":
        where, do = str(paths.ADAPTERS), "train again with a lower train.learning_rate: the training diverged"
    raise TrainingError(
        f"The loss of the {name} model on the {rows} is not a number.", where=where, got=str(loss), do=do
    )


def require_other_loss(base: float, tuned: float, rows: str, adapter: str) -> None:
    """Raise TrainingError if base and tuned model have the same loss to the last bit: the adapter has no effect."""
    if base == tuned:
        raise TrainingError(
            f"The adapter changes nothing: base and tuned model have the same loss on the {rows}.",
            where=adapter,
            got=f"{tuned:.6f} nats per label, both",
            do="discard this training with 'safetrain discard', and train with a higher train.learning_rate",
        )
