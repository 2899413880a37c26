"""What `safetrain evaluate` writes: one model alone, or beside its base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.general_text import GeneralText
from safetrain.core.data.held_out import HeldOut
from safetrain.core.formatting import printable
from safetrain.core.records.evaluating import Measured
from safetrain.core.records.reports import Evaluation, Score
from safetrain.core.records.scoring import describe_evaluation, describe_score, score

MORE = "set --max-questions"


@dataclass(frozen=True)
class ModelAnswer:
    """A question and one model's answer."""

    question: str
    expected: str
    answer: str
    where: str  # file:line


@dataclass(frozen=True)
class Alone:
    """One model, beside none."""

    score: Score
    general_loss: float | None  # nats per token of the general text; None where its tokenizer cannot express it
    rows: int
    cut_rows: int
    questions: int
    answered: int
    samples: tuple[ModelAnswer, ...]


@dataclass(frozen=True)
class Evaluated:
    """Which models, on what, and what was found: ``alone`` or ``beside_base``."""

    model: str
    adapter: str  # its folder; empty without one
    base: str  # empty where it was measured alone
    data: str
    alone: Alone | None
    beside_base: Evaluation | None


def alone_of(
    held_out: HeldOut,
    general: GeneralText,
    found: Measured,
    decode: Callable[[Sequence[int]], str],
    num_samples: int,
) -> Alone:
    """Its scores, and answers to look at."""
    samples = []
    for number, ids in sorted(found.answers.items()):
        question = held_out.questions[number]
        expected, where = decode(question.answer).strip(), held_out.where(question.row)
        samples.append(ModelAnswer(question.text, expected, decode(ids).strip(), where))
    return Alone(
        score=score(
            _per_label(found.losses, held_out.rows.label_counts),
            [sample.answer for sample in samples],
            [sample.expected for sample in samples],
        ),
        general_loss=_per_label(found.general, general.rows.label_counts) if len(general.rows) else None,
        rows=len(held_out.rows),
        cut_rows=held_out.rows.cut_rows,
        questions=len(held_out.questions),
        answered=len(samples),
        samples=tuple(samples[:num_samples]),
    )


def _per_label(losses: np.ndarray, labels: np.ndarray) -> float:
    return float(losses.sum() / labels.sum(dtype=np.int64))


def describe_evaluated(found: Evaluated) -> list[str]:
    """Lines for a terminal."""
    if found.beside_base is not None:
        return describe_evaluation(found.beside_base, MORE)
    if found.alone is None:
        return []
    lines = [describe_score("model", found.alone.score)]
    if found.alone.general_loss is not None:
        lines.append(f"general text: {found.alone.general_loss:.4f} nats per token")
    if found.alone.answered < found.alone.questions:
        lines.append(f"answers on {found.alone.answered} of {found.alone.questions} questions: {MORE} for more")
    for sample in found.alone.samples[:3]:
        lines.append(f"  {printable(sample.question)[:140]}\n    answer: {printable(sample.answer)[:140]}")
    return lines
