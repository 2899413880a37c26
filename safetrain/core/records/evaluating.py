"""Makes evaluation.json of what was measured of base and tuned. Pure."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from safetrain.core.data.general_text import GeneralText
from safetrain.core.data.held_out import HeldOut
from safetrain.core.data.token_rows import Question
from safetrain.core.formatting import counted
from safetrain.core.records.forgetting import LEAST_PIECES, PARTS, Forgetting, PartForgotten
from safetrain.core.records.intervals import improvement, wilson_interval
from safetrain.core.records.reports import Evaluation, GroupScore, Sample
from safetrain.core.records.scoring import score

MOST_OF_A_GUESS = 0.6  # of the loss of a blind guess: a base with more does not know the general text
SHOWN = 10  # rows that are worst, and that changed most
MOST_GROUPS, LEAST_GROUP = 20, 5  # groups that are shown, and questions of one: of fewer nothing can be said


@dataclass(frozen=True)
class Measured:
    """One of the models. Losses in nats, summed over the labels of each row; ids by the question's number."""

    losses: np.ndarray  # (rows,) of the held-out rows
    answers: dict[int, list[int]]
    general: np.ndarray  # (pieces,) of the general text


def evaluation_of(
    held_out: HeldOut,
    general: GeneralText,
    vocabulary: int,
    base: Measured,
    tuned: Measured,
    decode: Callable[[Sequence[int]], str],
    num_samples: int,
    adapter: str,
) -> Evaluation:
    """Scores of both, their difference, and answers to look at. Both have answered the same questions.

    ``vocabulary``: tokens that the model knows.
    """
    labels = held_out.rows.label_counts
    numbers = sorted(tuned.answers)
    samples = [_sample(held_out, base, tuned, number, decode) for number in numbers]
    expected, count = [sample.expected for sample in samples], int(labels.sum(dtype=np.int64))
    return Evaluation(
        base=score(float(base.losses.sum()) / count, [sample.base for sample in samples], expected),
        tuned=score(float(tuned.losses.sum()) / count, [sample.tuned for sample in samples], expected),
        improvement=improvement(base.losses, tuned.losses, labels),
        rows=len(labels),
        cut_rows=held_out.rows.cut_rows,
        questions=len(held_out.questions),
        answered=len(samples),
        adapter=adapter,
        samples=tuple(samples[:num_samples]),
        worst=tuple(sorted(samples, key=lambda sample: -sample.tuned_loss)[:SHOWN]),
        most_changed=tuple(sorted(samples, key=lambda s: -abs(s.base_loss - s.tuned_loss))[:SHOWN]),
        groups=_groups([held_out.questions[number] for number in numbers], samples, base, tuned, labels),
        forgetting=forgetting_of(general, base.general, tuned.general, vocabulary),
    )


def _groups(
    questions: Sequence[Question], samples: Sequence[Sample], base: Measured, tuned: Measured, labels: np.ndarray
) -> tuple[GroupScore, ...]:
    """Of ``questions`` and their ``samples``, the largest group first."""
    places = defaultdict[str, list[int]](list)
    for place, question in enumerate(questions):
        places[question.group].append(place)
    found, large = [], [item for item in places.items() if len(item[1]) >= LEAST_GROUP]
    for name, group in sorted(large, key=lambda item: -len(item[1]))[:MOST_GROUPS] if len(places) > 1 else ():
        rows, size = np.array([questions[place].row for place in group]), len(group)
        by_base = sum(samples[place].base == samples[place].expected for place in group)
        by_tuned = sum(samples[place].tuned == samples[place].expected for place in group)
        interval = wilson_interval(by_tuned, size)
        gain = improvement(base.losses[rows], tuned.losses[rows], labels[rows])
        found.append(GroupScore(name, size, by_base / size, by_tuned / size, *interval, gain))
    return tuple(found)


def _sample(
    held_out: HeldOut, base: Measured, tuned: Measured, number: int, decode: Callable[[Sequence[int]], str]
) -> Sample:
    question = held_out.questions[number]
    labels = int(held_out.rows.label_counts[question.row])
    return Sample(
        question=question.text,
        expected=decode(question.answer).strip(),
        base=decode(base.answers[number]).strip(),
        tuned=decode(tuned.answers[number]).strip(),
        where=held_out.where(question.row),
        base_loss=float(base.losses[question.row]) / labels,
        tuned_loss=float(tuned.losses[question.row]) / labels,
    )


def forgetting_of(text: GeneralText, base: np.ndarray, tuned: np.ndarray, vocabulary: int) -> Forgetting:
    """``base`` and ``tuned`` (pieces,) losses in nats, summed over each piece's tokens."""
    labels, guess = text.rows.label_counts, math.log(vocabulary)
    parts, known = dict[str, PartForgotten](), list[int]()
    for name in PARTS:
        rows = [row for row, part in enumerate(text.parts) if part == name]
        loss = _mean(base, labels, rows) if rows else None
        if loss is None or len(rows) < LEAST_PIECES or not loss <= MOST_OF_A_GUESS * guess:
            parts[name] = PartForgotten(None, None, loss, len(rows))
            continue
        found = improvement(tuned[rows], base[rows], labels[rows])
        parts[name] = PartForgotten(found.nats_per_label, found.plus_minus, loss, len(rows))
        known += rows
    whole = improvement(tuned[known], base[known], labels[known]) if known else None
    return Forgetting(
        nats_per_token=whole.nats_per_label if whole else None,
        plus_minus=whole.plus_minus if whole else None,
        base_loss=_mean(base, labels, known) if known else None,
        tuned_loss=_mean(tuned, labels, known) if known else None,
        pieces=len(known),
        left_out=text.left_out,
        english=parts["english"],
        portuguese=parts["portuguese"],
        code=parts["code"],
        unsaid="" if known else _why(text, base, labels, guess),
    )


def _mean(losses: np.ndarray, labels: np.ndarray, rows: Sequence[int]) -> float:
    return float(losses[rows].sum() / labels[rows].sum())


def _why(text: GeneralText, base: np.ndarray, labels: np.ndarray, guess: float) -> str:
    if len(text.parts) < LEAST_PIECES * len(PARTS):
        return f"its tokenizer cannot express {counted(text.left_out, 'piece')} of the general text"
    loss = float(base.sum() / labels.sum())
    return f"the base itself does not know the general text: {loss:.1f} nats per token, where a guess has {guess:.1f}"
