"""Answers are the model's own, in no more memory than rows of that length need, to as many questions as time allows."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from safetrain.engine.comparison import in_random_order, in_time
from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.upstream import generation
from tests.support.families import build_family
from tests.support.random_models import TINY, build_model


def one_by_one(model: BaseModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, each token from the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.array(mx.argmax(model.module(mx.array([ids]))[0, -1]))))
    return ids[len(prompt) :]


def ended(model: BaseModel, ids: list[int]) -> list[int]:
    """What stands before the first token that ends an answer."""
    return ids[: next((place for place, token in enumerate(ids) if token in model.eos_ids), len(ids))]


def prompts_of(*sizes: int) -> list[list[int]]:
    return [[3 + (i * (place + 1)) % 50 for i in range(size)] for place, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("family", "padded"),
    [("llama", True), ("gemma3_text", True), ("qwen3_moe", True), ("qwen3_next", True), ("jamba", False)],
)
def test_answers_are_those_of_each_prompt_alone(
    family: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts of any lengths together; random numbers are never equally likely."""
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 64)
    model = open_base(build_family(tmp_path / "model", family), dequantize=False)
    assert (generation.padding_refusal(model.module) == "") == padded
    prompts = prompts_of(1, 2, 9, 30, 30, 17)
    expected, told = [one_by_one(model, prompt, 8) for prompt in prompts], list[float]()
    for most_tokens in (2**20, 600, 1):  # all together, two, each alone
        found = answer(model, prompts, frozenset(), 8, most_tokens, told.append)
        assert found == [ended(model, ids) for ids in expected]
        assert told == sorted(told)
        assert 0 < told[0] < 1
        assert told[-1] == len(prompts)
        told.clear()
    stops = frozenset(ids[3 + row % 4] for row, ids in enumerate(expected))  # rows leave one after the other
    model = dataclasses.replace(model, eos_ids=stops)
    assert answer(model, prompts, frozenset(), 8, 2**20) == [ended(model, ids) for ids in expected]


def test_reading_prompts_takes_far_less_than_their_logits(tmp_path: Path) -> None:
    base = build_model(tmp_path / "model", **TINY, vocab_size=16_384)
    model, rows, tokens = open_base(base, dequantize=False), 16, 200
    mx.eval(model.module.parameters())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    answer(model, [[3 + row] * tokens for row in range(rows)], frozenset(), 4, 2**20)
    logits_bytes = rows * tokens * model.module.args.vocab_size * 4
    assert mx.get_peak_memory() - before < logits_bytes / 2


class Answerer:
    """Takes so many seconds a question, on a clock of its own."""

    def __init__(self, seconds: float, start: float = 0.0) -> None:
        self.now, self.parts = 100.0, list[int]()
        self._seconds, self._start = seconds, start

    def clock(self) -> float:
        return self.now

    def __call__(self, part: Sequence[int], done: int) -> dict[int, list[int]]:
        assert done == sum(self.parts)
        self.parts.append(len(part))
        self.now += self._start + self._seconds * len(part)
        return {number: [number] for number in part}


@pytest.mark.parametrize(("seconds", "start"), [(30.0, 10.0), (1000.0, 0.0), (1000.0, 10.0)])
def test_no_more_time_is_taken_than_there_is(seconds: float, start: float) -> None:
    ask, order = Answerer(1.0, start), in_random_order(10_000)
    found = in_time(ask, order, 8, seconds, ask.clock)
    assert list(found) == order[: len(found)]
    assert ask.now - 100.0 <= seconds
    assert len(found) >= (seconds - start * len(ask.parts)) / 3
