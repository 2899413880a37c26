"""Merges an adapter's change of each weight into the base's weights, stored in any bits.

Everything is lazy until it is written: each layer is read from the base's files, merged and quantized a few rows at a
time, so memory never holds a float copy of the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.records.adapter_files import lora_number
from safetrain.engine.adapters import SLICE_BYTES
from safetrain.engine.layers import dequantized
from safetrain.engine.upstream.loading import errors_told, load, takes_bits
from safetrain.engine.weight_files import adapter_arrays

Fold = Callable[[mx.array, slice], mx.array]  # (float32 rows of a weight, their places) -> rows of the tuned weight
AFFINE, GROUP_SIZE, FLOAT = "affine", 64, 0  # FLOAT: a number of bits that means no quantization


@dataclass(frozen=True)
class LayerStorage:
    """How a layer's weight is stored, as mlx-lm's config.json says it."""

    group_size: int
    bits: int
    mode: str = AFFINE


Plan = Mapping[str, LayerStorage | None]  # by a layer's path; None: float. Other layers do not change


@dataclass(frozen=True)
class Folds:
    """An adapter's changes: functions of layer weights, by path, and replaced values, by name."""

    layers: dict[str, Fold]
    values: dict[str, mx.array]


def open_to_fold(base: Path, adapter: Path | None) -> tuple[Any, dict[str, Any], Folds]:
    """Open a base, its configuration and the adapter's changes, without reading weights. Raises ModelError."""
    with errors_told("open the model", str(base)):
        module, config = load(base)
    if adapter is None:
        return module, config, Folds({}, {})
    return module, config, folds_of(module, adapter_arrays(adapter), lora_number(adapter, "scale"))


def folds_of(module: Any, weights: Mapping[str, mx.array], scale: float) -> Folds:
    """The changes that the adapter's arrays make to ``module``."""
    layers = dict(module.named_modules())
    folds: dict[str, Fold] = {}
    values: dict[str, mx.array] = {}
    for name, value in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "lora_a":
            folds[path] = _adding(value, weights[f"{path}.lora_b"], scale, weights.get(f"{path}.m"))
        elif kind == "weight" and hasattr(layers[path], "to_quantized"):
            folds[path] = _replacing(value)
        elif kind not in ("lora_b", "m"):
            values[name] = value
    return Folds(folds, values)


def _adding(a: mx.array, b: mx.array, scale: float, lengths: mx.array | None) -> Fold:
    """LoRA or DoRA: (inputs, rank) and (rank, outputs), or (experts, rank, inputs) and (experts, outputs, rank)."""

    def fold(weight: mx.array, rows: slice) -> mx.array:
        if a.ndim == 3:
            return weight + (scale * b[rows]) @ a[rows]
        sum_of_both = weight + (scale * b[:, rows]).T @ a.T
        if lengths is None:
            return sum_of_both
        return sum_of_both * (lengths[rows] / mx.linalg.norm(sum_of_both, axis=1))[:, None]

    return fold


def _replacing(value: mx.array) -> Fold:
    return lambda _weight, rows: value[rows].astype(mx.float32)


def as_it_is(weight: mx.array, _rows: slice) -> mx.array:
    """The fold of a layer without an adapter: no change."""
    return weight


def stored_as(layer: Any) -> LayerStorage | None:
    """How a layer is stored; None for float."""
    return LayerStorage(layer.group_size, layer.bits, getattr(layer, "mode", AFFINE)) if "scales" in layer else None


def inputs_of(layer: Any) -> int:
    """Input width of a layer, quantized or not."""
    width = layer.weight.shape[-1]
    return width * 32 // layer.bits if "scales" in layer else width


