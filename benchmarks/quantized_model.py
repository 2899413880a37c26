"""A quantized model of any size with random numbers, for benchmarks of speed and memory."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.random_models import EMBEDDED, unfilled

SHARD_BYTES = 2**29


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
    model = unfilled(config)
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
