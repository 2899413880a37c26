"""Fine-tuning is not for Llama alone: the families people use, in 4 bits and bfloat16, train and load in mlx-lm."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from safetrain.core.memory.terms import lora_parameters
from safetrain.core.model.files import read_model_files
from safetrain.core.records.settings import LoraSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.weight_files import apply_adapter
from tests.engine.exact import SETTINGS, distance, loss_and_gradient, prepared, rows_of
from tests.engine.test_training import job_in, run
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
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.02,
        "residual_multiplier": 0.2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [], "norm_topk_prob": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_its_adapter_loads_in_mlx_lm(family: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load

    base = build_model(tmp_path / "model", bits=4, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]})
    lora = LoraSettings(4, 2.0, 0.0, 3, ("all-linear",))
    model = open_base(base, dequantize=True)
    assert model.adaptation.split_refusal == ""  # so that the logits are made in chunks
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


@pytest.mark.parametrize("family", ["cohere", "gemma2", "gemma3_text", "granite", "olmo2", "qwen3_moe"])
def test_the_self_test_passes_on_a_sound_model_of_16_bits(family: str, tmp_path: Path) -> None:
    """Quantized, and dequantized at each use."""
    from safetrain.plan.selftest import selftest

    base = build_model(tmp_path / "model", bits=4, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]})
    verdicts = selftest("safetrain.engine.probe", base, 3, 40)
    assert all(verdict.passed for verdict in verdicts), verdicts


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_dropout_of_experts_repeats_where_blocks_are_recomputed(family: str, tmp_path: Path) -> None:
    base = build_model(tmp_path / "model", model_type=family, **SMALL, **FAMILIES[family])
    settings = dataclasses.replace(SETTINGS, lora=LoraSettings(4, 2.0, 0.3, 3, ("all-linear",)))
    data = rows_of(7, 24, 11, 90, 16, 40)
    loss, gradient = loss_and_gradient(*prepared(base, settings), data)
    recomputed = dataclasses.replace(settings, gradient_checkpointing=True)
    found, other = loss_and_gradient(*prepared(base, recomputed), data)
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(other, gradient) < 1e-4