def plan_of(module: Any, folds: Folds, bits: int | None) -> Plan:
    """Plan ``bits`` for quantized layers that the adapter changes; if none is quantized, for all that mlx-lm quantizes.

    None stores each layer as in the base, FLOAT quantizes none. Layers keep their group size, except that groups of 16
    (nvfp4) become groups of 32.
    """
    own = {path: stored_as(layer) for path, layer in module.named_modules() if "weight" in layer}
    quantized = [path for path, stored in own.items() if stored]
    if bits == FLOAT:
        return dict.fromkeys([*folds.layers, *quantized])
    plan = {path: own[path] for path in folds.layers}
    if bits is None:
        return plan
    for path in quantized or takes_bits(module, GROUP_SIZE):
        before = own[path]
        if before is None or (path in folds.layers and before.bits != bits):
            plan[path] = LayerStorage(max(32, before.group_size) if before else GROUP_SIZE, bits)
    return plan


def folded(module: Any, folds: Folds, plan: Plan) -> dict[str, mx.array]:
    """Every array of the model with the adapter merged in and layers stored as in ``plan``; none is computed yet."""
    arrays: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    if unfit := [name for name in arrays if name.endswith("global_scale")]:
        raise ModelError(
            f"Weights with a global scale (nvfp4) cannot be merged: {unfit[0]}.", do="keep base and adapter separate"
        )
    sizes = Counter[Any]()  # numbers, by type
    for value in arrays.values():
        sizes[value.dtype] += value.size if mx.issubdtype(value.dtype, mx.floating) else 0
    layers, float_type = dict(module.named_modules()), sizes.most_common(1)[0][0]
    for name, value in folds.values.items():
        arrays[name] = value.astype(arrays[name].dtype)
    for path, stored in plan.items():
        for kind in ("weight", "scales", "biases"):
            arrays.pop(f"{path}.{kind}", None)
        slices = list(_in_slices(layers[path], folds.layers.get(path, as_it_is), stored, float_type))
        for kind, parts in zip(("weight", "scales", "biases"), zip(*slices, strict=True), strict=False):
            arrays[f"{path}.{kind}"] = mx.concatenate(list(parts)) if len(parts) > 1 else parts[0]
    return arrays


def slices_of(count: int, numbers_each: int) -> list[slice]:
    """Divide ``count`` rows into slices that are small in float32."""
    step = max(1, SLICE_BYTES // (FLOAT32 * numbers_each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _in_slices(layer: Any, fold: Fold, stored: LayerStorage | None, float_type: Any) -> Iterator[tuple[mx.array, ...]]:
    """Yield a few rows, or experts, at a time; each slice waits for the one before."""
    before = None
    for rows in slices_of(layer.weight.shape[0], math.prod(layer.weight.shape[1:-1]) * inputs_of(layer)):
        weight = dequantized(layer, rows)
        if before is not None:
            weight = mx.depends([weight], [before])[0]
        weight = fold(weight.astype(mx.float32), rows)
        arrays: list[mx.array] = [weight.astype(float_type)]
        if stored is not None:
            arrays = list(mx.quantize(weight, stored.group_size, stored.bits, mode=stored.mode))
            arrays[1:] = [scale.astype(float_type) if stored.mode == AFFINE else scale for scale in arrays[1:]]
        before = arrays[0]
        yield tuple(arrays)


def quantization_in(config: Mapping[str, Any], module: Any, plan: Plan) -> dict[str, Any]:
    """config.json, updated with the quantization of each layer that is stored differently."""
    stored = {path: stored_as(layer) for path, layer in module.named_modules() if "weight" in layer} | dict(plan)
    kinds, before = Counter(each for each in stored.values() if each), config.get("quantization")
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if not kinds:
        return plain if before else dict(config)
    before = before or asdict(kinds.most_common(1)[0][0])
    usual = LayerStorage(before["group_size"], before["bits"], before.get("mode", AFFINE))
    entries = {key: value for key, value in before.items() if key not in plan}
    entries |= {path: asdict(each) for path, each in plan.items() if each and each != usual}
    return {**plain, "quantization": entries}
