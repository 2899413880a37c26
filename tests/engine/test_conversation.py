"""A chat that goes on: the answers are those of each prompt read anew, whatever is kept from before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.records.settings import LoraSettings
from safetrain.engine.evaluation import answer
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.upstream.conversation import Conversation, open_both, open_tuned
from tests.engine.test_fuse import adapter_of
from tests.support.families import config_of
from tests.support.random_models import TINY, open_skeleton

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
