"""What an evaluation says: sentences for a terminal and a report, and the gate's verdict. Pure functions."""

import math

from safetrain.core.formatting import counted, printable
from safetrain.core.records.evaluation import Evaluation, Forgetting, Improvement, Preference, Score
from safetrain.core.records.schema import Gate


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
