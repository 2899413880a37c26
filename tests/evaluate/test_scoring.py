"""evaluation.json: rows that are compared, scores and intervals, sentences, the gate; when a fused model holds."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safetrain.core.data.store import open_store
from safetrain.core.data.token_rows import Question, TokenRows, token_row
from safetrain.core.data.training_rows import HeldOut, held_out_in
from safetrain.core.records.evaluation import Evaluation, Forgetting, Improvement, Likeness, Score
from safetrain.core.records.schema import Gate
from safetrain.evaluate.exam import Exam, ModelMeasures, Task
from safetrain.evaluate.scorers import judge_text
from safetrain.evaluate.scoring import GeneralText, evaluation_of, scored_answers
from safetrain.evaluate.statistics import improvement, score_gain, t95, wilson_interval
from safetrain.export.comparison import kept_share, refusal
from safetrain.watch.result import describe_evaluation, judge
from tests.stores import MADE, write_store

ROWS = 30
PIECES, VOCABULARY = {"english": 24, "portuguese": 24, "code": 12}, 1000  # chance is 6.9 nats
KNOWN = 30.0  # nats of a piece of ten labels


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return " ".join(map(str, ids))

    def after_thinking(self, ids: Any, _expected: Any = ()) -> Any:
        return ids


def evaluated(step: int = 1, available: int = ROWS) -> Evaluation:
    """Row i has i % 3 + 1 labels; its question asks for 100 + i. The tuned model knows the first 24, the base 3."""
    rows = [token_row([7, *range(row % 3 + 1)], [False, *[True] * (row % 3 + 1)]) for row in range(ROWS)]
    questions = [Question(row, (1,), (100 + row,), f"question {row}") for row in range(ROWS)]
    where = lambda row: f"test.jsonl:{row + 1}"  # noqa: E731
    data = HeldOut(TokenRows.of(rows), tuple(questions), frozenset(), where, int, available, len(questions))
    labels = data.rows.label_counts.astype(float)
    parts = tuple(part for part, count in PIECES.items() for _ in range(count))
    text = GeneralText(TokenRows.of([token_row(range(11), [True] * 11)] * len(parts)), parts, 0)

    def measured(losses: np.ndarray, right: int, nats: np.ndarray) -> ModelMeasures:
        return ModelMeasures(losses, {i: [100 + i] if i < right else [5] for i in range(0, ROWS, step)}, nats)

    pieces = np.full(len(parts), KNOWN)
    base = measured(labels * 3.0, 3, pieces)
    tuned = measured(labels * (3.0 - np.linspace(0.5, 1.5, ROWS)), 24, pieces + np.linspace(1.0, 2.0, len(parts)))
    words: Any = Words()
    exam = Exam(Task("text", ""), data, words, 9, {number: {} for number in range(0, ROWS, step)})
    answers = scored_answers(exam, base, tuned, judge_text)
    return evaluation_of(text, VOCABULARY, (base, tuned), exam, answers, "print")


def test_losses_are_of_all_rows_and_answers_of_the_questions_that_were_asked() -> None:
    found = evaluated(step=3)
    assert found.base.loss == pytest.approx(3.0)
    assert found.improvement.rows == found.rows == ROWS
    assert found.improvement.nats_per_label == pytest.approx(found.base.loss - found.tuned.loss)
    assert (found.questions, found.answered, found.tuned.score) == (ROWS, 10, pytest.approx(0.8))
    said = describe_evaluation(found)
    assert said[0] == "Test loss 3.000 → 1.989 nats per token: better by 1.01 ± 0.12 (95 %, 30 rows)."
    shares = "base 10.0 %, tuned 80.0 % (95 %: 49 to 94 %)"
    assert said[1] == f"Exact match on 10 test questions: {shares}, better by 70.0 points (16 to 100)."
    assert "(95 %, 30 of 4,000 rows)" in describe_evaluation(evaluated(available=4000))[0]
    assert "10 of 30 questions answered (random sample, seed 0)." in said
    without = describe_evaluation(dataclasses.replace(evaluated(step=ROWS + 1), questions=0, answered=0))
    assert "Answers not measured: the test file has no questions." in without
    assert not [line for line in without if "Exact match" in line]


GATE = ("least_gain", "least_score", "most_forgotten")


@pytest.mark.parametrize(
    ("gain", "limits", "forgotten", "code"),  # the score is between 0.8 and 0.9
    [
        ((0.5, 0.1), (0.0, None, None), (None, None), 0),
        ((0.5, 0.1), (0.6, None, None), (None, None), 1),
        ((0.5, 0.1), (0.0, 0.85, None), (None, None), 2),
        ((0.5, 0.1), (0.0, None, 0.2), (0.31, 0.05), 3),  # forgets
        ((0.5, 0.1), (0.0, None, 0.2), (0.22, 0.05), 2),
        ((0.5, 0.1), (0.0, None, 0.2), (None, None), 0),  # not measured: does not count
        ((-0.5, 0.1), (0.0, None, 0.2), (5.0, 0.01), 1),
    ],
)
def test_the_gate_compares_the_ends_of_the_intervals(
    gain: tuple[float, float | None], limits: tuple[float, Any, Any], forgotten: tuple[Any, Any], code: int
) -> None:
    score = Score(loss=1.0, perplexity=2.0, score_low=0.8, score_high=0.9)
    thresholds = Gate(**dict(zip(GATE, limits, strict=True)))
    verdict = judge(Improvement(*gain, 9), score, Forgetting(*forgotten, (), ()), thresholds)
    titles = ("better", "not better", "could not be determined", "forgets")
    assert verdict[:2] == (min(code, 2), titles[code])
    assert len(verdict[2]) == sum(limit is not None for limit in limits)


def test_intervals_match_published_tables() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I: 81/263, 15/148, 0/20.
    for right, total, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))):
        assert wilson_interval(right, total) == pytest.approx(ends, abs=5e-5)
    for freedom, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (219, 1.971)):
        assert t95(freedom) == pytest.approx(expected, rel=0.01)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    """The difference is paired, so rows that are hard for both models do not widen it."""
    source, held, true = np.random.default_rng(7), 0, 0.2
    for _ in range(1000):
        labels = source.integers(1, 40, 100)
        gained = labels * (true + source.normal(0, 0.3, 100)) + source.normal(0, 2, 100)
        hard = labels * source.uniform(0, 10, 100)
        found = improvement(hard + gained, hard, labels)
        held += abs(found.nats_per_label - true) <= (found.plus_minus or 0.0)
    assert held / 1000 == pytest.approx(0.95, abs=0.02)
    equal = np.ones(32)
    assert score_gain(0 * equal, equal).low == pytest.approx(0.82, abs=0.02), (
        "32 of 32 won do not prove that all would be"
    )
    assert score_gain(equal, equal).low < 0 < score_gain(equal, equal).high
    one = improvement(np.array([0.0, 12.0, 0.0]), np.array([0.0, 6.0, 0.0]), np.array([0, 4, 0]))
    assert (one.nats_per_label, one.plus_minus, one.rows) == (1.5, None, 1)


TUNED = Likeness(1.0, 0.0, 1.0, 90, 0, 0)
BASE = Likeness(2.0, 0.8, 0.0, 0, 90, 0)


def found(**changes: Any) -> Likeness:
    return dataclasses.replace(TUNED, **changes)


def test_what_is_kept_is_the_smaller_share() -> None:
    assert kept_share(BASE, TUNED, TUNED) == 1
    assert kept_share(BASE, TUNED, BASE) == 0
    assert kept_share(BASE, TUNED, found(loss=1.1, divergence=0.008)) == pytest.approx(0.9)
    assert kept_share(BASE, TUNED, found(loss=0.5, divergence=0.4)) == pytest.approx(0.5)  # a better loss by chance
    worse = found(loss=3.0), found(loss=3.1, divergence=0.08)
    assert kept_share(BASE, *worse) == pytest.approx(0.9), "a training that did not help has a distribution to keep"


@pytest.mark.parametrize(
    ("lost", "won", "holds"), [(3, 0, True), (4, 0, False), (8, 3, True), (12, 3, False), (0, 9, True)]
)
def test_fewer_right_answers_than_chance_allows_are_refused(lost: int, won: int, holds: bool) -> None:
    assert (refusal(0.999, found(lost_answers=lost, won_answers=won), 0.02) == "") == holds
    assert refusal(-3.0, found(lost_answers=90), 1.0) == "", "all may get lost"
    assert "not a number" in refusal(1.0, found(loss=float("nan")), 1.0)
    assert "more than 2 %" in refusal(0.97, TUNED, 0.02)


BOOKS = [token_row(range(1, tokens + 1), [True] * tokens) for tokens in (500, 90, 7)]


def test_of_documents_every_token_but_the_first_is_measured(tmp_path: Path) -> None:
    """Cut like rows, all but the beginning of a book would be left out."""
    store = open_store(write_store(tmp_path / "test.tokens.safetensors", BOOKS), MADE.tokenizer)
    windows = held_out_in(store, None, 32, "pretrain").rows
    opens = sum(BOOKS[0].ids[-1] not in MADE.stop_ids for _ in BOOKS[1:])  # nothing predicts a first token then
    assert windows.label_counts.sum() == 597 - 1 - opens
    assert windows.cut_rows == 0
    assert held_out_in(store, None, 32).rows.label_counts.sum() < 80
    assert held_out_in(store, 1, 32, "pretrain").rows.label_counts.sum() == 499


def test_a_sample_is_from_all_over_and_has_its_own_questions_and_places(tmp_path: Path) -> None:
    rows = [token_row(range(1, 12), [False] * 5 + [True] * 6) for _ in range(100)]
    asked = [Question(row, (row,), (2,), str(row)) for row in range(100)]
    store = open_store(write_store(tmp_path / "test.tokens.safetensors", rows, questions=asked), MADE.tokenizer)
    found = held_out_in(store, None, 8, most_tokens=70)
    assert (len(found.rows), found.rows_available, found.rows.cut_rows) == (10, 100, 10)
    assert found.questions_available == 100
    assert len(held_out_in(store, None, 8, "pretrain").rows) == 100, "rows with questions stay rows"
    assert [question.text for question in found.questions] == [str(row) for row in range(0, 100, 11)]
    for question in found.questions:
        assert found.where(question.row) == store.where(int(question.text))
    assert len(held_out_in(store, None, 8, most_tokens=700).rows) == 100
    assert len(held_out_in(store, None, 8, most_tokens=1).rows) == 1
