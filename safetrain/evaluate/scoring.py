"""Scores from losses and answers, with 95 % intervals; forgetting, and the general text on which it is measured."""

import json
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from safetrain.core.data.token_rows import TokenRow, TokenRows, token_row
from safetrain.core.data.training_rows import HeldOut
from safetrain.core.formatting import counted
from safetrain.core.records.evaluation import (
    Z95,
    Evaluation,
    Forgetting,
    Improvement,
    PartLoss,
    Preference,
    Sample,
    Score,
)
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.core.text.words import words_of
from safetrain.engine.loss import PairLoss

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


@dataclass(frozen=True)
class ModelMeasures:
    """Losses and answers of one model. Losses in nats, summed over the labels of each row."""

    losses: np.ndarray  # (rows,) of the test rows
    answers: dict[int, list[int]]  # token ids, by the question's number
    general: np.ndarray  # (pieces,) of the general text


def evaluation_of(
    held_out: HeldOut,
    general: GeneralText,
    vocabulary: int,
    base: ModelMeasures,
    tuned: ModelMeasures,
    decode: Callable[[Sequence[int]], str],
    adapter: str,
    pair_loss: PairLoss | None = None,
) -> Evaluation:
    """Compare two models that answered the same questions. ``vocabulary``: the model's number of tokens.

    With ``pair_loss``, the test rows are pairs: losses are per pair, and the base model is the reference.
    """
    labels, samples, per_pair = held_out.rows.label_counts, list[Sample](), pair_loss is not None
    losses, terms, preference = (base.losses, tuned.losses), labels, None
    if pair_loss is not None:
        scores = [pair_loss.scores(-each, held_out.rows, -base.losses) for each in losses]
        losses, terms = (scores[0].losses, scores[1].losses), np.ones(len(labels) // 2, dtype=np.int64)
        right, pairs = int(scores[1].sums[1]), len(terms)
        margin = improvement(scores[1].margins, np.zeros(pairs), terms)
        interval = wilson_interval(right, pairs)
        preference = Preference(right / pairs, *interval, margin.nats_per_label, margin.plus_minus)
    for number in sorted(tuned.answers):
        question = held_out.questions[number]
        texts = [decode(ids).strip() for ids in (question.answer, base.answers[number], tuned.answers[number])]
        row, count = question.row, max(1, labels[question.row])
        own = [float(each.losses[row] / count) for each in (base, tuned)]
        samples.append(Sample(question.text, texts[0], texts[1], texts[2], held_out.where(row), *own))
    expected = [sample.expected for sample in samples]
    return Evaluation(
        improvement=improvement(*losses, terms),
        tuned=score(mean_loss(losses[1], terms), [sample.tuned for sample in samples], expected, per_pair=per_pair),
        base=score(mean_loss(losses[0], terms), [sample.base for sample in samples], expected, per_pair=per_pair),
        forgetting=forgetting_of(general, base.general, tuned.general, vocabulary),
        rows=len(terms),
        rows_available=held_out.rows_available // held_out.rows.rows_per_pair,
        cut_rows=held_out.rows.cut_rows,
        questions=held_out.questions_available,
        answered=len(samples),
        adapter=(adapter,),
        samples=tuple(samples[:SAMPLES]),
        worst=tuple(sorted(samples, key=lambda each: -each.tuned_loss)[:SHOWN]),
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


def score(loss: float, answers: Sequence[str], expected: Sequence[str], *, per_pair: bool) -> Score:
    """Score a model by its loss, which has no perplexity if it is per pair, and its answers, outer spaces ignored."""
    perplexity = None if per_pair else math.exp(min(loss, 700.0))
    if not expected:
        return Score(loss=loss, perplexity=perplexity)
    pairs = [(answer.strip(), expected_text.strip()) for answer, expected_text in zip(answers, expected, strict=True)]
    right, total = sum(answer == expected_text for answer, expected_text in pairs), len(pairs)
    low, high = wilson_interval(right, total)
    f1 = sum(token_f1(*pair) for pair in pairs) / total
    return Score(loss=loss, perplexity=perplexity, exact_match=right / total, exact_match_low=low,
                 exact_match_high=high, token_f1=f1)  # fmt: skip


def improvement(base: np.ndarray, tuned: np.ndarray, labels: np.ndarray) -> Improvement:
    """Difference of two mean losses, from losses (rows,) that are summed over each row's labels.

    The interval is a jackknife over rows, because the labels of one row are not independent.
    """
    gained, labels = (base - tuned)[labels > 0], labels[labels > 0]
    rows, total = len(labels), max(1, int(labels.sum(dtype=np.int64)))
    mean = float(gained.sum() / total)
    if rows < 2:
        return Improvement(mean, None, rows)
    without = (gained.sum() - gained) / (total - labels)
    error = math.sqrt((rows - 1) / rows * float(((without - without.mean()) ** 2).sum()))
    return Improvement(mean, t95(rows - 1) * error, rows)


def t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; above 2 degrees of freedom by an expansion of the normal quantile."""
    if freedom <= 2:
        return (12.7062, 4.30265)[freedom - 1]
    z, v = Z95, freedom
    terms = ((z**3 + z) / (4 * v), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
             (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))  # fmt: skip
    return z + sum(terms)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    share, square = right / total, Z95**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), 1.0 if right == total else middle + half


def token_f1(answer: str, expected: str) -> float:
    """F1 of the words in any order, ignoring case and punctuation; 0 to 1."""
    words = words_of([answer, expected])
    split = int(words.bounds[1])
    if not len(words.hashes):
        return float(answer == expected)
    one, other = Counter(words.hashes[:split].tolist()), Counter(words.hashes[split:].tolist())
    return 2 * (one & other).total() / (one.total() + other.total())
