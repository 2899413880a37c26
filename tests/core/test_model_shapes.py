"""A model's size from its config.json alone is that of its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files, read_model_plan
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.support.random_models import build_model

DENSE = [family for family in FAMILIES if family not in ("mixtral", "qwen3_moe")]
BIG: dict[str, tuple[dict[str, Any], int]] = {  # what their safetensors indexes on the Hugging Face hub count
    "Llama-3.1-8B": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256}, 8_030_261_248),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
         "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064}, 7_615_616_512),
    "Qwen3-8B": (
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36, "vocab_size": 151936}, 8_190_735_360),
    "gemma-2-9b": (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42, "vocab_size": 256000}, 9_241_705_984),
    "Phi-3-mini": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32064}, 3_821_079_552),
}  # fmt: skip


@pytest.mark.parametrize(("family", "bits"), [(family, (None, 4)[number % 2]) for number, family in enumerate(DENSE)])
def test_names_shapes_and_sizes_are_those_of_the_weight_files(family: str, bits: int | None, tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", bits=bits, bfloat16=True, model_type=family, **{**SMALL, **FAMILIES[family]})
    real = read_model_files(folder)
    config = json.loads((folder / "config.json").read_text())
    bare = tmp_path / "config.json"
    bare.write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    planned = read_model_plan(bare)
    # the published gemma 3 has no head of its own; a model with random weights is saved with one
    tensors = [t for t in real.tensors if family != "gemma3_text" or not t.name.startswith("lm_head.")]
    assert sorted((t.name, t.shape, t.size_bytes) for t in planned.tensors) == sorted(
        (t.name, t.shape, t.size_bytes) for t in tensors
    )
    assert planned.static_bytes == sum(t.size_bytes for t in tensors)


@pytest.mark.parametrize("name", BIG)
def test_the_counts_of_well_known_models(name: str, tmp_path: Path) -> None:
    config, parameters = BIG[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    planned = read_model_plan(path)
    assert planned.parameters == parameters
    assert planned.static_bytes == 2 * parameters
    path.write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    quantized = read_model_plan(tmp_path)  # a folder that has nothing else
    assert quantized.parameters == parameters
    assert quantized.static_bytes == pytest.approx(parameters * 4.5 / 8, rel=2e-3)


def test_an_unknown_architecture_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BIG["Llama-3.1-8B"][0], "model_type": "mamba2"}))
    with pytest.raises(ModelError, match="cannot plan the architecture mamba2"):
        read_model_plan(path)
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"config\.json has no 'hidden_size'"):
        read_model_plan(path)
