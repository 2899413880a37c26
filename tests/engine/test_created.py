"""A new model is opened by mlx-lm as it is, and its tokenizer is that of the recipe of the model that ships."""

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from models.recipe import build, pretraining
from models.recipe.text import document, subjects
from safetrain.core.model.files import read_model_files
from safetrain.engine.upstream.convert import quantize
from safetrain.engine.upstream.loading import load
from safetrain.plan.creation.create import TokenizerOfText, create_model
from safetrain.plan.creation.shapes import AskedShape
from safetrain.plan.creation.tokenizers import CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer
from tests.conftest import EMBEDDED, ROOT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mlx_lm_opens_it_and_begins_without_knowing_anything(tmp_path: Path, dtype: str) -> None:
    text = TokenizerOfText((ROOT / "data/example/train.jsonl",))
    create_model(tmp_path / "new", AskedShape(hidden=64, layers=2, heads=2, vocabulary=320), text, 1, dtype)
    model, _ = load(tmp_path / "new")
    logits = np.array(model(mx.array([[5, 9, 40, 300, 7]])).astype(mx.float32))[0]
    spread = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(spread) / np.exp(spread).sum(axis=-1, keepdims=True)
    assert -np.log(chances).mean() == pytest.approx(np.log(320), abs=0.5)
    quantize(tmp_path / "new", tmp_path / "four", 4, 64)
    assert json.loads((tmp_path / "four/config.json").read_text())["quantization"]["bits"] == 4


def test_the_recipe_makes_the_same_tokenizer() -> None:
    source = random.Random(build.SEED)
    texts = [document(subject, source) for _ in range(3) for subject in subjects()]
    made = train_tokenizer(texts, build.VOCABULARY)
    assert made.definition == build.train_tokenizer(texts).to_str(pretty=True)
    assert build.CHAT_TEMPLATE == CHAT_TEMPLATE
    assert list(SPECIAL_TOKENS) == [build.END, build.PAD, build.SYSTEM, build.USER, build.ASSISTANT]


def test_the_recipe_by_commands_begins_with_the_model_that_build_trains(tmp_path: Path) -> None:
    pretraining.prepare(tmp_path, {"train": 4, "valid": 1})
    config = json.loads((tmp_path / "untrained/config.json").read_text())
    assert {key: config[key] for key in build.CONFIG} == build.CONFIG
    assert read_model_files(tmp_path / "untrained").parameters == read_model_files(EMBEDDED).parameters
    rows = [json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * len(subjects())
