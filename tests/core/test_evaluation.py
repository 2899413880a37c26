"""evaluation.json: whose answers are which, what is worst, the sentences, and the gate."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safetrain.core.data.held_out import GeneralText, HeldOut
from safetrain.core.data.token_rows import Question, TokenRows, token_row
from safetrain.core.records.evaluation import (
    Evaluation,
    Forgetting,
    Improvement,
    Score,
    describe_evaluation,
    describe_sample,
    judge,
)
from safetrain.core.records.schema import Gate
from safetrain.core.records.scoring import SAMPLES, SHOWN, ModelMeasures, evaluation_of
from safetrain.core.storage.files import read_record, write_record

ROWS = 30
PIECES, VOCABULARY = {"english": 24, "portuguese": 24, "code": 12}, 1000  # chance is 6.9 nats
KNOWN = 30.0  # nats of a piece of ten labels


def evaluated(step: int = 1, general: float = KNOWN, available: int = ROWS) -> Evaluation:
    """Row i has i % 3 + 1 labels; its question asks for 100 + i. The tuned model knows the first 24, the base 3."""
    rows = [token_row([7, *range(row % 3 + 1)], [False, *[True] * (row % 3 + 1)]) for row in range(ROWS)]
    questions = [Question(row, (1,), (100 + row,), f"question {row}") for row in range(ROWS)]
    where = lambda row: f"test.jsonl:{row + 1}"  # noqa: E731
    data = HeldOut(TokenRows.of(rows), tuple(questions), frozenset(), where, available, len(questions))
    labels = data.rows.label_counts.astype(float)
    parts = tuple(part for part, count in PIECES.items() for _ in range(count))
    text = GeneralText(TokenRows.of([token_row(range(11), [True] * 11)] * len(parts)), parts, 0)

    def measured(losses: np.ndarray, right: int, nats: np.ndarray) -> ModelMeasures:
        return ModelMeasures(losses, {i: [100 + i] if i < right else [5] for i in range(0, ROWS, step)}, nats)

    pieces = np.full(len(parts), general)
    base = measured(labels * 3.0, 3, pieces)
    tuned = measured(labels * (3.0 - np.linspace(0.5, 1.5, ROWS)), 24, pieces + np.linspace(1.0, 2.0, len(parts)))
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    return evaluation_of(data, text, VOCABULARY, base, tuned, decode, "print")


def test_losses_are_of_all_rows_and_answers_of_the_questions_that_were_asked() -> None:
    found = evaluated(step=3)
    assert found.base.loss == pytest.approx(3.0)
    assert found.improvement.rows == found.rows == ROWS
    assert found.improvement.nats_per_label == pytest.approx(found.base.loss - found.tuned.loss)
    assert (found.questions, found.answered, found.tuned.exact_match) == (ROWS, 10, pytest.approx(0.8))
    said = describe_evaluation(found)
    assert said[0] == "Test loss 3.000 → 1.989 nats per token: better by 1.01 ± 0.12 (95 %, 30 rows)."
    assert said[1] == "Exact match on 10 test questions: base 10.0 %, tuned 80.0 %."
    assert "(95 %, 30 of 4,000 rows)" in describe_evaluation(evaluated(available=4000))[0]
    assert "10 of 30 questions answered (seed 0): set evaluate.max_examples for more." in said
    without = describe_evaluation(dataclasses.replace(evaluated(step=ROWS + 1), questions=0, answered=0))
    assert "Answers not measured: the test file has no questions." in without
    assert not [line for line in without if "Exact match" in line]


def test_worst_rows_keep_their_place() -> None:
    found = evaluated()
    assert (len(found.samples), len(found.worst)) == (SAMPLES, SHOWN)
    assert found.worst[0].where == "test.jsonl:1"  # gained least
    first = found.worst[0]
    assert (first.question, first.expected, first.base, first.tuned) == ("question 0", "100", "100", "100")
    assert first.base_loss - first.tuned_loss == pytest.approx(0.5)


def test_the_file_comes_back_with_what_counts_first(tmp_path: Path) -> None:
    """DVC's columns are in the order of the file; lists have none."""
    path = tmp_path / "evaluation.json"
    write_record(path, evaluated())
    value = json.loads(path.read_text())
    assert [*value, *value["improvement"], *value["tuned"]][:2] == ["improvement", "tuned"]
    assert [next(iter(value[key])) for key in ("improvement", "tuned")] == ["nats_per_label", "exact_match"]
    assert isinstance(value["forgetting"]["parts"], list)
    assert read_record(path, Evaluation) == evaluated()


def test_forgetting_is_described_or_its_absence_explained() -> None:
    (said,) = (line for line in describe_evaluation(evaluated()) if line.startswith("Forgetting"))
    assert said.startswith("Forgetting: general text loss +0.15 ± 0.01 nats per token (English +0.12 ± 0.01, Portu")
    assert (
        "Forgetting not measured: the base model is worse than guessing on the general text (loss 12.3; guessing "
        "has 6.9)." in describe_evaluation(evaluated(general=123.0))
    )


def test_an_empty_answer_is_called_empty_and_a_long_one_is_cut() -> None:
    question, base, tuned = describe_sample("首都" * 200, "", "to\x1b[31m\nkyo").splitlines()
    assert question == f"  {'首都' * 69}首…"
    assert base == "    base:  (empty)"
    assert tuned == "    tuned: to\\x1b[31m kyo"


@pytest.mark.parametrize(
    ("gain", "limits", "forgotten", "code"),  # the exact match is between 0.8 and 0.9
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
    score = Score(loss=1.0, perplexity=2.0, exact_match_low=0.8, exact_match_high=0.9)
    verdict = judge(Improvement(*gain, 9), score, Forgetting(*forgotten, "", ()), Gate(*limits))
    titles = ("better", "not better", "could not be determined", "forgets")
    assert verdict[:2] == (min(code, 2), titles[code])
    assert len(verdict[2]) == sum(limit is not None for limit in limits)
