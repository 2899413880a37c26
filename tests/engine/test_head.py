"""A large model is asked through few of its blocks, and one that does not let itself be shortened through all."""

from pathlib import Path

import mlx.core as mx
import pytest

from safetrain.engine.model import open_base
from safetrain.engine.upstream.adaptation import packing_refusal
from safetrain.engine.upstream.probing import Refusal, asked, through_few_blocks
from tests.support.random_models import TINY, build_model

GEMMA = {
    "model_type": "gemma3_text", "num_attention_heads": 2, "head_dim": 32, "sliding_window": 16,
    "sliding_window_pattern": 3, "rope_local_base_freq": 1e4, "rope_global_base_freq": 1e4,
    "query_pre_attn_scalar": 32,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "blocks"), [({}, 1), (GEMMA, 3)])
def test_one_block_of_each_kind_is_asked(tmp_path: Path, changes: dict[str, object], blocks: int) -> None:
    folder = build_model(tmp_path / "model", **{**TINY, "num_hidden_layers": 7, **changes})
    module = open_base(folder, dequantize=False).module
    asked = through_few_blocks(module, lambda: (len(module.layers), module(mx.array([[1, 2]]))))
    assert asked is not None
    assert asked[0] == blocks
    assert len(module.layers) == 7
    assert packing_refusal(module) == ""


def test_a_model_that_refuses_fewer_blocks_is_asked_through_all(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "model", **{**TINY, "num_hidden_layers": 4})
    module = open_base(folder, dequantize=False).module
    seen = []

    def of_model(ids: mx.array) -> mx.array:
        return ids if len(module.layers) == 4 else [][0]

    def ask() -> int:
        seen.append(len(module.layers))
        return asked(of_model, mx.array([1])).size

    assert through_few_blocks(module, ask) == 1
    assert seen == [1, 4]

    with pytest.raises(Refusal, match="IndexError: list index out of range"):
        through_few_blocks(module, lambda: asked(lambda _ids: [][0], mx.array([1])))
    assert len(module.layers) == 4
    assert not module.training


def test_an_error_of_our_own_is_no_refusal(tmp_path: Path) -> None:
    module = open_base(build_model(tmp_path / "model", **TINY), dequantize=False).module

    def mistaken() -> None:
        raise TypeError("no such argument")

    with pytest.raises(TypeError, match="no such argument"):
        through_few_blocks(module, mistaken)
