"""The closed form beside what people have measured on Macs, and what it says of those who did not get through.

Runs 1 to 4: MakazhanAlpamys/Soup #663, M1 of 8 GB, macOS 26.6, mlx-lm's trainer: LoRA of rank 8 on q and v of every
block, one row of 64 positions, activations kept, no accumulation, no best adapter in memory.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.memory.estimate import predicted_peak, total_bytes
from safetrain.core.memory.terms import Shape, backend_of
from safetrain.core.model.files import ModelFiles, read_model_plan
from safetrain.core.records.reports import Machine
from safetrain.core.records.settings import LoraSettings
from safetrain.plan.candidates import Estimate
from safetrain.plan.machine import machine_of, read_profile
from safetrain.plan.remedies import what_would_fit
from tests.conftest import ROOT
from tests.core.test_model_files import BIG

GIB = 2**30
PROFILES = ROOT / "conf" / "machine"
LLAMA_3B = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B = {
    **LLAMA_3B, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "num_hidden_layers": 16,
}  # fmt: skip
QWEN_HALF_B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_32B = {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
    "num_key_value_heads": 8, "num_hidden_layers": 64, "vocab_size": 152064,
}  # fmt: skip
QWEN_7B, LLAMA_8B = BIG["Qwen2.5-7B"][0], BIG["Llama-3.1-8B"][0]
MISTRAL = {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000}  # 7B
QV, ALL = ("self_attn.q_proj", "self_attn.v_proj"), ("all-linear",)
MEASURED = [(QWEN_7B, 4.922e9), (LLAMA_8B, 5.154e9), (LLAMA_3B, 2.236e9), (QWEN_HALF_B, 0.497e9)]
NAMES = ["Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-3B", "Qwen2.5-0.5B"]


def four_bits(config: dict[str, Any], folder: Path) -> ModelFiles:
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}}))
    return read_model_plan(path)


@pytest.mark.parametrize(("config", "measured_bytes"), MEASURED, ids=NAMES)
def test_the_closed_form_is_a_little_above_what_an_m1_took(
    config: dict[str, Any], measured_bytes: float, tmp_path: Path
) -> None:
    """The smallest apart, whose logits are half of its peak and are made once here for so few labels."""
    model = four_bits(config, tmp_path)
    lora = LoraSettings(8, 2.0, 0.0, model.num_layers, QV)
    terms = predicted_peak(model, lora, Shape(1, 64, False), backend_of(model, "metal", False))
    most = 1.3 if config is QWEN_HALF_B else 1.05
    assert 1.0 <= total_bytes(terms) / measured_bytes <= most


@pytest.mark.parametrize(
    ("config", "tokens"), [(MISTRAL, 256), (MISTRAL, 512), (LLAMA_3B, 512), (LLAMA_1B, 512), (QWEN_HALF_B, 512)]
)
def test_eight_gigabytes_train_it(config: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    """Rank 8 on all seven linear layers of every block, recomputed, accumulating."""
    model, m1 = four_bits(config, tmp_path), machine_of(read_profile("m1-8gb", PROFILES))
    assert recomputed(model, m1).but(tokens=tokens).fits


def test_an_8b_on_eight_gigabytes_says_how(tmp_path: Path) -> None:
    """It was trained there with q and v alone, at a peak of 4.80 GiB: all seven layers need the base on disk."""
    model, m1 = four_bits(LLAMA_8B, tmp_path), machine_of(read_profile("m1-8gb", PROFILES))
    assert not recomputed(model, m1).fits
    assert what_would_fit(recomputed(model, m1))[0].startswith("train.stream_base=true (")
    model, m1 = four_bits(MISTRAL, tmp_path), machine_of(read_profile("m1-32gb", PROFILES))  # mlx-lm's own advice
    assert Estimate(model, m1, LoraSettings(8, 2.0, 0.0, 4, QV), tokens=2048).fits


def test_what_did_not_fit_does_not(tmp_path: Path) -> None:
    """Qwen3-8B with 4,096 tokens of context was stopped at 1 % free (Ilcoach/loom); llama3 8B of 5.5 GB froze an M1
    (ollama/ollama #5680). Neither leaves room for a training, nor does a 32B on 16 GB."""
    m1, m4 = (machine_of(read_profile(name, PROFILES)) for name in ("m1-8gb", "m4-16gb"))
    context_bytes = 4096 * 36 * 8 * 128 * 2 * 2
    assert int(4.682 * GIB) + context_bytes > m1.memory_budget.mlx_bytes
    assert int(5.5e9) > m1.memory_budget.mlx_bytes
    big = four_bits(QWEN_32B, tmp_path)
    for machine in (m1, m4):
        assert recomputed(big, machine).but(tokens=128).largest_batch == 0


def recomputed(model: ModelFiles, machine: Machine) -> Estimate:
    return Estimate(model, machine, LoraSettings(8, 2.0, 0.0, model.num_layers, ALL), checkpointing=True)
