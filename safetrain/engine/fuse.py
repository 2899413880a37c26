"""Merges an adapter into its base: in the base's bits, in 8 bits or in float, whichever first keeps its improvement.

Everything is lazy until it is written: each layer is read from the base's files, merged and quantized a few rows at a
time, so memory never holds a float copy of the model.
"""

import gc
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import lora_number, read_prompt_format, require_base, write_prompt_format
from safetrain.core.records.fusing import REPORT, ExportReport
from safetrain.core.storage.files import full_disk_named, replace_directory, require_new, require_room, write_record
from safetrain.engine.backend import set_limits
from safetrain.engine.layers import dequantized, inputs_of, slices_of
from safetrain.engine.tuned import ExportComparison, ExportJob, require_memory
from safetrain.engine.upstream.loading import copy_beside, errors_told, load, write_config
from safetrain.engine.weight_files import adapter_arrays, save_shards

MORE_BITS = 8  # if the base's own bits lose too much
Fold = Callable[[mx.array, slice], mx.array]  # (float32 rows of a weight, their places) -> rows of the tuned weight
Storage = dict[str, Any]  # group_size, bits and mode of a quantized layer, as in mlx-lm's config.json
Plan = Mapping[str, Storage | None]  # by a layer's path; None: float. Other layers do not change
FLOAT = 0  # a number of bits that means no quantization


def fuse_adapter(job: ExportJob, say: Callable[[str], None], bits: int | None = None) -> ExportReport:
    """Write the first fused model that is accurate enough to ``job.out``, complete or not at all, with its report.

    ``bits``: FLOAT, or bits of the changed layers; None tries the base's own, then 8, then float. Raises ConfigError,
    ModelError if no model is accurate enough or adapter and base do not match, DiskFullError, and MachineError if
    memory is too small to measure a model.
    """
    parent, files = require_new(job.out), read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    set_limits(job.mlx_limit_bytes)
    own, tried = files.quantization_bits, list[tuple[float, str]]()  # share kept, why it fails
    order: list[int | None] = [FLOAT if bits is None else bits]
    if bits is None and own is not None:
        order = [None, MORE_BITS, FLOAT] if own < MORE_BITS else [None, FLOAT]
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        job.out.parent.mkdir(parents=True, exist_ok=True)
        comparison = ExportComparison(job, files, say)
        with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".fuse-") as scratch:
            folder = Path(scratch) / "fused"
            for each in order:
                name = "float" if each == FLOAT else f"{each or own} bits"
                size = write_fused(job, each, folder)
                do = "close other programs, or keep base and adapter separate"
                require_memory(size, f"the fused model ({name})", do)
                set_limits(job.mlx_limit_bytes + max(0, size - files.static_bytes))
                report, why = comparison.of(job.open(folder), name, name, size)
                gc.collect()
                if not why:
                    write_record(folder / REPORT, report)
                    replace_directory(folder, job.out)
                    return report
                tried.append((report.kept, f"in {name}, it {why}"))
                shutil.rmtree(folder)
    kept, why = max(tried)
    raise ModelError(
        f"{'No fused model keeps' if bits is None else 'This fused model does not keep'} the improvement: {why}.",
        where=str(job.adapter),
        expected=f"at least {100 * (1 - job.may_lose):g} % kept",
        got=f"{100 * kept:.1f} %",
        do="keep base and adapter separate, or raise --may-lose" if bits is None
        else "leave out --bits and --float, so that more bits are tried",
    )  # fmt: skip


def write_fused(job: ExportJob, bits: int | None, folder: Path) -> int:
    """Write a fused model into a new ``folder``; returns the size of its weights, in bytes."""
    module, config, folds = open_to_fold(job.base, job.adapter)
    plan = plan_of(module, folds, bits)
    arrays = folded(module, folds, plan)
    size = sum(value.nbytes for value in arrays.values())
    do = "free some space, or choose a folder on another disk"
    require_room(job.out.parent, size, "There is too little disk space for the fused model.", do)
    folder.mkdir()
    write_config(module, quantization_in(config, module, plan), folder)
    form = read_prompt_format(job.adapter)
    copy_beside(job.base, folder, form.stop_ids if form else ())
    if form is not None:
        write_prompt_format(folder, form)  # for safetrain chat and serve
    del module, folds  # frees what is written
    save_shards(folder, arrays)
    return size


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
