"""The evaluation, from losses and judged answers; forgetting, and the general text on which it is measured."""

import json
import math
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.formatting import counted
from safetrain.core.records.evaluation import Evaluation, Forgetting, PartLoss, Preference, Sample
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.loss import PairLoss
from safetrain.evaluate.exam import Exam, ModelMeasures
from safetrain.evaluate.scorers import AnswerScore, Scorer
from safetrain.evaluate.statistics import improvement, score_gain, wilson_interval

PARTS = {"english": "English", "portuguese": "Portuguese", "code": "code"}  # of the general text
MOST_OF_CHANCE = 0.6  # share of the loss of uniform guessing: a base model above it does not know the general text
SAMPLES, SHOWN = 8, 10  # samples; rows in ``worst``
FILE = Path(__file__).with_name("general_text.jsonl")
LEAST_PIECES = 6  # of a part: with fewer the part is not measured
MOST_TOKENS, SHORT_TOKENS = 256, 32  # of a piece: hardly any has so many; the limit in a short measurement


@dataclass(frozen=True)
class GeneralText:
    """The general text on which forgetting is measured, as tokens. Every token except a piece's first is a label.

    It is included with safetrain: 60 short pieces, written for this project and under its licence: 24 paragraphs in
    English, 24 in Portuguese (everyday knowledge, stories, instructions), 12 pieces of code in as many languages.
    """

    rows: TokenRows
    parts: tuple[str, ...]  # (rows,)
    left_out: int  # pieces that the tokenizer cannot express


