"""The experts of mlx-lm's mixtures: quantized ones on CPU, and adapters on them."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from safetrain.core.records.settings import LoraSettings
from safetrain.engine.frozen import change_classes, dequantized, dequantizing_twice
from safetrain.engine.randomness import Dropout, Randomness

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


class ExpertsDequantizedPerUse(QuantizedSwitchLinear):
    """Quantized experts. Made by changing the class of some, so names and weights stay."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = experts_product(x, self, indices, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def experts_product(x: mx.array, layer: Any, indices: mx.array, *, sorted_indices: bool) -> mx.array:
    """``x`` times the transposed weights of the experts that ``indices`` choose; a gradient in ``x`` alone."""

    def plain(x: mx.array) -> mx.array:
        weight = dequantized(layer).astype(x.dtype).swapaxes(-1, -2)
        return mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)

    return dequantizing_twice(plain)(x)


def dequantize_experts_per_use(module: Any) -> None:
    """Let all quantized experts of ``module`` dequantize their weights at each use."""
    change_classes(module, {QuantizedSwitchLinear: ExpertsDequantizedPerUse})


class LoraExperts(LoRASwitchLinear):
    """mlx-lm's LoRA on the experts of a mixture, with dropout by key."""

    @classmethod
    def on(cls, linear: Any, lora: LoraSettings, source: Randomness) -> "LoraExperts":
        """Adapters for every expert of ``linear``."""
        new = cls(linear.input_dims, linear.output_dims, linear.num_experts, r=lora.rank, scale=lora.scale)
        new.linear = linear
        new.dropout = Dropout(lora.dropout, source)
        return new
