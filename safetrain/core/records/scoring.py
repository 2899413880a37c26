"""Turns answers and losses into scores with their uncertainty, and says them. Pure."""

import math
from collections.abc import Sequence

from safetrain.core.errors import TrainingError
from safetrain.core.records.reports import Score
from safetrain.core.storage import paths

Z95 = 1.959964  # two-sided 95 % of a normal distribution
NOT_A_NUMBER = {
    "base": "check the base model: safetrain selftest MODEL; its files may be damaged, or overflow in their type",
    "tuned": "the adapter is damaged, or of a diverged training: train again, with a lower train.learning_rate",
}


def score(loss: float, answers: Sequence[str], expected: Sequence[str]) -> Score:
    """Loss in nats per token, and the share of ``answers`` that are exactly ``expected``, outer spaces apart."""
    perplexity = math.exp(min(loss, 700.0))
    if not expected:
        return Score(loss, perplexity, None, None, None)
    right = sum(answer.strip() == wanted.strip() for answer, wanted in zip(answers, expected, strict=True))
    low, high = wilson_interval(right, len(expected))
    return Score(loss, perplexity, right / len(expected), low, high)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    share, square = right / total, Z95**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def require_number(loss: float, name: str) -> float:
    """The loss of the ``name`` model (base, tuned); raises TrainingError where it is not a number."""
    if math.isfinite(loss):
        return loss
    raise TrainingError(
        f"The loss of the {name} model on the test rows is not a number.",
        where=str(paths.ADAPTERS) if name == "tuned" else "",
        got=str(loss),
        do=NOT_A_NUMBER[name],
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


def describe_score(name: str, result: Score, questions: int) -> str:
    """One line of the comparison."""
    line = f"{name:<6} loss {result.loss:.4f}  perplexity {result.perplexity:.2f}"
    if result.exact_match is None or result.exact_match_low is None or result.exact_match_high is None:
        return f"{line}  (no questions in the test file: exact match is not measured)"
    return (
        f"{line}  exact match {100 * result.exact_match:.1f} % "
        f"({100 * result.exact_match_low:.1f} to {100 * result.exact_match_high:.1f}) of {questions}"
    )
