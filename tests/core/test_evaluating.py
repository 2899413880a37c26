"""evaluation.json: whose answers are which, and what is worst, changed most, and scored by category."""

import dataclasses

import numpy as np
import pytest

from safetrain.core.data.general_text import GeneralText
from safetrain.core.data.held_out import HeldOut
from safetrain.core.data.token_rows import Question, TokenRows, token_row
from safetrain.core.records.evaluating import SHOWN, Measured, evaluation_of, forgetting_of
from safetrain.core.records.forgetting import PARTS, Forgetting
from safetrain.core.records.reports import Evaluation
from safetrain.core.records.scoring import describe_evaluation

ROWS = 30
GROUPS = ("capitals", "symbols")
PIECES, VOCABULARY = (24, 24, 12), 1000  # a blind guess has 6.9 nats


def text_of(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore


def held_out(*, groups: bool = True) -> HeldOut:
    """Row ``i`` has ``i % 3 + 1`` labels; its question asks for the number 100 + ``i``."""
    rows = [token_row([7, *range(row % 3 + 1)], [False, *[True] * (row % 3 + 1)]) for row in range(ROWS)]
    group = GROUPS if groups else ("", "")
    questions = [Question(row, (1,), (100 + row,), f"question {row}", group[row % 2]) for row in range(ROWS)]
    return HeldOut(TokenRows.of(rows), tuple(questions), frozenset(), lambda row: f"test.jsonl:{row + 1}")


def measured(losses: np.ndarray, right: range, asked: range) -> Measured:
    return Measured(losses, {row: [100 + row] if row in right else [5] for row in asked}, np.full(sum(PIECES), 30.0))


def general(pieces: tuple[int, ...] = PIECES) -> GeneralText:
    """Pieces of ten labels each."""
    row = token_row(range(11), [True] * 11)
    parts = tuple(name for name, count in zip(PARTS, pieces, strict=True) for _ in range(count))
    return GeneralText(TokenRows.of([row] * len(parts)), parts, sum(PIECES) - len(parts))


def evaluated(*, groups: bool = True, asked: range = range(ROWS)) -> Evaluation:
    data = held_out(groups=groups)
    labels = data.rows.label_counts.astype(float)
    base = measured(labels * 3.0, range(3), asked)
    gained = labels * np.linspace(0.5, 1.5, ROWS)
    tuned = measured(labels * 3.0 - gained, range(24), asked)
    return evaluation_of(data, general(), VOCABULARY, base, tuned, text_of, 4, "print")


def test_losses_are_of_all_rows_and_answers_of_those_that_were_asked() -> None:
    found = evaluated(asked=range(0, ROWS, 3))
    assert found.base.loss == pytest.approx(3.0)
    assert found.improvement.rows == found.rows == ROWS
    assert found.improvement.nats_per_label == pytest.approx(found.base.loss - found.tuned.loss)
    assert (found.questions, found.answered) == (ROWS, 10)
    assert found.tuned.exact_match == pytest.approx(0.8)
    assert "answers on 10 of 30 questions, seed 0: set evaluate.max_questions for more" in describe_evaluation(found)


def test_what_is_worst_and_what_changed_most_is_kept_with_its_place() -> None:
    found = evaluated()
    assert len(found.samples) == 4
    assert len(found.worst) == len(found.most_changed) == SHOWN
    assert found.worst[0].where == "test.jsonl:1"  # gained least
    assert found.most_changed[0].where == f"test.jsonl:{ROWS}"
    last = found.most_changed[0]
    assert (last.question, last.expected, last.base, last.tuned) == ("question 29", "129", "5", "5")
    assert last.base_loss - last.tuned_loss == pytest.approx(1.5)


def test_a_table_has_the_scores_of_each_category() -> None:
    found = evaluated()
    assert [group.name for group in found.groups] == list(GROUPS)
    assert [group.questions for group in found.groups] == [15, 15]
    assert found.groups[0].base_exact_match == pytest.approx(2 / 15)
    assert found.groups[0].tuned_exact_match == pytest.approx(12 / 15)
    table = describe_evaluation(found)[-3:]
    assert table[0].split()[:2] == ["category", "questions"]
    assert table[1].startswith("capitals  15")
    assert evaluated(groups=False).groups == ()


def test_rows_without_questions_have_losses_alone() -> None:
    data = dataclasses.replace(held_out(), questions=())
    losses = data.rows.label_counts.astype(float)
    base, tuned = (Measured(each, {}, np.full(sum(PIECES), 30.0)) for each in (losses, losses / 2))
    found = evaluation_of(data, general(), VOCABULARY, base, tuned, text_of, 4, "print")
    assert (found.tuned.exact_match, found.answered, found.samples) == (None, 0, ())
    assert "no questions in the test file: answers are not measured" in describe_evaluation(found)


def forgotten(base: float, more: np.ndarray, pieces: tuple[int, ...] = PIECES) -> Forgetting:
    """Of a base with so many nats per token, and a tuned model that has ``more`` (pieces,)."""
    losses = np.full(sum(pieces), 10 * base)
    return forgetting_of(general(pieces), losses, losses + 10 * more, VOCABULARY)


def test_what_is_forgotten_has_an_interval_and_parts() -> None:
    more = np.concatenate([np.linspace(0.1, 0.3, 24), np.linspace(0.4, 0.6, 24), np.zeros(12)])
    found = forgotten(3.0, more)
    assert found.nats_per_token == pytest.approx((24 * 0.2 + 24 * 0.5) / 60)
    assert (found.base_loss, found.pieces, found.left_out, found.unsaid) == (pytest.approx(3.0), 60, 0, "")
    assert found.english.nats_per_token == pytest.approx(0.2)
    assert found.portuguese.nats_per_token == pytest.approx(0.5)
    assert (found.code.nats_per_token, found.code.plus_minus) == (pytest.approx(0.0), pytest.approx(0.0))
    assert found.plus_minus is not None
    assert 0.03 < found.plus_minus < 0.08


def test_what_the_base_does_not_know_cannot_be_forgotten() -> None:
    found = forgotten(6.0, np.ones(60))
    assert (found.nats_per_token, found.pieces, found.english.pieces) == (None, 0, 24)
    assert found.unsaid == "the base itself does not know the general text: 6.0 nats per token, where a guess has 6.9"
    known, losses = general(), np.full(60, 30.0)
    losses[24:48] = 90.0  # a base that reads no Portuguese
    some = forgetting_of(known, losses, losses + 1.0, VOCABULARY)
    assert (some.portuguese.nats_per_token, some.pieces) == (None, 36)
    assert some.nats_per_token == pytest.approx(0.1)


def test_pieces_that_a_tokenizer_cannot_express_are_left_out_and_told() -> None:
    some, few = forgotten(3.0, np.zeros(30), (24, 2, 4)), forgotten(3.0, np.zeros(6), (2, 2, 2))
    assert (some.pieces, some.left_out, some.code.nats_per_token) == (24, 30, None)
    assert few.nats_per_token is None
    assert few.unsaid == "its tokenizer cannot express 54 pieces of the general text"
