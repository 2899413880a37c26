"""The trained part of a model: LoRA and DoRA layers, some blocks (full), or everything (pretrain).

The layers have mlx-lm's parameter names and work on a base of any bit width, quantized or not. mlx-lm's own layers
multiply 16-bit activations in float32 and do not support DoRA on 3, 5 and 6 bits. Master weights are float32 here too;
they are rounded to the activations' type for the product.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from safetrain.core.errors import ConfigError, ModelError
from safetrain.core.records.schema import PRETRAIN, WHOLE
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings, is_target
from safetrain.engine.layers import Dropout, Randomness, dequantized, inputs_of, slices_of
from safetrain.engine.model import BaseModel
from safetrain.engine.upstream.loading import EXPERTS, LoraExperts, without_adapter

LINEAR = (nn.Linear, nn.QuantizedLinear)


class LoraLinear(nn.Module):
    """y = base(x) + scale * dropout(x) A B, with A (inputs, rank) and B (rank, outputs), after arXiv 2106.09685."""

    def __init__(self, linear: Any, lora: LoraSettings, source: Randomness) -> None:
        super().__init__()
        outputs, inputs = shape_of(linear)
        self.linear = linear
        self.scale = lora.scale
        self.dropout = Dropout(lora.dropout, source)
        bound = 1 / math.sqrt(inputs)
        self.lora_a = mx.random.uniform(-bound, bound, (inputs, lora.rank))
        self.lora_b = mx.zeros((lora.rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + self.delta(x)

    def delta(self, x: mx.array) -> mx.array:
        """The adapter's own output, without the base layer's."""
        return self.dropout(x) @ self.lora_a.astype(x.dtype) @ (self.scale * self.lora_b).astype(x.dtype)


class DoraLinear(LoraLinear):
    """LoRA whose columns are rescaled to a trained length m, after arXiv 2402.09353, section 4.3."""

    def __init__(self, linear: Any, lora: LoraSettings, source: Randomness) -> None:
        super().__init__(linear, lora, source)
        self.m = row_lengths(linear)
        self._squares = self.m * self.m  # of the frozen weight's rows
        mx.eval(self._squares)

    def __call__(self, x: mx.array) -> mx.array:
        y = (self.m / self._lengths(x.dtype)).astype(x.dtype) * (self._product(x) + self.delta(x))
        return y + self.linear["bias"] if "bias" in self.linear else y

    def _product(self, x: mx.array) -> mx.array:
        return self.linear(x) - self.linear["bias"] if "bias" in self.linear else self.linear(x)

    def _lengths(self, dtype: mx.Dtype) -> mx.array:
        """Row lengths of W + scale (A B)^T, shape (outputs,); the gradient treats them as constants.

        They come from products with the few columns of A: |w + d|^2 = |w|^2 + 2 w.d + |d|^2.
        """
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b * self.scale)
        crossed = (self._product(a.T.astype(dtype)).astype(mx.float32) * b).sum(axis=0)
        return mx.sqrt(mx.maximum(self._squares + 2 * crossed + ((b.T @ (a.T @ a)) * b.T).sum(axis=1), 1e-12))


def row_lengths(linear: Any) -> mx.array:
    """Euclidean length of each row of a layer's weight, (outputs,). No whole weight is held in float32."""
    parts = list[mx.array]()
    for rows in slices_of(*shape_of(linear)):
        parts.append(mx.linalg.norm(dequantized(linear, rows).astype(mx.float32), axis=1))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def shape_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, quantized or not."""
    return linear.weight.shape[0], inputs_of(linear)


def make_trainable(model: BaseModel, method: str, lora: LoraSettings, seed: int) -> None:
    """Add LoRA or DoRA to the linear layers that ``lora`` names, or unfreeze blocks (full) or everything (pretrain).

    Only the top ``lora.num_layers`` blocks train, except in pretraining. Trained weights are float32 whatever the
    base is; adapters' initial values depend only on ``seed``. Raises ConfigError or ModelError if the settings do not
    suit the model, or leave nothing to train.
    """
    blocks = model.module.layers
    if lora.num_layers > len(blocks):
        raise ConfigError(f"lora.num_layers is {lora.num_layers}.", expected=f"at most {len(blocks)} blocks")
    mx.random.seed(seed)
    if method in WHOLE:
        for part in [model.module] if method == PRETRAIN else blocks[-lora.num_layers :]:
            part.unfreeze()
            part.update(tree_map(lambda w: w.astype(mx.float32), part.trainable_parameters()))
    else:
        names = _target_names(model, lora.targets)
        for number, block in enumerate(blocks[-lora.num_layers :], len(blocks) - lora.num_layers):
            _add_layers(model, block, names, method, lora)
            if model.blocks is not None:  # DoRA has read it
                model.blocks.drop(number)
    if not tree_flatten(model.module.trainable_parameters()):
        raise ModelError(f"This model has no layers to train for lora.targets: {', '.join(lora.targets)}.")
    mx.eval(model.module.trainable_parameters())


def adapter_weights(model: BaseModel) -> dict[str, mx.array]:
    """The trainable parameters by name."""
    return dict(tree_flatten(model.module.trainable_parameters()))


def set_adapter_weights(model: BaseModel, weights: dict[str, mx.array]) -> None:
    """Restore trainable parameters; raises ModelError unless names and shapes match the model exactly."""
    own, given = ({(name, value.shape) for name, value in each.items()} for each in (adapter_weights(model), weights))
    wrong = sorted({name for name, _ in own ^ given})
    if wrong:
        raise ModelError(f"{len(wrong)} adapter tensors do not fit the model, the first: {wrong[0]}.")
    model.module.update(tree_unflatten(list(weights.items())))


def adapted_names(model: BaseModel) -> list[str]:
    """Names inside a block (self_attn.q_proj) of the layers that carry adapters."""
    return sorted({name for block in model.module.layers for name, m in block.named_modules() if "lora_a" in m})


def _add_layers(model: BaseModel, block: Any, names: set[str], method: str, lora: LoraSettings) -> None:
    """Add an adapter to the layers ``names`` of ``block``; raises ConfigError for DoRA on experts."""
    parts: list[tuple[str, Any]] = []
    for name, layer in block.named_modules():
        if name not in names:
            continue
        if isinstance(layer, EXPERTS) and method == "dora":
            do = "set train.method=lora, or other lora.targets"
            raise ConfigError(f"DoRA cannot be put on experts ({name}).", do=do)
        kind = LoraExperts if isinstance(layer, EXPERTS) else DoraLinear if method == "dora" else LoraLinear
        parts.append((name, kind(layer, lora, model.randomness)))
    if parts:
        block.update_modules(tree_unflatten(parts))


def _target_names(model: BaseModel, targets: tuple[str, ...]) -> set[str]:
    """Names inside a block (self_attn.q_proj) of the layers that ``targets`` match, in full or at the end."""
    blocks, kinds = model.module.layers, (*LINEAR, *EXPERTS)
    names = {name for block in blocks for name, layer in block.named_modules() if isinstance(layer, kinds)}
    names -= {name for block in blocks for name in without_adapter(block)}
    if targets == (ALL_LINEAR,):
        return names
    unmatched = [t for t in targets if not any(is_target(name, t) for name in names)]
    if unmatched:
        raise ConfigError(
            f"lora.targets names layers that the model does not have: {', '.join(unmatched)}.",
            expected=f"any of {', '.join(sorted(names))}, or null for all",
        )
    return {name for name in names if any(is_target(name, target) for target in targets)}
