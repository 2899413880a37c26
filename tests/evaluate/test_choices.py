"""Probabilities of options: exact, in any order; intervals that hold the truth; a temperature from valid alone."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from safetrain.core.data.store import open_store
from safetrain.core.data.token_rows import Question
from safetrain.core.data.training_rows import held_out_in
from safetrain.core.errors import ConfigError
from safetrain.core.records.schema import Evaluate
from safetrain.core.storage import paths
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from safetrain.data.render import Renderer
from safetrain.data.tokenize import DataSettings, labelled
from safetrain.data.validate import validate
from safetrain.engine.evaluation import option_logprobs
from safetrain.engine.model import open_base
from safetrain.evaluate.exam import Task, choice_of, exam_of
from safetrain.evaluate.statistics import (
    brier_score,
    calibration_error,
    choices_of_tuned,
    fitted_temperature,
    macro_f1,
    probabilities,
    wilson_interval,
)
from tests.conftest import ROOT
from tests.support.families import build_family

SETTINGS = Evaluate(max_examples=None, max_new_tokens=None, score=None, schema=None, checker=None)
WINDOW = range(12, 19)  # lengths of prompts around a sliding window
OPTIONS = [[5], [5, 9], [7, 8, 9, 10], [5, 9, 2]]


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3_text"])  # caches: cut back, not, with a window
def test_probabilities_are_those_of_the_logits_in_any_order_of_options(family: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 16} if family == "gemma3_text" else {}
    model = open_base(build_family(tmp_path / "model", family, **changes), dequantize=False)
    prompts = [[3 + at % 50 for at in range(size)] for size in (30, 1, 7, *WINDOW)]
    found = option_logprobs(model, prompts, [OPTIONS] * len(prompts))
    for prompt, values in zip(prompts, found, strict=True):
        expected = np.zeros(len(OPTIONS))
        for number, option in enumerate(OPTIONS):
            logits = np.array(model.module(mx.array([prompt + option]))[0].astype(mx.float32)).astype(np.float64)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected[number] = sum(logits[len(prompt) - 1 + at, each] for at, each in enumerate(option))
        assert np.allclose(probabilities(values), probabilities(expected), rtol=0, atol=1e-6)
    others = option_logprobs(model, prompts[::-1], [OPTIONS[::-1]] * len(prompts))
    for one, other in zip(found, others[::-1], strict=True):
        assert np.allclose(probabilities(one), probabilities(other)[::-1], rtol=0, atol=1e-6)


def drawn(source: np.random.Generator, rows: int, over: float) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Confidences, right answers, and their true accuracy and calibration error, of a model too sure by ``over``."""
    confidence = 0.25 + 0.75 * source.beta(4, 1.2, rows)
    chance = np.clip(confidence - over, 0.0, 1.0)
    return confidence, source.random(rows) < chance, float(chance.mean()), float((confidence - chance).mean())


@pytest.mark.parametrize("over", [0.1, 0.2])
def test_nineteen_of_twenty_intervals_hold_accuracy_and_calibration_error(over: float) -> None:
    source, held = np.random.default_rng(3), np.zeros(2)
    for _ in range(1000):
        confidence, right, accuracy, error = drawn(source, 400, over)
        low, high = wilson_interval(float(right.sum()), len(right))
        found = calibration_error(confidence, right)
        assert found is not None
        assert found[1] <= found[0] <= found[2]
        held += low <= accuracy <= high, found[1] <= error <= found[2]
    assert (np.abs(held / 1000 - 0.95) <= 0.02).all(), held


def test_probabilities_that_are_right_have_no_error() -> None:
    found = calibration_error(*drawn(np.random.default_rng(1), 1000, 0.0)[:2])
    assert found is not None
    assert found[1] == 0.0
    assert calibration_error(np.full(99, 0.9), np.ones(99)) is None, "too few to say"


def test_a_temperature_corrects_probabilities_that_are_too_sure() -> None:
    source = np.random.default_rng(5)
    true = [source.normal(0, 1.5, 4) for _ in range(600)]
    right = [int(source.choice(4, p=probabilities(values))) for values in true]
    assert fitted_temperature([3 * values for values in true], right) == pytest.approx(3.0, rel=0.15)
    assert fitted_temperature(true[:5], right[:5]) == 1.0, "too few"
    far = [np.array([0.0, -1000.0])] * 30
    assert np.isfinite(fitted_temperature(far, [1] * 30))


