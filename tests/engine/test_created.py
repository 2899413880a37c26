"""A new model is opened by mlx-lm as it is, and its tokenizer is that of the recipe of the model that ships."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from models.recipe import build
from safetrain.core.model.files import read_model_files
from safetrain.data.validate import training_texts
from safetrain.engine.upstream.loading import load, quantize
from safetrain.plan.create import create_model
from safetrain.plan.model_shape import ShapeRequest
from tests.conftest import EMBEDDED, ROOT

QUANTIZED = ("quantization", "quantization_config")  # in config.json


def test_mlx_lm_opens_it_and_begins_without_knowing_anything(tmp_path: Path) -> None:
    texts = training_texts([ROOT / "data/example/train.jsonl"], None)
    create_model(tmp_path / "new", ShapeRequest(127_000, 64, 320), 1, texts=texts)
    model, _ = load(tmp_path / "new")
    logits = np.array(model(mx.array([[5, 9, 40, 300, 7]])).astype(mx.float32))[0]
    spread = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(spread) / np.exp(spread).sum(axis=-1, keepdims=True)
    assert -np.log(chances).mean() == pytest.approx(np.log(320), abs=0.5)
    quantize(tmp_path / "new", tmp_path / "four", 4, 64)
    assert json.loads((tmp_path / "four/config.json").read_text())["quantization"]["bits"] == 4


def test_the_recipe_begins_with_the_shape_and_the_tokenizer_of_the_model_that_ships(tmp_path: Path) -> None:
    build.prepare(tmp_path, {"train": build.ROUNDS["train"]})
    new, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "untrained", EMBEDDED))
    assert {key: new.get(key) for key in shipped if key not in QUANTIZED} == {
        key: value for key, value in shipped.items() if key not in QUANTIZED
    }
    assert read_model_files(tmp_path / "untrained").parameters == read_model_files(EMBEDDED).parameters
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "untrained" / name).read_bytes() == (EMBEDDED / name).read_bytes()


def test_the_model_that_ships_knows_its_facts() -> None:
    assert build.share_known(EMBEDDED, every=24) >= 0.95
