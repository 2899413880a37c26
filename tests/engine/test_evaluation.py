"""Answers are the model's own, in no more memory than rows of that length need."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.upstream import generation
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.support.random_models import TINY, build_model


def one_by_one(model: BaseModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, each token from the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.array(mx.argmax(model.module(mx.array([ids]))[0, -1]))))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_answers_are_the_model_s_own_however_long_the_prompt(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(generation, "CACHE_STEP", 4)
    window = {"sliding_window": 16} if family == "gemma3_text" else {}
    base = build_model(tmp_path / "model", model_type=family, **{**SMALL, **FAMILIES[family], **window})
    model = open_base(base, dequantize=False)
    prompts = [[7], [7, 8], *([3 + (i * k) % 50 for i in range(size)] for k, size in ((1, 9), (3, 30), (7, 30)))]
    found = answer(model, prompts, frozenset(), 12, 2048)
    for prompt, ids in zip(prompts, found, strict=True):
        expected = one_by_one(model, prompt, 12)
        end = next((place for place, token in enumerate(expected) if token in model.eos_ids), 12)
        assert ids == expected[:end]


def test_reading_prompts_takes_far_less_than_their_logits(tmp_path: Path) -> None:
    base = build_model(tmp_path / "model", **TINY, vocab_size=16_384)
    model, rows, tokens = open_base(base, dequantize=False), 16, 200
    mx.eval(model.module.parameters())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    answer(model, [[3 + row] * tokens for row in range(rows)], frozenset(), 4, 2**20)
    logits_bytes = rows * tokens * model.module.args.vocab_size * 4
    assert mx.get_peak_memory() - before < logits_bytes / 2
