"""A model folder that is not whole is refused by the file that is wrong; a whole one is described exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_limits, read_model_files, read_model_plan, sizes_of
from safetrain.core.model.shapes import TensorHeader
from tests.conftest import EMBEDDED

Build = Callable[..., Path]


def test_the_embedded_model_is_described() -> None:
    model = read_model_files(EMBEDDED)
    assert (model.model_type, model.hidden_size, model.num_layers, model.vocab_size) == ("llama", 192, 6, 2048)
    assert (model.quantization_bits, model.compute_bytes) == (4, 4)
    weights = 2048 * 192 + 6 * (4 * 192 * 192 + 3 * 192 * 512)
    assert model.parameters == weights + 13 * 192


@pytest.mark.parametrize("bits", [None, 3])
def test_parameters_do_not_depend_on_the_quantization(tiny_model: Build, bits: int | None) -> None:
    files = read_model_files(folder := tiny_model(bits=bits))
    assert files.parameters == 2048 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 5 * 64
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert files.static_bytes == sum(tensor.nbytes for tensor in tensors.values())


WEIGHTS = [
    TensorHeader("model.embed_tokens.weight", "F32", (320, 64), 0),
    TensorHeader("model.layers.3.mlp.up_proj.weight", "F32", (96, 64), 0),
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 320},
         (64, 4, 8, 8, 8, 256, 320, None)),
        ({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 99}, (64, 4, 4, 4, 16, 256, 320, 99)),
        ({"d_model": 64, "n_layers": 2, "n_heads": 4}, (64, 2, 4, 4, 16, 256, 320, None)),
        ({"hidden_size": 64, "head_dim": 32}, (64, 4, 2, 2, 32, 256, 320, None)),  # recurrent, without heads
        ({}, (64, 4, 1, 1, 64, 256, 320, None)),
        ({"num_attention_heads": [2, 4], "num_key_value_heads": [1, 2], "intermediate_size": [80, 96]},
         (64, 4, 4, 2, 16, 96, 320, None)),
    ],
)  # fmt: skip
def test_a_shape_has_many_names_or_is_that_of_the_weights(
    config: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    """Width, layers, heads, key heads, a head, feed-forward, vocabulary, positions."""
    assert tuple(sizes_of(config, WEIGHTS, Path()).values()) == expected
    with pytest.raises(ModelError, match=r"config\.json has no num_hidden_layers, and the weights"):
        sizes_of({"hidden_size": 64}, [], Path())


def test_a_truncated_file_is_named_with_its_sizes(tiny_model: Build) -> None:
    weights = tiny_model() / "model.safetensors"
    content = weights.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    fingerprints = {read_model_files(weights.parent).fingerprint}
    weights.write_bytes(changed)
    assert read_model_files(weights.parent).fingerprint not in fingerprints
    for size in (0, 5, 100, len(content) - 1):
        weights.write_bytes(content[:size])
        with pytest.raises(ModelError, match="damaged or not fully downloaded") as caught:
            read_model_files(weights.parent)
        assert "model.safetensors" in str(caught.value)
        assert f"{size} bytes" in str(caught.value)
        assert caught.value.exit_code == 4


def test_missing_parts_are_named(tiny_model: Build, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_files(tmp_path / "nowhere")
    other, folder = tiny_model("other") / "model.safetensors", tiny_model()
    weights = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    for name in ("../other/model.safetensors", str(other)):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="names a file outside of its folder"):
            read_model_files(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}))
    with pytest.raises(ModelError, match="1 of 2 weight files are missing") as caught:
        read_model_files(folder)
    assert "model-00002.safetensors" in str(caught.value)
    index.unlink()
    weights.rename(folder / "weights.bin")
    with pytest.raises(ModelError, match="has no weights"):
        read_model_files(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        read_model_files(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_model_files(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_files(folder)


@pytest.mark.parametrize("read", [read_model_files, read_model_plan, read_limits])
def test_a_name_of_the_hub_is_to_be_fetched(read: Callable[[Path], object]) -> None:
    with pytest.raises(ModelError, match=r"safetrain fetch Qwen/Qwen2.5-0.5B, then .*: models/Qwen2.5-0.5B"):
        read(Path("Qwen/Qwen2.5-0.5B"))
    with pytest.raises(ModelError, match=r"does not exist(.|\n)*safetrain fetch HUB_ID"):
        read(Path("models/none"))
