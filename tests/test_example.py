"""The example that ships keeps its promises: enough rows, subjects kept apart, a base that has not learnt to answer."""

import json

import pytest

from models.recipe import example_data
from models.recipe.text import subjects
from safetrain.core.data.tokenizer import ChatTokenizer, Prompts
from tests.conftest import EMBEDDED, ROOT

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


def test_the_files_are_what_the_recipe_writes(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_data, "TARGET", tmp_path)
    example_data.main()
    for name in SETS:
        written = (example_data.TARGET / f"{name}.jsonl").read_bytes()
        assert written == (ROOT / f"data/example/{name}.jsonl").read_bytes()


def test_the_embedded_model_is_small_and_opens_in_mlx_lm() -> None:
    from mlx_lm.utils import load

    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) <= 8 * 2**20
    model, tokenizer = load(str(EMBEDDED))[:2]
    assert model.args.model_type == "llama"
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|>"


def test_the_base_knows_the_facts_and_does_not_answer() -> None:
    from safetrain.engine.evaluation import answer
    from safetrain.engine.model import open_base

    model, tokenizer = open_base(EMBEDDED, dequantize=True), ChatTokenizer(EMBEDDED)
    end = tokenizer.end_id
    assert end is not None
    starts = ("The capital of Japan is", "O símbolo químico do elemento ferro é")
    begun = answer(model, [[end, *tokenizer.encode(start)] for start in starts], frozenset(), 8, 64)
    said = list(map(tokenizer.decode, begun))
    assert said[0].startswith(" Tokyo.")
    assert said[1].startswith(" Fe.")
    question = Prompts(tokenizer, None).ids([{"role": "user", "content": "What is the capital of Japan?"}])
    asked = answer(model, [question], frozenset(), 12, 64)
    assert tokenizer.decode(asked[0]).strip() != "The capital of Japan is Tokyo."
