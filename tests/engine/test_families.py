"""Families that need more than the usual: their self-test passes, and mlx-lm opens what was trained."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.gated_delta import gated_delta_update

from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import lora_parameters
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import LoraSettings
from safetrain.engine.adapters import adapted_names, make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.selftest import examine, gradient_fault, load, spread, training_fault
from safetrain.engine.update import prepare
from safetrain.engine.upstream.functions import delta_rule_in_stretches
from safetrain.engine.upstream.layers import without_adapter
from safetrain.engine.upstream.loading import adapt_for_a_consumer
from safetrain.engine.weight_files import apply_adapter, save_adapter
from safetrain.plan.selftest import judge
from tests.engine.exact import SETTINGS
from tests.support.families import build_family

FAMILIES = ("afm7", "gemma3n", "nanochat", "qwen3_next", "rwkv7", "youtu_llm")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_the_self_test(family: str, tmp_path: Path) -> None:
    few = {"num_hidden_layers": 2} if family in ("qwen3_next", "rwkv7") else {}  # to be quick
    found = examine(build_family(tmp_path / "model", family, **few), 2, 12)
    assert all(verdict.passed for verdict in judge(found)), judge(found)


@pytest.mark.parametrize("family", ["afm7", "gemma3n", "rwkv7"])
def test_what_was_trained_is_counted_and_opens_in_mlx_lm(family: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_adapters, load_model

    base = build_family(tmp_path / "model", family)
    model, files = open_base(base, dequantize=False), read_model_files(base)
    lora = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
    make_trainable(model, "lora", lora, 1)
    assert lora_parameters(files, lora) == sum(v.size for _, v in tree_flatten(model.module.trainable_parameters()))
    spread(model.module)
    save_adapter(model, "lora", lora, base, tmp_path / "adapter")
    prompt = mx.array([[5, 9, 13, 21, 34]])
    again = open_base(base, dequantize=False)
    before = np.array(again.module(prompt))
    apply_adapter(again, tmp_path / "adapter")
    there = load_adapters(load_model(base)[0], str(tmp_path / "adapter"))
    here = np.array(again.module(prompt))
    assert np.abs(here - before).max() > 1e-4 * np.abs(before).max()
    np.testing.assert_allclose(np.array(there(prompt)), here, atol=1e-4 * np.abs(here).max())
    proven = open_base(base, dequantize=False)
    adapt_for_a_consumer(proven.module, tmp_path / "adapter")
    np.testing.assert_allclose(np.array(proven.module(prompt)), here, atol=1e-4 * np.abs(here).max())


def test_layers_whose_weight_the_model_reads_carry_no_adapter(tmp_path: Path) -> None:
    model = open_base(build_family(tmp_path / "model", "gemma3n"), dequantize=False)
    read = {"altup.prediction_coefs", "altup.correction_coefs"}
    assert without_adapter(model.module.layers[0]) == read
    make_trainable(model, "lora", LoraSettings(4, 2.0, 0.0, 2, ("all-linear",)), 1)
    assert "altup.modality_router" in adapted_names(model)
    assert not read & set(adapted_names(model))


def test_a_weight_that_a_model_stores_is_the_one_it_had(tmp_path: Path) -> None:
    model = open_base(build_family(tmp_path / "model", "gemma3n"), dequantize=False)
    layer = model.module.layers[0].altup.prediction_coefs
    before = np.array(layer.weight)
    assert np.abs(before).max() <= 1.0, "clipped"
    mx.grad(lambda x: model.module.model.language_model.layers[0].altup.predict(x).sum())(mx.zeros((2, 1, 3, 64)))
    assert np.array_equal(np.array(layer.weight), before)


@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 10, 30])
def test_stretches_give_what_one_recurrence_gives(tokens: int) -> None:
    mx.random.seed(1)
    q, k, v = (mx.random.normal((2, tokens, 3, 8)) / 4 for _ in range(3))
    a, b, log, bias = (mx.random.normal(shape) for shape in ((2, tokens, 3), (2, tokens, 3), (3,), (3,)))

    def summed(rule: Any) -> Any:
        def loss(*arrays: mx.array) -> mx.array:
            values, state = rule(*arrays, use_kernel=False)
            return mx.square(values).sum() + state.sum()

        return mx.value_and_grad(loss, tuple(range(7)))(q, k, v, a, b, log, bias)

    expected, found = summed(gated_delta_update), summed(delta_rule_in_stretches)
    for one, two in zip(tree_flatten(expected), tree_flatten(found), strict=True):
        np.testing.assert_allclose(np.array(one[1]), np.array(two[1]), rtol=1e-4, atol=1e-5)


def test_a_family_that_cannot_be_trained_in_reasonable_time_is_refused_by_name(tmp_path: Path) -> None:
    base = build_family(tmp_path / "model", "jamba")
    said = load(base)
    assert said["trains"] is False
    assert str(said["train_error"]).startswith("jamba is not trained: in mlx-lm the time and memory")
    with pytest.raises(ModelError, match="jamba is not trained"):
        prepare(base, SETTINGS)
    assert open_base(base, dequantize=False).module(mx.array([[1, 2]])).shape[1] == 2, "it answers"


def test_a_model_without_a_gradient_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build_family(tmp_path / "model", "rwkv7")
    model = open_base(base, dequantize=False)
    assert gradient_fault(model) == ""
    model = open_base(base, dequantize=False)

    @mx.custom_function
    def kernel(x: mx.array) -> mx.array:
        return x

    @kernel.vjp
    def backward(*_: object) -> None:
        raise ValueError("[Primitive::vjp] Not implemented for CustomKernel")

    embed = model.module.model.norm
    kind = type(embed)
    embed.__class__ = type(kind.__name__, (kind,), {"__call__": lambda self, x: kernel(kind.__call__(self, x))})
    assert "Not implemented for CustomKernel" in gradient_fault(model)


def test_a_model_whose_tokens_look_ahead_is_refused(tmp_path: Path) -> None:
    model = open_base(build_family(tmp_path / "model", "nanochat"), dequantize=False)
    assert training_fault(model) == ""
    block = model.module.transformer.h[0].attn
    kind = type(block)
    seeing_all = {"__call__": lambda self, x, mask=None, cache=None: kind.__call__(self, x, None, cache)}
    block.__class__ = type(kind.__name__, (kind,), seeing_all)
    assert training_fault(model) == "its tokens see those that come after them, in mlx-lm"
