"""LoRA and DoRA layers with mlx-lm's parameter names, for bases of any number of bits, quantized or not.

mlx-lm's own multiply a 16-bit stream in float32 and know no DoRA on 3, 5 and 6 bits. Master weights are float32 here
too; they are rounded to the stream's type for the product.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from safetrain.core.errors import ConfigError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.records.settings import LoraSettings
from safetrain.engine.frozen import dequantized
from safetrain.engine.randomness import Dropout, Randomness
from safetrain.engine.upstream.layers import EXPERTS, LoraExperts

LINEAR = (nn.Linear, nn.QuantizedLinear)
SLICE_BYTES = 2**22  # of a float32 weight whose rows are measured


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
        low = self.dropout(x) @ self.lora_a.astype(x.dtype)
        return low @ (self.scale * self.lora_b).astype(x.dtype)


class RowLengths:
    """Lengths of the rows of every adapted weight, by place: what DoRA divides by.

    They depend only on adapters and base, so they are made once for each change of the adapters (``measure_rows``),
    not in each forward pass. Compiled programs take ``values`` as inputs.
    """

    def __init__(self) -> None:
        self.values: dict[str, mx.array] = {}


class DoraLinear(LoraLinear):
    """LoRA whose columns are brought to a trained length m, after arXiv 2402.09353, section 4.3.

    Call ``measure`` whenever lora_a or lora_b has changed.
    """

    def __init__(self, linear: Any, lora: LoraSettings, source: Randomness, lengths: RowLengths) -> None:
        super().__init__(linear, lora, source)
        self.m = by_rows(linear, lambda weight, _rows: mx.linalg.norm(weight, axis=1))
        self._lengths, self._place = lengths, str(len(lengths.values))
        self._squares = self.m * self.m  # of the frozen weight's rows
        mx.eval(self._squares)
        lengths.values[self._place] = self.m  # B is zero

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.linear.get("bias")
        plain = self.linear(x) if bias is None else self.linear(x) - bias
        y = (self.m / self._lengths.values[self._place]).astype(x.dtype) * (plain + self.delta(x))
        return y if bias is None else y + bias

    def measure(self) -> mx.array:
        """Lengths of the rows of W + scale (A B)^T, without making that matrix: |w + d|^2 = |w|^2 + 2 w.d + |d|^2.

        Returns them, (outputs,), which from now on are divided by.
        """
        a, b = self.lora_a, self.lora_b * self.scale
        crossed = by_rows(self.linear, lambda weight, rows: ((weight @ a) * b[:, rows].T).sum(axis=1))
        added = ((b.T @ (a.T @ a)) * b.T).sum(axis=1)
        lengths = mx.sqrt(mx.maximum(self._squares + 2 * crossed + added, 1e-12))
        self._lengths.values[self._place] = lengths
        return lengths


def by_rows(linear: Any, function: Callable[[mx.array, slice], mx.array]) -> mx.array:
    """``function`` of a few rows of the float32 weight at a time, and which these are; the results behind each other.

    Each waits for the one before, so that no float32 copy of a whole weight is ever there.
    """
    outputs, inputs = shape_of(linear)
    step, parts = max(1, SLICE_BYTES // (FLOAT32 * inputs)), list[mx.array]()
    for start in range(0, outputs, step):
        rows = slice(start, min(start + step, outputs))
        weight = dequantized(linear, rows)
        if parts:
            weight = mx.depends([weight], [parts[-1]])[0]
        parts.append(function(weight.astype(mx.float32), rows))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def measure_rows(module: Any, evaluate: Callable[[mx.array], None] = mx.eval) -> None:
    """Let every DoRA layer of ``module`` measure its rows, one after the other."""
    for _, layer in module.named_modules():
        if isinstance(layer, DoraLinear):
            evaluate(layer.measure())


def shape_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, quantized or not."""
    outputs, inputs = linear.weight.shape
    return outputs, inputs * 32 // linear.bits if "scales" in linear else inputs


def add_layers(
    block: Any, names: set[str], method: str, lora: LoraSettings, source: Randomness, lengths: RowLengths
) -> None:
    """Put an adapter on the layers of ``block`` that ``names`` has; raises ConfigError for DoRA on experts."""
    parts: list[tuple[str, Any]] = []
    for name, layer in block.named_modules():
        if name not in names:
            continue
        if isinstance(layer, EXPERTS):
            if method == "dora":
                raise ConfigError(
                    f"DoRA cannot be put on experts ({name}).", do="train.method=lora, or name other lora.targets"
                )
            parts.append((name, LoraExperts.on(layer, lora, source)))
        else:
            dora = method == "dora"
            parts.append((name, DoraLinear(layer, lora, source, lengths) if dora else LoraLinear(layer, lora, source)))
    if parts:
        block.update_modules(tree_unflatten(parts))
