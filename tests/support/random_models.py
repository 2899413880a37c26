"""Real architectures from mlx-lm with random weights, in the Hugging Face layout. No download, no meaning."""

import importlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetrain.engine.model import BaseModel

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "encyclopedia-3m"
SHARD_BYTES = 2**29
TINY: dict[str, Any] = {  # quick to train
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def build_model(folder: Path, *, bits: int | None = None, bfloat16: bool = False, seed: int = 3, **more: Any) -> Path:
    """Write a model with the embedded one's tokenizer and config.json, but for ``more``; ``model_type`` may be any."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map

    folder.mkdir(parents=True)
    config = {**json.loads((EMBEDDED / "config.json").read_text()), **more}
    config.pop("quantization")
    mx.random.seed(seed)
    model = _unfilled(config)
    if bfloat16:
        model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def _unfilled(config: dict[str, Any]) -> Any:
    """A model of mlx-lm, in the module that it takes for this type: mistral is its llama."""
    from mlx_lm.utils import MODEL_REMAPPING

    kind = config["model_type"]
    architecture = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    return architecture.Model(architecture.ModelArgs.from_dict(config))


def write_quantized_model(folder: Path, *, bits: int = 4, **changes: Any) -> Path:
    """Write a quantized model of any size in seconds: its quantized numbers are drawn, nothing is quantized.

    With the embedded model's tokenizer. Its float weights are never made.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True)
    config = {**json.loads((EMBEDDED / "config.json").read_text()), **changes}
    config["quantization"] = {"group_size": 64, "bits": bits}
    model = _unfilled(config)
    nn.quantize(model, group_size=64, bits=bits)
    mx.random.seed(3)
    shard, size, shards = dict[str, Any](), 0, list[dict[str, str]]()
    parameters: list[tuple[str, Any]] = tree_flatten(model.parameters())
    for number, (name, lazy) in enumerate(parameters):
        shard[name] = _drawn(name, lazy)
        size += shard[name].nbytes
        if size > SHARD_BYTES or number == len(parameters) - 1:
            file = f"model-{len(shards) + 1:05}.safetensors"
            mx.save_safetensors(str(folder / file), shard, metadata={"format": "mlx"})
            shards.append(dict.fromkeys(shard, file))
            shard, size = {}, 0
    places = {name: file for each in shards for name, file in each.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, folder / file)
    return folder


def _drawn(name: str, like: Any) -> Any:
    """Numbers of the size that weights have."""
    import mlx.core as mx

    if like.dtype == mx.uint32:
        return mx.random.randint(0, 2**31 - 1, like.shape).astype(mx.uint32) * 2
    if name.endswith(".scales"):
        return mx.full(like.shape, 0.004, mx.bfloat16)
    if name.endswith(".biases"):
        return mx.full(like.shape, -0.03, mx.bfloat16)
    return mx.ones(like.shape, mx.bfloat16)


def open_skeleton(config: dict[str, Any]) -> "BaseModel":
    """A model of this config.json with weights that mean nothing, made in memory."""
    from safetrain.engine.model import BaseModel
    from safetrain.engine.upstream.adaptation import adapt
    from safetrain.engine.upstream.loading import build, ready_to_compute

    module = ready_to_compute(build(config))
    return BaseModel(module, frozenset(), *adapt(module))
