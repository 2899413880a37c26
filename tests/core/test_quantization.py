"""Weights of several precisions in one model are counted layer by layer, as the engine makes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from safetrain.core.memory.terms import Backend, Shape, dequantized_bytes, lora_parameters
from safetrain.core.model.files import read_model_files
from safetrain.core.model.shapes import TensorHeader, usual_bits, with_quantization
from safetrain.core.records.settings import LoraSettings
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from tests.support.random_models import TINY, build_model

LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
BLOCK = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128


def four_and_six(path: str, _module: object) -> bool | dict[str, Any]:
    return {"group_size": 64, "bits": 6 if "v_proj" in path or "down_proj" in path else 4}


def head_in_eight(path: str, _module: object) -> bool | dict[str, Any]:
    return {"group_size": 32, "bits": 8, "mode": "mxfp8"} if "lm_head" in path else True


def some_left_alone(path: str, _module: object) -> bool | dict[str, Any]:
    return "o_proj" not in path


WAYS: dict[str, tuple[dict[str, Any], Callable[[str, object], bool | dict[str, Any]]]] = {
    "4 and 6 bits": ({"group_size": 64, "bits": 4}, four_and_six),
    "MXFP4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, lambda _path, _module: True),
    "MXFP4, the head MXFP8": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, head_in_eight),
    "NVFP4": ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, lambda _path, _module: True),
    "some layers as they are": ({"group_size": 64, "bits": 8}, some_left_alone),
}


def quantized(tmp_path: Path, way: str) -> tuple[Path, Path]:
    """The same model as it is, and quantized by mlx-lm."""
    plain = build_model(tmp_path / "plain", bfloat16=True, tie_word_embeddings=False, **TINY)
    how, predicate = WAYS[way]
    module, config = load_model(plain)
    module, config = quantize_model(module, config, **how, quant_predicate=predicate)
    folder = tmp_path / "quantized"
    shutil.copytree(plain, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return plain, folder


@pytest.mark.parametrize("way", WAYS)
def test_every_weight_is_counted_once_whatever_its_bits(way: str, tmp_path: Path) -> None:
    plain, folder = quantized(tmp_path, way)
    expected, found = read_model_files(plain), read_model_files(folder)
    assert found.parameters == expected.parameters == sum(tensor.weights for tensor in expected.tensors)
    assert lora_parameters(found, LORA) == lora_parameters(expected, LORA)
    if way in ("4 and 6 bits", "MXFP4, the head MXFP8"):
        assert dequantized_bytes(found, Shape(1, 32, False), Backend(4, False, True)) == 4 * BLOCK
    model = open_base(folder, dequantize=False)
    make_trainable(model, "lora", LORA, 1)
    assert lora_parameters(found, LORA) == sum(v.size for _, v in tree_flatten(model.module.trainable_parameters()))


def header(name: str, dtype: str, *shape: int) -> TensorHeader:
    return TensorHeader(name, dtype, shape, 0)


def test_what_config_json_says_of_a_layer_decides_where_the_header_leaves_two() -> None:
    """Four times as many words as groups: 2 bits in groups of 64, or 4 in groups of 32."""
    tensors = [header("a.b.weight", "U32", 8, 16), header("a.b.scales", "BF16", 8, 4)]
    for quantization, bits in (
        ({"bits": 4, "group_size": 32}, 4),
        ({"bits": 4, "group_size": 64}, 2),
        ({"bits": 4, "group_size": 64, "a.b": {"bits": 4, "group_size": 32}}, 4),
        ({"bits": 4, "group_size": 64, "b": {"bits": 4, "group_size": 32}}, 4),
        ({}, 2),
    ):
        [weight, scales] = with_quantization(tensors, quantization)
        assert (weight.bits, weight.weights, scales.weights) == (bits, 8 * 16 * 32 // bits, 0)
        assert usual_bits([weight, scales], quantization) == bits
    assert usual_bits(with_quantization([header("a.weight", "BF16", 8, 16)], {}), {}) is None
