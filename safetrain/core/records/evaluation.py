"""evaluation.json and the reports of exports: their records, descriptions, and verdicts. Pure functions.

`dvc exp show` has a column per number of evaluation.json in the order of the fields, the most important first.
"""

import math
from dataclasses import dataclass

from safetrain.core.formatting import counted, printable, size_text
from safetrain.core.records.schema import Gate

REPORT, EXPORT_REPORT = "fuse_report.json", "export_report.json"  # written by fuse; by the export to PEFT
Z95 = 1.959964  # two-sided 95 % of a normal distribution
HEADER = f"{'':<28}{'size':>10}{'keeps':>9}{'loss':>9}{'same answers':>15}"


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
    loss: float  # nats per label; preference training: per pair
    token_f1: float | None = None  # mean over the answered questions, 0 to 1
    perplexity: float | None = None  # None for a loss per pair
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
    """Loss of tuned minus base on one part of the general text, in nats per token; None if not measured."""

    name: str  # English, Portuguese, code
    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval


@dataclass(frozen=True)
class Forgetting:
    """Loss of tuned minus base on parts of the general text that the base model knows; None if it knows none."""

    nats_per_token: float | None
    plus_minus: float | None  # half of the 95 % interval
    unsaid: str  # why it was not measured; empty if it was
    parts: tuple[PartLoss, ...]


@dataclass(frozen=True)
class Preference:
    """How the tuned model ranks the two answers of test pairs; rewards as in the training's loss."""

    accuracy: float  # share of pairs whose chosen answer has the higher reward
    accuracy_low: float  # 95 % interval
    accuracy_high: float
    margin: float  # mean reward of chosen minus rejected, in nats
    plus_minus: float | None  # half of the 95 % interval


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """evaluation.json: base and tuned side by side on the same rows."""

    improvement: Improvement
    tuned: Score
    base: Score
    forgetting: Forgetting
    rows: int
    rows_available: int  # rows in the test file; ``rows`` may be an evenly spread sample
    cut_rows: int  # truncated to the length of the training
    questions: int
    answered: int  # questions that both models answered: all, or a seeded sample
    adapter: str  # fingerprint of the measured adapter
    samples: tuple[Sample, ...]
    worst: tuple[Sample, ...]  # highest loss of the tuned model
    preference: Preference | None = None  # of pairs; then ``rows`` and losses are those of pairs


def describe_evaluation(evaluation: Evaluation) -> list[str]:
    """Describe an evaluation in sentences for a terminal."""
    lines = [describe_loss(evaluation), *describe_preference(evaluation.preference)]
    if evaluation.answered:
        base, tuned = (100 * (score.exact_match or 0.0) for score in (evaluation.base, evaluation.tuned))
        questions = counted(evaluation.answered, "test question")
        lines.append(f"Exact match on {questions}: base {base:.1f} %, tuned {tuned:.1f} %")
        lines.append(f"Token F1 {evaluation.base.token_f1:.3f} → {evaluation.tuned.token_f1:.3f}")
    lines.append(describe_forgetting(evaluation.forgetting))
    lines += describe_answered(evaluation.answered, evaluation.questions)
    return [f"{line}." for line in lines]


def describe_preference(preference: Preference | None) -> list[str]:
    """A text such as ``The chosen answer is preferred in 92.0 % of the pairs (95 %: 81 to 97 %), margin 1.2 ± 0.2``."""
    if preference is None:
        return []
    low, high, half = 100 * preference.accuracy_low, 100 * preference.accuracy_high, preference.plus_minus
    margin = f"margin {preference.margin:.2f}" + ("" if half is None else f" ± {half:.2f}")
    share = f"{100 * preference.accuracy:.1f} % of the pairs (95 %: {low:.0f} to {high:.0f} %)"
    return [f"The chosen answer is preferred in {share}, {margin}"]


def describe_answered(answered: int, questions: int) -> list[str]:
    """Say how many questions were answered; empty if all were."""
    if not questions:
        return ["Answers not measured: the test file has no questions"]
    return [f"{answered} of {questions} questions answered (random sample, seed 0)"] if answered < questions else []


def describe_loss(evaluation: Evaluation) -> str:
    """A text such as ``Test loss 2.677 → 0.014 nats per token: better by 2.66 ± 0.09 (95 %, 220 rows)``."""
    gain, half = evaluation.improvement.nats_per_label, evaluation.improvement.plus_minus
    term, unit = ("token", "row") if evaluation.preference is None else ("pair", "pair")
    places, word = _places(half), "better" if gain > 0 else "worse"
    losses = f"{evaluation.base.loss:.{places + 1}f} → {evaluation.tuned.loss:.{places + 1}f}"
    of = f" of {evaluation.rows_available:,}" if evaluation.rows < evaluation.rows_available else ""
    size = f"{word} by {abs(gain):.{places}f}"
    size += (
        f" on one {unit}: no confidence interval"
        if half is None
        else f" ± {half:.{places}f} (95 %, {evaluation.improvement.rows:,}{of} {unit}s)"
    )
    unclear = "no clear difference, " if half is not None and abs(gain) <= half else ""
    return f"Test loss {losses} nats per {term}: {unclear}{size}"


