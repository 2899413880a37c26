"""Turns answers and losses into scores with their uncertainty, and says them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.core.errors import TrainingError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.forgetting import FORGETS, KEEPS, Forgetting, describe_forgetting, verdict_on
from safetrain.core.records.intervals import wilson_interval
from safetrain.core.records.reports import Evaluation, Improvement, Score
from safetrain.core.records.text_scores import chrf, token_f1
from safetrain.core.storage import paths

NOT_A_NUMBER = {
    "base": "check the base model: safetrain selftest MODEL; its files may be damaged, or overflow in their type",
    "tuned": "the adapter is damaged, or of a diverged training: train again, with a lower train.learning_rate",
}


def score(loss: float, answers: Sequence[str], expected: Sequence[str]) -> Score:
    """Loss in nats per token; how many ``answers`` are exactly ``expected``, outer spaces apart, and how near they are.

    The two are of one length; without any there is the loss alone.
    """
    perplexity = math.exp(min(loss, 700.0))
    if not expected:
        return Score(loss, perplexity, *[None] * 9)
    pairs = [(answer.strip(), wanted.strip()) for answer, wanted in zip(answers, expected, strict=True)]
    right = sum(answer == wanted for answer, wanted in pairs)
    shares = [(right / len(pairs), *wilson_interval(right, len(pairs)))]
    for measure in (token_f1, chrf):
        values = [measure(*pair) for pair in pairs]
        shares.append((sum(values) / len(values), *wilson_interval(sum(values), len(values))))
    return Score(loss, perplexity, *shares[0], *shares[1], *shares[2])


def require_number(loss: float, name: str, rows: str) -> float:
    """The loss of the ``name`` model (base, tuned, …) on ``rows``; raises TrainingError where it is not a number."""
    if math.isfinite(loss):
        return loss
    raise TrainingError(
        f"The loss of the {name} model on the {rows} is not a number.",
        where=str(paths.ADAPTERS) if name == "tuned" else "",
        got=str(loss),
        do=NOT_A_NUMBER["tuned" if name == "tuned" else "base"],
    )


def require_other_loss(base: float, tuned: float, rows: str, adapter: str) -> None:
    """Raise TrainingError where base and tuned model have the same loss to the last bit: the adapter does nothing."""
    if base == tuned:
        raise TrainingError(
            f"The adapter changes nothing: base and tuned model have the same loss on the {rows}.",
            where=adapter,
            got=f"{tuned:.6f} nats per label, both",
            do="throw this training away with 'safetrain discard', and train with a higher train.learning_rate",
        )


def describe_evaluation(found: Evaluation, more: str = "set evaluate.max_questions") -> list[str]:
    """Lines for a terminal: both models, the differences between them, and what was not answered.

    ``more``: how to have more questions answered.
    """
    lines = [describe_score("base", found.base), describe_score("tuned", found.tuned)]
    lines += [describe_improvement(found.improvement), describe_forgetting(found.forgetting)]
    if not found.questions:
        lines.append("no questions in the test file: answers are not measured")
    elif found.answered < found.questions:
        lines.append(f"answers on {found.answered} of {counted(found.questions, 'question')}, seed 0: {more} for more")
    return [*lines, *_table_of_groups(found)]


def _table_of_groups(found: Evaluation) -> list[str]:
    rows = [("category", "questions", "base exact", "tuned exact (95 %)", "gain in loss, nats per label")]
    for group in found.groups:
        low, high = 100 * group.tuned_exact_match_low, 100 * group.tuned_exact_match_high
        gain, half = group.improvement.nats_per_label, group.improvement.plus_minus
        rows.append((
            printable(group.name) or "(none)",
            str(group.questions),
            f"{100 * group.base_exact_match:.1f} %",
            f"{100 * group.tuned_exact_match:.1f} % ({low:.1f} to {high:.1f})",
            f"{gain:.2f}" if half is None else f"{gain:.2f} ± {half:.2f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines if found.groups else []


def describe_score(name: str, result: Score) -> str:
    """One line: ``base   loss 2.4131  perplexity 11.17  exact match …``."""
    line = f"{name:<6} loss {result.loss:.4f}  perplexity {result.perplexity:.2f}"
    if result.exact_match is None or result.exact_match_low is None or result.exact_match_high is None:
        return line
    return (
        f"{line}  exact match {100 * result.exact_match:.1f} % "
        f"({100 * result.exact_match_low:.1f} to {100 * result.exact_match_high:.1f})  "
        f"token F1 {result.token_f1:.3f}  chrF {result.chrf:.3f}"
    )


def describe_improvement(found: Improvement) -> str:
    """``better than base by 2.41 ± 0.06 nats per label, n = 220``."""
    gain, half = found.nats_per_label, found.plus_minus
    if half is None:
        return f"{'better' if gain > 0 else 'worse'} than base by {abs(gain):.2f} nats per label on one row: no proof"
    places = 2 if half >= 0.005 else 4
    size = f"by {abs(gain):.{places}f} ± {half:.{places}f} nats per label, n = {found.rows}"
    if abs(gain) <= half:
        return f"not shown to differ from base: {'better' if gain > 0 else 'worse'} {size}"
    return f"{'better' if gain > 0 else 'worse'} than base {size}"


@dataclass(frozen=True)
class Thresholds:
    """Section gate of params.yaml. None: not looked at."""

    least_gain: float  # nats per label, on the test rows
    least_exact_match: float | None
    most_forgotten: float | None  # nats per token, on the general text


@dataclass(frozen=True)
class Verdict:
    """Whether the tuned model is better. ``exit_code``: 0 it is, 1 it is not, 2 it forgets, or it cannot be said."""

    exit_code: int
    title: str
    reasons: tuple[str, ...]


def judge(found: Improvement, tuned: Score, forgotten: Forgetting, asked: Thresholds) -> Verdict:
    """By the intervals: above its threshold a measure passes, below it fails, across it nothing can be said.

    What is forgotten has to be below its threshold; where that cannot be measured, it does not count.
    """
    half = math.inf if found.plus_minus is None else found.plus_minus
    low, high = found.nats_per_label - half, found.nats_per_label + half
    measures = [("gain in loss, nats per label", low, high, asked.least_gain)]
    if asked.least_exact_match is not None:
        ends = tuned.exact_match_low, tuned.exact_match_high
        low = -math.inf if ends[0] is None else ends[0]  # no question was answered
        high = math.inf if ends[1] is None else ends[1]
        measures.append(("exact match", low, high, asked.least_exact_match))
    codes, reasons = list[int](), list[str]()
    for name, low, high, least in measures:
        codes.append(0 if low > least else 1 if high <= least else 2)
        word = ("is above", "is not above", "may be above or below")[codes[-1]]
        reasons.append(f"{name}: {low:.4g} to {high:.4g} {word} {least:g}")
    forgets = False
    if asked.most_forgotten is not None:
        level = verdict_on(forgotten, asked.most_forgotten)
        forgets = level == FORGETS
        codes.append(0 if level == KEEPS else 2)
        reasons.append(describe_forgetting(forgotten, asked.most_forgotten))
    code = 1 if 1 in codes else max(codes)
    title = "forgets" if forgets and code == 2 else ("better", "not better", "it cannot be said")[code]
    return Verdict(code, title, tuple(reasons))
