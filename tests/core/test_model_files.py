"""A model folder that is not whole is refused; a whole one is described exactly, and so is the memory that it takes."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from safetrain.core.errors import ConfigError, MachineError, ModelError
from safetrain.core.memory.estimate import memory_of_run, require_fit
from safetrain.core.memory.system import MemoryBudget
from safetrain.core.memory.terms import (
    METAL_HEAD_SIZES,
    Setup,
    base_bytes,
    dequantized_bytes,
    lora_parameters,
    optimizer_state_bytes,
    tiles_bytes,
    trained_parameters,
)
from safetrain.core.model.files import read_limits, read_model_files, read_model_plan, sizes_of
from safetrain.core.model.shapes import TensorHeader
from safetrain.core.records.adapter_files import starting_shape
from safetrain.core.records.settings import SMALLEST, LoraSettings, Shape, TrainSettings
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.adapters import make_trainable
from safetrain.engine.model import open_base
from safetrain.engine.optimizer import BlockOptimizer, mlx_optimizer
from tests.conftest import EMBEDDED
from tests.engine.exact import SETTINGS
from tests.engine.test_architectures import FAMILIES, SMALL
from tests.stores import worst_update
from tests.support.random_models import TINY, build_model

Build = Callable[..., Path]


WEIGHTS = [
    TensorHeader("model.embed_tokens.weight", "F32", (320, 64), 0),
    TensorHeader("model.layers.3.mlp.up_proj.weight", "F32", (96, 64), 0),
]


@pytest.mark.parametrize(("config", "expected"), [
    ({"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 320},
     (64, 4, 8, 8, 8, 256, 320, None)),
    ({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 99}, (64, 4, 4, 4, 16, 256, 320, 99)),
    ({"d_model": 64, "n_layers": 2, "n_heads": 4}, (64, 2, 4, 4, 16, 256, 320, None)),
    ({"hidden_size": 64, "head_dim": 32}, (64, 4, 2, 2, 32, 256, 320, None)),  # recurrent, without heads
    ({}, (64, 4, 1, 1, 64, 256, 320, None)),
    ({"num_attention_heads": [2, 4], "num_key_value_heads": [1, 2], "intermediate_size": [80, 96]},
     (64, 4, 4, 2, 16, 96, 320, None)),
])  # fmt: skip
def test_a_shape_has_many_names_or_comes_from_weights(config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
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
        with pytest.raises(ModelError, match="not fully downloaded"):
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
    with pytest.raises(ModelError, match=r"config\.json is empty, or not a JSON object"):
        read_model_files(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_files(folder)


@pytest.mark.parametrize(("files", "words"), [
    (("adapter_model.safetensors", "adapter_config.json"), "This is a PEFT adapter(.|\n)*merge_and_unload"),
    (("adapters.safetensors", "adapter_config.json"), "This is an adapter(.|\n)*safetrain fuse"),
    (("model-Q4_K_M.gguf",), "This is a GGUF file, not a model(.|\n)*model-Q4_K_M.gguf"),
    (("config.json", "tokenizer.json", "pytorch_model-00001-of-00002.bin"), "This is a file of PyTorch"),
    (("config.json", "consolidated.00.pth"), "a file of PyTorch(.|\n)*a copy with model"),
    (("config.json", "tokenizer.json", "onnx.txt", "model.onnx"), "This is an ONNX file"),
])  # fmt: skip
def test_a_folder_without_a_model_is_called_what_it_is(files: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    for read in (read_model_files, read_model_plan):
        with pytest.raises(ModelError, match=words):
            read(tmp_path)
    if len(files) == 1:
        with pytest.raises(ModelError, match=words):
            read_model_plan(tmp_path / files[0])


def test_a_tokenizer_of_two_files_is_enough(tiny_model: Build) -> None:
    """vocab.json and merges.txt: transformers, and so mlx-lm, makes a tokenizer of them."""
    folder = tiny_model()
    kept = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(kept["vocab"]))
    with pytest.raises(ModelError, match="no tokenizer"):
        read_model_files(folder)
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in kept["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert read_model_files(folder).vocab_size == 2048
    assert ChatTokenizer(folder).encode("the sea") == ChatTokenizer(EMBEDDED).encode("the sea")


def test_an_adapter_of_peft_is_no_first_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with pytest.raises(ModelError, match=r"This is a PEFT adapter(.|\n)*merge_and_unload"):
        starting_shape(str(tmp_path), "lora", EMBEDDED, "", 2)


@pytest.mark.parametrize("read", [read_model_files, read_model_plan, read_limits])
def test_a_name_of_the_hub_is_to_be_fetched(read: Callable[[Path], object]) -> None:
    with pytest.raises(ModelError, match=r"safetrain fetch Qwen/Qwen2.5-0.5B, then .*: models/Qwen2.5-0.5B"):
        read(Path("Qwen/Qwen2.5-0.5B"))
    with pytest.raises(ModelError, match=r"does not exist(.|\n)*safetrain fetch HUB_ID"):
        read(Path("models/none"))


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
    with pytest.raises(ModelError, match=r"config\.json cannot be used: no 'hidden_size'"):
        read_model_plan(path)


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
    "4 bits in small groups": ({"group_size": 32, "bits": 4}, lambda _path, _module: True),  # headers leave 2 and 4
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


def of_lora(lora: LoraSettings, **changes: Any) -> TrainSettings:
    return dataclasses.replace(SMALLEST, lora=lora, **changes)


@pytest.mark.parametrize("way", WAYS)
def test_every_weight_is_counted_once_whatever_its_bits(way: str, tmp_path: Path) -> None:
    plain, folder = quantized(tmp_path, way)
    expected, found = read_model_files(plain), read_model_files(folder)
    assert found.parameters == expected.parameters == sum(tensor.weights for tensor in expected.tensors)
    assert lora_parameters(found, LORA) == lora_parameters(expected, LORA)
    if way in ("4 and 6 bits", "MXFP4, the head MXFP8"):
        assert dequantized_bytes(Setup(found, of_lora(LORA), "cpu"), Shape(1, 32, 32, 32)) == 4 * BLOCK
    model = open_base(folder, dequantize=False)
    make_trainable(model, "lora", LORA, 1)
    assert lora_parameters(found, LORA) == sum(v.size for _, v in tree_flatten(model.module.trainable_parameters()))


ALL = LoraSettings(16, 2.0, 0.0, 6, ("all-linear",))
MODEL = read_model_files(EMBEDDED)


@pytest.mark.parametrize(("bits", "method", "targets", "num_layers"), [
    (None, "lora", ("all-linear",), 1), (3, "dora", ("q_proj", "mlp.down_proj"), 2), (4, "lora", ("q_proj",), 2),
    (4, "dora", ("all-linear",), 1), (None, "full", ("all-linear",), 1), (None, "full", ("all-linear",), 2),
])  # fmt: skip
def test_base_and_trained_weights_are_counted_exactly(
    tiny_model: Callable[..., Path], bits: int | None, method: str, targets: tuple[str, ...], num_layers: int
) -> None:
    folder = tiny_model(bits=bits)
    model, lora = read_model_files(folder), LoraSettings(5, 2.0, 0.0, num_layers, targets)
    opened = open_base(folder, dequantize=True)
    setup = Setup(model, of_lora(lora, method=method, dequantize_base=True), "cpu")
    stored = base_bytes(Setup(model, of_lora(lora, dequantize_base=True), "cpu"))
    assert stored == sum(value.nbytes for _, value in tree_flatten(opened.module.parameters()))
    make_trainable(opened, method, lora, 1)
    trained = sum(value.size for _, value in tree_flatten(opened.module.trainable_parameters()))
    assert trained_parameters(setup) == trained
    experts = TensorHeader("model.layers.0.mlp.switch_mlp.up_proj.weight", "BF16", (8, 100, 64), 8 * 100 * 64 * 2)
    mixture = dataclasses.replace(MODEL, num_layers=1, tensors=(experts,), quantization_bits=None)
    assert lora_parameters(mixture, dataclasses.replace(ALL, num_layers=1)) == 16 * 8 * 164


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "lora") for name in ("adam", "muon")), ("adamw", "pretrain"), ("muon", "pretrain")]
)
def test_the_state_of_each_optimizer_is_counted(tiny_model: Callable[..., Path], name: str, method: str) -> None:
    folder, lora = tiny_model(bits=4 if method == "lora" else None), dataclasses.replace(ALL, rank=8, num_layers=2)
    opened = open_base(folder, dequantize=True)
    make_trainable(opened, method, lora, 1)
    optimizer = BlockOptimizer(mlx_optimizer(name, 0.0, whole_model=method == "pretrain"))
    optimizer.init(opened.module.trainable_parameters())
    kept = [value for key, value in tree_flatten(optimizer.state) if key not in ("step", "learning_rate")]
    setup = Setup(read_model_files(folder), of_lora(lora, method=method, optimizer=name), "cpu")
    assert optimizer_state_bytes(setup) == sum(value.nbytes for value in kept)


@pytest.mark.parametrize("head_size", METAL_HEAD_SIZES)
def test_attention_on_metal_has_tiles_of_few_rows_and_never_all_scores(head_size: int) -> None:
    """What mlx-metal 0.32.4 allocates: three tiles of at most 1024 x 1024 a row and head, and three float32 sums."""
    model = dataclasses.replace(MODEL, num_heads=32, num_kv_heads=8, head_dim=head_size)
    metal = Setup(model, of_lora(ALL, compute_dtype="float16"), "metal")

    def bytes_of(rows: int, tokens: int) -> int:
        return tiles_bytes(metal, Shape(rows, tokens, rows * tokens, rows * tokens))

    def sums(tokens: int) -> int:
        return 4 * tokens * (32 + 8 + 8) * head_size

    assert bytes_of(1, 512) == 3 * 2 * 32 * 512**2 + sums(512)
    assert bytes_of(1, 8192) == 3 * 2 * 32 * 1024**2 + sums(8192)
    assert bytes_of(64, 512) <= 2**28 + sums(64 * 512)


def test_a_run_is_checked_against_the_budget_and_the_model() -> None:
    def check(settings: TrainSettings, rows: int, budget_bytes: int) -> None:
        largest, budget = worst_update(rows, 512), MemoryBudget(budget_bytes)
        require_fit(memory_of_run(MODEL, settings, largest, "cpu", budget, None), settings, largest, budget)

    check(SETTINGS, 64, 10**9)
    with pytest.raises(MachineError, match="do not fit"):
        check(dataclasses.replace(SETTINGS, batch_size=512), 512, 10**9)
    with pytest.raises(ConfigError, match="Quantized weights cannot be trained in full"):
        check(dataclasses.replace(SETTINGS, method="full"), 64, 10**9)
    with pytest.raises(ConfigError, match="longer than the model's context"):
        check(dataclasses.replace(SETTINGS, max_seq_length=513), 64, 10**12)
