"""Layers of mlx-lm's models that need special care: experts, and layers whose weights are read without a call."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from safetrain.core.records.settings import LoraSettings
from safetrain.engine.cpu.kernels import dequantizing_twice
from safetrain.engine.layers import Dropout, Randomness, change_classes, dequantized

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
# Gemma 3n and Kimi K3; tests/engine/test_upstream.py looks for more in all of mlx-lm's models.
READ_DIRECTLY = frozenset({"prediction_coefs", "correction_coefs", "self_attention_res_proj", "mlp_res_proj"})
CLIPPED = ("prediction_coefs", "correction_coefs")  # by Gemma 3n's AltUp


class ExpertsDequantizedPerUse(QuantizedSwitchLinear):
    """Quantized experts that dequantize at each use. Made by changing a layer's class, so names and weights stay."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        def plain(x: mx.array) -> mx.array:
            weight = dequantized(self).astype(x.dtype).swapaxes(-1, -2)
            return mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)

        y = dequantizing_twice(plain)(x)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def dequantize_experts_per_use(module: Any) -> None:
    """Make all quantized experts of ``module`` dequantize their weights at each use."""
    change_classes(module, {QuantizedSwitchLinear: ExpertsDequantizedPerUse})


class LoraExperts(LoRASwitchLinear):
    """mlx-lm's LoRA on the experts of a mixture, with this engine's dropout."""

    @classmethod
    def on(cls, linear: Any, lora: LoraSettings, source: Randomness) -> "LoraExperts":
        """Adapters for every expert of ``linear``."""
        new = cls(linear.input_dims, linear.output_dims, linear.num_experts, r=lora.rank, scale=lora.scale)
        new.linear = linear
        new.dropout = Dropout(lora.dropout, source)
        return new


def add_lora(module: Any, blocks: int, rank: int, scale: float, keys: list[str]) -> None:
    """Add mlx-lm's own LoRA, without dropout, to the layers named ``keys`` in the top ``blocks`` blocks."""
    linear_to_lora_layers(module, blocks, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys})


def without_adapter(block: Any) -> set[str]:
    """Full names inside ``block`` of layers whose weights are read directly, or that mlx-lm adapts itself (AFM)."""
    return {
        name
        for name, part in block.named_modules()
        if hasattr(part, "to_lora") or name.rpartition(".")[2] in READ_DIRECTLY
    }


def clip_once(module: Any) -> None:
    """Clip weights once that Gemma 3n clips in each pass, which would store placeholders while a gradient is traced."""
    parts = [part for _, part in module.named_modules() if all(name in part for name in CLIPPED)]
    for part in parts:
        limit = part.config.altup_coef_clip
        for name in CLIPPED:
            weight = part[name].weight.astype(mx.float32)
            part[name].weight = weight if limit is None else mx.clip(weight, -limit, limit)
    for part in parts:  # they share a config
        part.config.altup_coef_clip = None


def complete(module: Any) -> None:
    """Add the attribute that parts lack if they do not call mlx's own ``__init__`` (RecurrentGemma's)."""
    for _, part in module.named_modules():
        if "_no_grad" not in vars(part):
            part._no_grad = set()
