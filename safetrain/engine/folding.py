"""Merges an adapter's change of each weight into the base's weights, stored in any bits.

Everything is lazy until it is written: each layer is read from the base's files, merged and quantized a few rows at a
time, so memory never holds a float copy of the model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.core.memory.terms import FLOAT32
from safetrain.core.records.adapter_files import lora_number
from safetrain.engine.adapters import SLICE_BYTES
from safetrain.engine.layers import dequantized
from safetrain.engine.upstream.loading import errors_told, load
from safetrain.engine.weight_files import adapter_arrays

Fold = Callable[[mx.array, slice], mx.array]  # (float32 rows of a weight, their places) -> rows of the tuned weight
Storage = dict[str, Any]  # group_size, bits and mode of a quantized layer, as in mlx-lm's config.json
Plan = Mapping[str, Storage | None]  # by a layer's path; None: float. Other layers do not change
FLOAT = 0  # a number of bits that means no quantization


@dataclass(frozen=True)
class Folds:
    """An adapter's changes: functions of layer weights, by path, and replaced values, by name."""

    layers: dict[str, Fold]
    values: dict[str, mx.array]


def open_to_fold(base: Path, adapter: Path) -> tuple[Any, dict[str, Any], Folds]:
    """Open a base, its configuration and the adapter's changes, without reading weights. Raises ModelError."""
    with errors_told("open the model", str(base)):
        module, config = load(base)
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


def inputs_of(layer: Any) -> int:
    """Input width of a layer, quantized or not."""
    width = layer.weight.shape[-1]
    return width * 32 // layer.bits if "scales" in layer else width


def _storages(module: Any) -> dict[str, Storage | None]:
    """How each layer is stored, by path; None for float."""
    return {
        path: {"group_size": layer.group_size, "bits": layer.bits, "mode": getattr(layer, "mode", "affine")}
        if "scales" in layer else None
        for path, layer in module.named_modules() if "weight" in layer
    }  # fmt: skip


def plan_of(module: Any, folds: Folds, bits: int | None) -> Plan:
    """Plan ``bits`` for layers that the adapter changes; None stores each as in the base, FLOAT quantizes none.

    Layers keep their group size, except that groups of 16 (nvfp4) become groups of 32. Raises ModelError if the base
    is not quantized.
    """
    own = _storages(module)
    if bits == FLOAT:
        return dict.fromkeys([*folds.layers, *(path for path, stored in own.items() if stored)])
    plan = {path: own[path] for path in folds.layers}
    if bits is not None and not any(own.values()):
        do = "fuse with --float, then quantize the result: safetrain convert"
        raise ModelError("The base is not quantized, so the fused model is not either.", do=do)
    for path, stored in plan.items() if bits is not None else ():
        if stored is not None and stored["bits"] != bits:
            plan[path] = {"group_size": max(32, stored["group_size"]), "bits": bits, "mode": "affine"}
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


def _in_slices(layer: Any, fold: Fold, stored: Storage | None, float_type: Any) -> Iterator[tuple[mx.array, ...]]:
    """Yield a few rows, or experts, at a time; each slice waits for the one before."""
    before = None
    for rows in slices_of(layer.weight.shape[0], math.prod(layer.weight.shape[1:-1]) * inputs_of(layer)):
        weight = dequantized(layer, rows)
        if before is not None:
            weight = mx.depends([weight], [before])[0]
        weight = fold(weight.astype(mx.float32), rows)
        arrays: list[mx.array] = [weight.astype(float_type)]
        if stored is not None:
            arrays = list(mx.quantize(weight, **stored))
            arrays[1:] = [scale.astype(float_type) if stored["mode"] == "affine" else scale for scale in arrays[1:]]
        before = arrays[0]
        yield tuple(arrays)


def quantization_in(config: Mapping[str, Any], module: Any, plan: Plan) -> dict[str, Any]:
    """config.json, updated with the quantization of each layer that is stored differently."""
    stored = [each for each in (_storages(module) | dict(plan)).values() if each]
    before: dict[str, Any] = config.get("quantization") or {}
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if not stored:
        return plain if before else dict(config)
    usual = {key: value for key, value in before.items() if key not in plan} or stored[0]
    shape = {"mode": "affine", **{key: usual[key] for key in ("group_size", "bits", "mode") if key in usual}}
    return {**plain, "quantization": usual | {path: each for path, each in plan.items() if each and each != shape}}
