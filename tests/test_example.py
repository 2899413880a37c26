"""The example that ships keeps its promises: enough rows, subjects kept apart, a base that has not learnt to answer."""

import json

import pytest

from models.recipe import example_data
from models.recipe.text import subjects
from tests.conftest import ROOT

SETS = {
    name: [json.loads(line)["messages"] for line in (ROOT / f"data/example/{name}.jsonl").read_text().splitlines()]
    for name in ("train", "valid", "test")
}
QUESTIONS = {name: {turns[0]["content"] for turns in rows} for name, rows in SETS.items()}
ANSWERS = {name: {turns[1]["content"] for turns in rows} for name, rows in SETS.items()}


def test_there_is_enough_of_it_and_no_answer_of_the_test_file_occurs_in_training() -> None:
    assert [len(SETS[name]) >= least for name, least in (("train", 848), ("valid", 95), ("test", 200))] == [True] * 3
    assert not ANSWERS["test"] & (ANSWERS["train"] | ANSWERS["valid"])
    assert not QUESTIONS["test"] & QUESTIONS["train"]
    assert all(any(words in question for question in QUESTIONS["test"]) for words in ("capital do", "capital of"))


def test_no_training_question_mentions_a_subject_of_the_test_file() -> None:
    """By the facts behind the questions: a subject is in one file in both of its languages."""
    key_of = {question: s.key for s in subjects() for fact in s.facts for question in fact.questions}
    keys = {name: {key_of[question] for question in found} for name, found in QUESTIONS.items()}
    assert keys["test"]
    assert not keys["test"] & (keys["train"] | keys["valid"])
    assert not keys["train"] & keys["valid"]


def test_the_files_are_as_the_recipe_writes(tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_data, "TARGET", tmp_path)
    example_data.main()
    for name in SETS:
        written = (example_data.TARGET / f"{name}.jsonl").read_bytes()
        assert written == (ROOT / f"data/example/{name}.jsonl").read_bytes()