def test_scores_of_a_set_are_the_published_ones_and_a_constant_answer_is_called_so() -> None:
    assert macro_f1(["a", "a", "b"], ["a", "b", "b"]) == pytest.approx(2 / 3)
    assert brier_score([np.array([0.7, 0.3])], [1]) == pytest.approx(0.98)
    values = [np.log(np.array([0.8, 0.2]))] * 4
    texts = [("yes", "no"), ("yes", "no"), ("yes", "no"), ("yes", "no")]
    found = choices_of_tuned(values, [0, 0, 0, 1], ("no", "yes"), texts, ("", "."), ((), ()))
    assert found.majority == "yes"
    assert found.confusion == ((0, 1), (0, 3)), "in the order of the options"
    assert found.calibration.fitted_on == 0


def exam_in(folder: Path, rows: list[dict[str, Any]], settings: Evaluate = SETTINGS) -> Any:
    """The exam of rows in train, valid and test, with the embedded model's tokenizer."""
    for name, part in zip(("train", "valid", "test"), np.array_split(np.array(rows, dtype=object), 3), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    base = ROOT / "models/encyclopedia-3m"
    validate([folder], base, DataSettings(), into=paths.VALIDATED)
    test, valid = (open_store(paths.VALIDATED / f"{name}.tokens.safetensors") for name in ("test", "valid"))
    return exam_of(settings, test, valid, held_out_in(test, None, 64), ChatTokenizer(base), 10_000)[0]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    return lambda rows, **settings: exam_in(tmp_path / "rows", rows, dataclasses.replace(SETTINGS, **settings))


def test_the_temperature_is_fitted_on_questions_of_valid_alone(project: Callable[..., Any]) -> None:
    rows = [{"text": f"thing number {at}", "label": ("hot", "cold", "mild weather")[at % 3]} for at in range(90)]
    exam = project(rows)
    assert exam.task.scorer == "choice"
    assert exam.task.options == ("cold", "hot", "mild weather")
    asked = {choice.prompt for choice in exam.choices.values()}
    fitted = {choice.prompt for choice in exam.calibration}
    assert len(asked) == len(fitted) == 30
    assert not asked & fitted
    texts = {exam.tokenizer.decode(choice.prompt) for choice in exam.calibration}
    assert texts == {f"thing number {at}" for at in range(30, 60)}, "the rows of valid.jsonl"
    for number, choice in exam.choices.items():  # each option as the row's own answer is written
        written = [exam.tokenizer.decode(ids, special=True) for ids in choice.options]
        assert written == [f"{option}<|end|>" for option in exam.task.options]
        assert choice.options[choice.right] == exam.held_out.questions[number].answer


@pytest.mark.parametrize(
    ("row", "scorer", "why"),
    [
        ({"prompt": "Question #?", "options": ["a", "b"], "answer": "b"}, "choice", "rows have options"),
        ({"question": "What is #?", "choices": ["x", "yes"], "answer": 1}, "choice", "rows have options"),
        ({"prompt": "Number #", "completion": '{"n": #}'}, "json", "answers are JSON objects"),
        ({"prompt": "Number #", "completion": "It is #."}, "text", "answers are texts"),
    ],
)
def test_what_answers_are_is_recognised_and_said(
    row: dict[str, Any], scorer: str, why: str, project: Callable[..., Any]
) -> None:
    rows = [json.loads(json.dumps(row).replace("#", str(at))) for at in range(60)]
    exam = project(rows)
    assert (exam.task.scorer, exam.task.why) == (scorer, why)
    assert project(rows, score="text").task.scorer == "text"
    if scorer == "text":
        with pytest.raises(ConfigError, match="score is choice"):
            project(rows, score="choice")


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def test_options_are_tokens_as_in_training_where_a_tokenizer_puts_a_space_first(tmp_path: Path) -> None:
    """As Llama 2's and Zephyr's do: what they decode is encoded otherwise."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    marks = ["<unk>", "<s>", "</s>"]
    words = ["Lisbon is a capital country element <|user|> <|assistant|>\n"] * 20
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=90, special_tokens=marks))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text((ROOT / "models/encyclopedia-3m/config.json").read_text())
    tokenizer, options = ChatTokenizer(tmp_path / "model"), ("capital", "country", "element")

    def answer(label: str) -> tuple[list[int], tuple[int, ...]]:
        row = parse_row({"text": "Lisbon", "label": label})
        rendered = Renderer(tokenizer.template, tokenizer.controls, tokenizer.end_token).render(row)
        encoding = tokenizer.encode_chats([rendered.text])[0]
        tokens, runs = labelled(rendered, encoding)
        prompt = tokenizer.encode_chat(rendered.text[: rendered.spans[-1].start])
        return prompt, tuple(tokens.ids[runs[-1][0] : runs[-1][1] + 1].tolist())

    for right in options:
        prompt, ids = answer(right)
        question = Question(0, tuple(prompt), ids, "Lisbon")
        choice = choice_of(question, {"prompt": "Lisbon", "completion": right}, Task("choice", "", options), tokenizer)
        assert choice is not None
        assert choice.options == tuple(answer(option)[1] for option in options)
