"""Fine-tuning is not for Llama alone: the families people use train and load in mlx-lm, and what cannot is refused.

benchmarks/bench_families.py has every family.
"""

import dataclasses
import math
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
from safetrain.engine.selftest import examine, gradient_fault, training_fault
from safetrain.engine.selftest import load as try_to_load
from safetrain.engine.update import prepare
from safetrain.engine.upstream.adaptation import delta_rule_in_stretches
from safetrain.engine.upstream.loading import without_adapter
from safetrain.engine.weight_files import apply_adapter
from safetrain.plan.preflight import judge
from tests.engine.exact import LAYOUTS, SETTINGS, distance, loss_and_gradient, prepared, rows_of
from tests.engine.test_training import job_in, run
from tests.support.families import build_family
from tests.support.random_models import build_model

SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
LOCAL_ROPE = {"rope_local_base_freq": 1e4, "rope_global_base_freq": 1e4, "query_pre_attn_scalar": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 64, "sliding_window_pattern": 2, **LOCAL_ROPE},
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "cohere": {"logit_scale": 0.06, "layer_norm_eps": 1e-5},
    "granite": {
        "logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.02, "residual_multiplier": 0.2,
        "attention_bias": False, "mlp_bias": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [], "norm_topk_prob": True},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_its_adapter_loads_in_mlx_lm(family: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load

    base = build_model(tmp_path / "model", bits=4, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]})
    lora = LoraSettings(4, 2.0, 0.0, 3, ("all-linear",))
    model = open_base(base, dequantize=True)
    assert model.split is not None  # so that the logits are made in chunks
    assert not read_model_files(base).whole_logits
    make_trainable(model, "lora", lora, 1)
    trainable = sum(value.size for _, value in tree_flatten(model.module.trainable_parameters()))
    assert lora_parameters(read_model_files(base), lora) == trainable
    metrics = run(job_in(tmp_path / "run", base, dataclasses.replace(SETTINGS, max_steps=3, lora=lora))).metrics
    assert math.isfinite(metrics.final_train_loss)
    prompt = mx.array([[5, 9, 13, 21, 34]])
    ours, theirs = open_base(base, dequantize=True), load(str(base), adapter_path=str(tmp_path / "run/adapters"))[0]
    before = np.array(ours.module(prompt))
    apply_adapter(ours, tmp_path / "run/adapters")
    after, loaded = np.array(ours.module(prompt)), np.array(theirs(prompt).astype(mx.float32))
    assert np.abs(after - before).max() > 1e-3
    # theirs computes in bfloat16, ours in float32
    assert np.abs(loaded - after).mean() < 0.05 * np.abs(after).mean()


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "qwen3_moe"])
def test_the_self_test_passes_on_a_sound_model_of_16_bits(family: str, tmp_path: Path) -> None:
    """Quantized, and dequantized at each use."""
    base = build_model(tmp_path / "model", bits=4, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]})
    found = judge(examine(base, 3, 40))
    assert all(passed for _, _, passed in found), found


@pytest.mark.parametrize("family", ["afm7", "gemma3n", "qwen3_next", "rwkv7"])
def test_a_family_that_needs_more_than_the_usual_passes_it(family: str, tmp_path: Path) -> None:
    few = {"num_hidden_layers": 2} if family in ("qwen3_next", "rwkv7") else {}  # to be quick
    found = judge(examine(build_family(tmp_path / "model", family, **few), 2, 12))
    assert all(passed for _, _, passed in found), found


def test_a_family_that_cannot_be_trained_in_reasonable_time_is_refused_by_name(tmp_path: Path) -> None:
    base = build_family(tmp_path / "jamba", "jamba")
    assert str(try_to_load(base)["train_error"]).startswith("Jamba cannot be trained: in mlx-lm its recurrence needs")
    with pytest.raises(ModelError, match="Jamba cannot be trained"):
        prepare(base, SETTINGS)