def general_text(
    tokenizer: ChatTokenizer, vocabulary: int, max_positions: int | None, most_tokens: int = sys.maxsize
) -> GeneralText:
    """Tokenize the pieces for a model with these limits, leaving out those that decode to a different text.

    They have about ``most_tokens`` tokens in all, or more: each part has LEAST_PIECES, cut to SHORT_TOKENS if needed.
    """
    pieces = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    least = LEAST_PIECES * len({piece["part"] for piece in pieces})
    most = min(MOST_TOKENS, max_positions or MOST_TOKENS, max(SHORT_TOKENS, most_tokens // least))
    rows = dict[str, list[TokenRow]]()  # of each part
    for piece in pieces:
        ids = tokenizer.encode(piece["text"])
        if max(ids) < vocabulary and _letters(tokenizer.decode(ids)) == _letters(piece["text"]):
            rows.setdefault(piece["part"], []).append(token_row(ids[:most], [True] * len(ids[:most])))
    share = min(1.0, most_tokens / max(1, sum(len(row) for part in rows.values() for row in part)))
    taken = [(row, part) for part, own in rows.items() for row in own[: max(LEAST_PIECES, round(share * len(own)))]]
    left_out = len(pieces) - sum(map(len, rows.values()))
    return GeneralText(TokenRows.of([row for row, _ in taken]), tuple(part for _, part in taken), left_out)


def _letters(text: str) -> str:
    """Normalise what tokenizers change on purpose: white space, and the form and case of letters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


class ScoredAnswers(NamedTuple):
    """A question with both models' answers as text, and their scores."""

    number: int
    expected: str
    texts: tuple[str, str]
    judged: tuple[AnswerScore, AnswerScore]


def scored_answers(exam: Exam, base: ModelMeasures, tuned: ModelMeasures, scorer: Scorer) -> list[ScoredAnswers]:
    """Judge the answers of both models; raises DataError, which names the row, if the user's checker fails."""
    found = list[ScoredAnswers]()
    for number in sorted(exam.rows):
        expected = exam.text_of(number, exam.held_out.questions[number].answer)
        texts = [exam.answered(number, each) for each in (base, tuned)]
        judged = [exam.judge(scorer, number, expected, text) for text in texts]
        found.append(ScoredAnswers(number, expected, (texts[0], texts[1]), (judged[0], judged[1])))
    return found


def evaluation_of(
    general: GeneralText,
    vocabulary: int,
    measures: tuple[ModelMeasures, ModelMeasures],
    exam: Exam,
    answers: Sequence[ScoredAnswers],
    adapter: str,
    pair_loss: PairLoss | None = None,
) -> Evaluation:
    """Compare the base and the tuned model on the same questions. ``vocabulary``: the model's number of tokens.

    With ``pair_loss``, the test rows are pairs: losses are per pair, and the base model is the reference.
    """
    (base, tuned), held_out = measures, exam.held_out
    labels, samples = held_out.rows.label_counts, list[Sample]()
    losses, terms, preference = (base.losses, tuned.losses), labels, None
    if pair_loss is not None:
        scores = [pair_loss.scores(-each, held_out.rows, -base.losses) for each in losses]
        losses, terms = (scores[0].losses, scores[1].losses), np.ones(len(labels) // 2, dtype=np.int64)
        right, pairs = int(scores[1].sums[1]), len(terms)
        margin = improvement(scores[1].margins, np.zeros(pairs), terms)
        interval = wilson_interval(right, pairs)
        preference = Preference(right / pairs, *interval, margin.nats_per_label, margin.plus_minus)
    for each in answers:
        question = held_out.questions[each.number]
        row, count = question.row, max(1, labels[question.row])
        losses_of = [float(model.losses[row] / count) for model in measures]
        samples.append(
            Sample(
                question.text, each.expected, *each.texts, held_out.where(row), losses_of[0], losses_of[1],
                each.judged[0].score, each.judged[1].score, each.judged[1].note,
            )
        )  # fmt: skip
    means = [mean_loss(each, terms) for each in losses]
    scored = [
        exam.score(mean, model, [each.judged[side] for each in answers], per_pair=pair_loss is not None)
        for side, (mean, model) in enumerate(zip(means, measures, strict=True))
    ]
    both = np.array([[judged.score for judged in each.judged] for each in answers]).reshape(-1, 2)
    return Evaluation(
        tuned=scored[1],
        score_gain=score_gain(both[:, 0], both[:, 1]) if answers else None,
        improvement=improvement(*losses, terms),
        base=scored[0],
        forgetting=forgetting_of(general, base.general, tuned.general, vocabulary),
        rows=len(terms),
        rows_available=held_out.rows_available // held_out.rows.rows_per_pair,
        cut_rows=held_out.rows.cut_rows,
        questions=held_out.questions_available,
        answered=len(samples),
        adapter=(adapter,),
        scorer=(exam.task.scorer, exam.task.why),
        choices=exam.choices_of(tuned) if exam.choices else None,
        samples=tuple(samples[:SAMPLES]),
        worst=tuple(sorted(samples, key=lambda each: (each.tuned_score, -each.tuned_loss))[:SHOWN]),
        preference=preference,
    )


def forgetting_of(text: GeneralText, base: np.ndarray, tuned: np.ndarray, vocabulary: int) -> Forgetting:
    """Compare base and tuned losses on the general text: (pieces,), in nats, summed over each piece's tokens."""
    labels, chance = text.rows.label_counts, math.log(vocabulary)
    parts, known_rows = list[PartLoss](), list[int]()
    for part, name in PARTS.items():
        rows = [row for row, each in enumerate(text.parts) if each == part]
        if len(rows) < LEAST_PIECES or mean_loss(base[rows], labels[rows]) > MOST_OF_CHANCE * chance:
            parts.append(PartLoss(name, None, None))
            continue
        more = improvement(tuned[rows], base[rows], labels[rows])
        parts.append(PartLoss(name, more.nats_per_label, more.plus_minus))
        known_rows += rows
    if known_rows:
        more = improvement(tuned[known_rows], base[known_rows], labels[known_rows])
        return Forgetting(more.nats_per_label, more.plus_minus, (), tuple(parts))
    loss = mean_loss(base, labels) if len(labels) else math.inf
    better = "worse" if loss > chance else "hardly better"
    why = f"the base model is {better} than guessing on the general text (loss {loss:.1f}; guessing has {chance:.1f})"
    if text.left_out and len(text.parts) < LEAST_PIECES * len(PARTS):
        why = f"the tokenizer cannot express {counted(text.left_out, 'piece')} of the general text"
    return Forgetting(None, None, (why,), tuple(parts))


def mean_loss(losses: np.ndarray, labels: np.ndarray) -> float:
    """Mean loss per label over all rows; ``losses`` are summed over each row's labels."""
    return float(losses.sum()) / int(labels.sum(dtype=np.int64))
