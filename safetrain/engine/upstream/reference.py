"""mlx-lm's own layers, which the self-test compares this engine with."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import dequantize_model

from safetrain.engine.upstream.loading import complete, load

ROUNDING = "quant_key_scale"


def plain_model(folder: Path, *, in_float32: bool) -> Any:
    """The model as mlx-lm opens it, frozen; in float32 it is dequantized first."""
    module = load(folder)[0]
    if in_float32:
        module = dequantize_model(module)
        module.update(
            tree_map(lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w, module.parameters())
        )
    complete(module)
    module.freeze()
    return module


def add_lora(module: Any, blocks: int, rank: int, scale: float, keys: list[str]) -> None:
    """mlx-lm's LoRA layers, without dropout, on the layers of the top blocks that ``keys`` names."""
    linear_to_lora_layers(module, blocks, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys})


def has_experts(module: Any) -> bool:
    """Whether any layer is a mixture."""
    return any("Switch" in type(part).__name__ for _, part in module.named_modules())


def rounds(module: Any) -> bool:
    """Whether any layer rounds its keys and values to whole steps (AFM's)."""
    return any(ROUNDING in part for _, part in module.named_modules())