@pytest.mark.parametrize(("family", "carrier"), [("afm7", "ConcatenateKVCache"), ("kimi_k3", "ResidualBlocks")])
def test_blocks_that_hand_numbers_on_are_not_recomputed(family: str, carrier: str, tmp_path: Path) -> None:
    """Of all families, these two got a wrong gradient: 40 % and 98 % off."""
    base = build_family(tmp_path / "model", family, vocab_size=2048)
    all_blocks = dataclasses.replace(SETTINGS.lora, num_layers=4)
    recomputed = dataclasses.replace(SETTINGS, lora=all_blocks, gradient_checkpointing=True)
    with pytest.raises(ModelError, match=f"cannot be trained with gradient checkpointing: .* {carrier}, where"):
        loss_and_gradient(*prepared(base, recomputed), rows_of(7, 24), LAYOUTS["rectangles"])


@pytest.mark.parametrize("family", ["qwen3_moe", "hunyuan"])
def test_dropout_repeats_where_blocks_are_recomputed(family: str, tmp_path: Path) -> None:
    """That of experts, and where a block hands its keys on to later ones."""
    if family in FAMILIES:
        base = build_model(tmp_path / "model", model_type=family, **SMALL, **FAMILIES[family])
    else:
        base = build_family(tmp_path / "model", family, vocab_size=2048)
    settings = dataclasses.replace(SETTINGS, lora=LoraSettings(4, 2.0, 0.3, 3, ("all-linear",)))
    data = rows_of(7, 24, 11, 90, 16, 40)
    loss, gradient = loss_and_gradient(*prepared(base, settings), data, LAYOUTS["rectangles"])
    recomputed = dataclasses.replace(settings, gradient_checkpointing=True)
    found, other = loss_and_gradient(*prepared(base, recomputed), data, LAYOUTS["rectangles"])
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(other, gradient) < 1e-4


def test_layers_whose_weight_a_model_reads_carry_no_adapter_and_are_never_overwritten(tmp_path: Path) -> None:
    model = open_base(build_family(tmp_path / "model", "gemma3n"), dequantize=False)
    read = {"altup.prediction_coefs", "altup.correction_coefs"}
    assert without_adapter(model.module.layers[0]) == read
    make_trainable(model, "lora", LoraSettings(4, 2.0, 0.0, 2, ("all-linear",)), 1)
    assert "altup.modality_router" in adapted_names(model)
    assert not read & set(adapted_names(model))
    block = model.module.layers[0].altup
    before = np.array(block.prediction_coefs.weight)
    assert np.abs(before).max() <= 1.0, "clipped"
    mx.grad(lambda x: block.predict(x).sum())(mx.zeros((2, 1, 3, 64)))
    assert np.array_equal(np.array(block.prediction_coefs.weight), before)


@pytest.mark.parametrize("tokens", [1, 3, 30])
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


def changed_class(module: Any, **methods: Any) -> None:
    """Give one module of a model other methods."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), methods)


def test_a_model_without_a_gradient_or_whose_tokens_look_ahead_is_refused_in_words(tmp_path: Path) -> None:
    @mx.custom_function
    def kernel(x: mx.array) -> mx.array:
        return x

    @kernel.vjp
    def backward(*_: object) -> None:
        raise ValueError("[Primitive::vjp] Not implemented for CustomKernel")

    model = open_base(build_family(tmp_path / "model", "nanochat"), dequantize=False)
    assert gradient_fault(model) == training_fault(model) == ""
    block = model.module.transformer.h[0]
    kind = type(block.attn)
    changed_class(block.attn, __call__=lambda self, x, mask=None, cache=None: kind.__call__(self, x, None, cache))
    assert training_fault(model) == "in mlx-lm this model's tokens also see the tokens after them"
    inner = type(block.mlp)
    changed_class(block.mlp, __call__=lambda self, x: kernel(inner.__call__(self, x)))
    assert "Not implemented for CustomKernel" in gradient_fault(model)
