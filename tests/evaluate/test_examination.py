"""Answers are the model's own, in no more memory than rows of that length need."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.records.settings import LoraSettings
from safetrain.engine.cpu.blas import cores, use_threads
from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.upstream import generation
from safetrain.engine.upstream.generation import Conversation
from safetrain.engine.weight_files import open_both, open_tuned
from tests.export.test_fuse import adapter_of
from tests.support.families import build_family, config_of
from tests.support.random_models import TINY, build_model, open_skeleton


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


FIRST, SECOND = [5, 9, 13, 21, 34], [2, 55, 8, 40]
LONG = list(range(3, 1203))  # read in several parts
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))


@pytest.fixture(scope="module")
def model() -> BaseModel:
    """Of random weights, without a token that ends an answer."""
    mx.random.seed(7)
    return open_skeleton({"model_type": "llama", **TINY, "vocab_size": 2048, "rms_norm_eps": 1e-5})


def talk(
    model: BaseModel, context: int | None = None, stops: frozenset[int] = frozenset(), *sampling: Any
) -> Conversation:
    return Conversation(model, stops, context, 12, *sampling)


def anew(model: BaseModel, prompt: list[int], most: int = 12) -> list[int]:
    return answer(model, [prompt], frozenset(), most, 1)[0]


def test_a_second_turn_is_read_from_where_it_is_new(model: BaseModel) -> None:
    chat = talk(model)
    said = list(chat.answer(FIRST))
    assert said == anew(model, FIRST)
    assert chat.kept_tokens == 0
    following = [*FIRST, *said, *SECOND]
    assert list(chat.answer(following)) == anew(model, following)
    assert chat.kept_tokens >= len(FIRST) + len(said) - 1
    other = [*FIRST[:3], *LONG]
    assert list(chat.answer(other)) == anew(model, other)
    assert chat.kept_tokens == 3
    assert list(chat.answer(other)) == anew(model, other)
    assert chat.kept_tokens == len(other) - 1


def test_a_model_that_cannot_go_back_reads_anew() -> None:
    """A recurrent one: what it has read is one state."""
    mx.random.seed(4)
    recurrent = open_skeleton(config_of("mamba2"))
    chat = talk(recurrent)
    said = list(chat.answer(FIRST))
    other = [*FIRST[:3], *SECOND]
    assert list(chat.answer(other)) == anew(recurrent, other)
    assert chat.kept_tokens == 0
    assert said == anew(recurrent, FIRST)


def test_an_answer_ends_where_it_was_taught_to_and_a_full_context_and_a_cut_are_told_apart(model: BaseModel) -> None:
    free = anew(model, FIRST)
    size = free.index(free[4])
    for context, stops, length, ended in (
        (None, {free[4]}, size, "stop"), (len(FIRST) + 3, set(), 3, "context"), (None, set(), 12, "length"),
        (len(FIRST), set(), 0, "context"),
    ):  # fmt: skip
        chat = talk(model, context, stops=frozenset(stops))
        assert (list(chat.answer(FIRST)), chat.ended) == (free[:length], ended)


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_base_and_tuned_share_their_weights(method: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model()
    adapter = adapter_of(base, tmp_path / "adapter", method, lora=LORA)
    both = open_both(base, adapter)
    alone = open_base(base, dequantize=False), open_tuned(base, adapter)
    for one, other in zip(both, alone, strict=True):
        assert np.array_equal(logits(one), logits(other))
    assert not np.array_equal(logits(both[0]), logits(both[1]))
    shared = set.intersection(*({id(value) for _, value in arrays(each)} for each in both))
    trained = {name for name, _ in arrays(both[1])} - {name for name, _ in arrays(both[0])}
    assert len(shared) == len(arrays(both[0])) or (method == "full" and len(shared) > 0)
    assert bool(trained) == (method != "full")


def logits(model: BaseModel) -> np.ndarray:
    return np.array(model.module(mx.array([FIRST])))


def arrays(model: BaseModel) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.module.parameters())


@pytest.mark.parametrize(("rows_as_slow", "threads"), [(16, 1), (10**6, 2)])
def test_small_products_are_not_shared_by_threads(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rows_as_slow: int, threads: int
) -> None:
    """A thread that waits for another one loses milliseconds beside a busy program."""
    monkeypatch.setattr("safetrain.engine.model.ROWS_AS_SLOW", rows_as_slow)
    model, seen, before = open_base(tiny_model(), dequantize=False), list[int](), cores()
    use_threads(2)
    try:
        answer(model, prompts_of(5, 9), frozenset(), 4, 10**6, lambda _: seen.append(cores()))
        talk = Conversation(model, frozenset(), None, max_new_tokens=4)
        seen += [cores() for _ in talk.answer(prompts_of(5)[0])]
        assert (set(seen), cores()) == ({threads}, 2)
    finally:
        use_threads(before)