def describe_forgetting(forgetting: Forgetting) -> str:
    """A text such as ``Forgetting: general text loss +0.31 ± 0.05 nats per token (English +0.12 ± 0.03, …)``."""
    more, half = forgetting.nats_per_token, forgetting.plus_minus
    if more is None or half is None:
        return f"Forgetting not measured: {forgetting.unsaid}"
    parts = [
        f"{part.name} not measured"
        if part.nats_per_token is None
        else f"{part.name} {part.nats_per_token:+.2f} ± {part.plus_minus:.2f}"
        for part in forgetting.parts
    ]
    size = f"{more:+.{_places(half)}f} ± {half:.{_places(half)}f} nats per token"
    return f"Forgetting: general text loss {size} ({', '.join(parts)})"


def describe_sample(question: str, base: str, tuned: str) -> str:
    """Three lines for a terminal, with shortened texts."""
    return f"  {shortened(question)}\n    base:  {shortened(base)}\n    tuned: {shortened(tuned)}"


def shortened(text: str, most: int = 140) -> str:
    """One line of at most ``most`` characters that a terminal can show."""
    text = printable(" ".join(text.split()))
    return f"{text[: most - 1]}…" if len(text) > most else text or "(empty)"


def _places(half: float | None) -> int:
    return 2 if half is None or half >= 0.005 else 4


Verdict = tuple[int, str, list[str]]  # exit code: 0 better, 1 not, 2 forgets or undecided; a title; reasons


def judge(improvement: Improvement, tuned: Score, forgotten: Forgetting, limits: Gate) -> Verdict:
    """Compare intervals with thresholds: one above its threshold passes, one below fails, one around it is undecided.

    Forgetting must stay below its threshold; it is ignored if it was not measured.
    """
    gain = improvement.nats_per_label
    half = math.inf if improvement.plus_minus is None else improvement.plus_minus
    measures = [_compare("gain in loss, nats", gain - half, gain + half, limits.least_gain)]
    if limits.least_exact_match is not None:
        low, high = tuned.exact_match_low or 0.0, 1.0 if tuned.exact_match_high is None else tuned.exact_match_high
        measures.append(_compare("exact match", low, high, limits.least_exact_match))
    more, half, undecided = forgotten.nats_per_token, forgotten.plus_minus or 0.0, "could not be determined"
    if limits.most_forgotten is not None and more is None:
        measures.append((0, describe_forgetting(forgotten)))
    elif limits.most_forgotten is not None and more is not None:
        code, reason = _compare("forgetting, nats per token", more - half, more + half, limits.most_forgotten)
        measures.append((0 if code == 1 else 2, reason))
        undecided = "forgets" if code == 0 else undecided
    code = 1 if 1 in dict(measures) else max(dict(measures))
    return code, ("better", "not better", undecided)[code], [reason for _, reason in measures]


def _compare(name: str, low: float, high: float, limit: float) -> tuple[int, str]:
    """Compare an interval with ``limit``: 0 above, 1 not above, 2 undecided; and a sentence about it."""
    code = 0 if low > limit else 1 if high <= limit else 2
    word = ("is above", "is not above", "may be above or below")[code]
    return code, f"{name}: {low:.4g} to {high:.4g} {word} {limit:g}"


# How much of the training a fused or exported model keeps


@dataclass(frozen=True)
class Likeness:
    """A model compared with the tuned one on validation rows. An answer: the likeliest token at each label of a row."""

    loss: float  # nats per label
    divergence: float  # KL(tuned || this model), nats per label
    same_answers: float  # share of rows in which both choose the same token at every label
    right_answers: int  # rows in which this model chooses every label
    lost_answers: int  # rows that only the tuned model has right
    won_answers: int  # rows that only this model has right


@dataclass(frozen=True)
class ExportReport:
    """fuse_report.json, export_report.json or OUT.gguf.json: the written model, loaded again and compared."""

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


def kept_share(base: Likeness, tuned: Likeness, other: Likeness) -> float:
    """The share kept of the loss improvement or of the KL divergence from base to tuned model, whichever is smaller.

    Rounding may lower the loss by chance, even if nothing of the training is left.
    """
    gained, way = base.loss - tuned.loss, 1 - other.divergence / base.divergence
    return min(way, (base.loss - other.loss) / gained) if gained > 0 else way


def refusal(share: float, other: Likeness, may_lose: float) -> str:
    """Say why a fused or exported model fails; empty if it passes. ``may_lose`` 1 accepts any loss that is a number.

    It also fails if it loses more right answers than the 95 % interval of chance allows.
    """
    if not math.isfinite(other.loss):
        return "has a loss that is not a number"
    if may_lose >= 1:
        return ""
    if share < 1 - may_lose:
        return f"loses more than {100 * may_lose:g} % of the improvement"
    fall = other.lost_answers - other.won_answers
    chance = Z95 * math.sqrt(other.lost_answers + other.won_answers)
    return f"answers {fall} fewer rows correctly" if fall > chance else ""


def describe_likeness(name: str, size_bytes: int, share: float, other: Likeness, rows: int, verdict: str = "") -> str:
    """Make one line of the table below ``HEADER``."""
    same = f"{round(other.same_answers * rows)} of {rows}"
    line = f"{name:<28}{size_text(size_bytes):>10}{f'{100 * share:.1f} %':>9}{other.loss:>9.4f}{same:>15}  {verdict}"
    return line.rstrip()
