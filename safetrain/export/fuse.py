"""Merges an adapter into its base, in the base's bits, 8 bits or float: the first that keeps the improvement.

Everything is lazy until it is written: each layer is read from the base's files, merged and quantized by itself, so
memory never holds a float copy of the model.
"""

import gc
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError
from safetrain.core.formatting import size_text
from safetrain.core.memory.system import host_room_bytes, read_memory
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import CHAT_FILE, lora_number, read_prompt_format
from safetrain.core.records.evaluation import REPORT, ExportReport
from safetrain.core.storage.files import full_disk_named, require_new, require_room, write_folder, write_record
from safetrain.engine.backend import set_limits
from safetrain.engine.layers import ALL, dequantized
from safetrain.engine.upstream.loading import copy_beside, errors_told, load, write_config
from safetrain.engine.weight_files import adapter_arrays, bytes_of, save_shards
from safetrain.export.comparison import ExportComparison, ExportJob, require_memory
from safetrain.export.refit import refit_bytes, refitted

MORE_BITS = 8  # if the base's own bits lose too much
Plan = dict[str, dict[str, Any] | None]  # group_size, bits and mode of each layer, by its path; None: float
FLOAT = 0  # a number of bits that means no quantization


def fuse_adapter(job: ExportJob, say: Callable[[str], None], bits: int | None = None) -> ExportReport:
    """Write the first fused model that is accurate enough, with its report; ``job.out`` is complete or absent.

    ``bits``: FLOAT, or bits of the changed layers; None tries the base's own, then 8, then float. Raises ConfigError,
    ModelError if no model is accurate enough or adapter and base do not match, DiskFullError, and MachineError if
    memory is too small to measure a model.
    """
    parent, files = require_new(job.out), read_model_files(job.base)
    own, order = files.quantization_bits, list[int | None]([bits or FLOAT])
    if bits is None and own is not None:
        order = [None, MORE_BITS, FLOAT] if own < MORE_BITS else [None, FLOAT]
    reports = list[ExportReport]()

    def write(folder: Path) -> None:
        comparison = ExportComparison(job, files, say)
        for each in order:
            shutil.rmtree(folder)
            name = "float" if each == FLOAT else f"{each or own} bits"
            size = write_fused(job, each, folder, say)
            do = "close other programs, or keep base and adapter separate"
            require_memory(size, f"the fused model ({name})", do)
            set_limits(job.mlx_limit_bytes + max(0, size - files.static_bytes))
            report, refused = comparison.of(job.open(folder), name, name, size)
            gc.collect()
            if refused is None:
                write_record(folder / REPORT, report)
                reports.append(report)
                return
            if each == order[-1]:
                raise refused

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


def write_fused(job: ExportJob, bits: int | None, folder: Path, say: Callable[[str], None]) -> int:
    """Write a fused model into a new ``folder``; returns the size of its weights, in bytes."""
    module, config, changes = open_to_merge(job.base, job.adapter)
    plan = plan_of(module, changes, bits)
    arrays = merged(module, changes, plan)
    size = bytes_of(arrays)
    do = "free some space, or choose a folder on another disk"
    require_room(job.out.parent, size, "There is too little disk space for the fused model.", do)
    try:
        arrays |= _refitted(job, module, changes, plan)
    except ModelError as error:  # the rounded model is measured like any other
        say(f"Weights are rounded, not refitted: {error.what.rpartition(': ')[2].removesuffix('.')}")
    folder.mkdir()
    write_config(module, quantization_in(config, plan), folder)
    form = read_prompt_format(job.adapter)
    copy_beside(job.base, folder, form.stop_ids if form else ())
    if form is not None:
        write_record(folder / CHAT_FILE, form)  # for safetrain chat
    del module, changes  # frees what is written
    save_shards(folder, arrays)
    return size


def _refitted(job: ExportJob, module: Any, changes: "Changes", plan: Plan) -> dict[str, mx.array]:
    """Arrays of the changed layers that are quantized, refitted; none without rows to fit them on.

    Raises ModelError if memory is too small, or the model's blocks cannot be computed one by one.
    """
    layers, arrays = dict(module.named_modules()), dict[str, mx.array]()
    few = {
        path: (stored, dequantized(layers[path], slice(0, 1)).dtype)
        for path, stored in plan.items()
        if stored and path in changes.paths and layers[path].weight.ndim == 2
    }
    if few and job.fit is not None:
        if (needed := refit_bytes(module, few)) > host_room_bytes(read_memory()):
            raise ModelError(f"that needs {size_text(needed)} of memory")
        for path, parts in refitted(job.base, job.adapter, changes.merged, few, job.fit, job.most_tokens):
            arrays |= {
                f"{path}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts, strict=False)
            }
    return arrays


class Changes:
    """An adapter's changes to its base: ``paths`` of the layers with new weights, new ``values`` of other arrays.

    ``arrays``: the adapter's own.
    """

    def __init__(self, module: Any, arrays: Mapping[str, mx.array], scale: float) -> None:
        layers, self.arrays, self._scale = dict(module.named_modules()), arrays, scale
        self.paths, self.values = set[str](), dict[str, mx.array]()
        for name, value in arrays.items():
            path, _, kind = name.rpartition(".")
            if kind == "lora_a" or (kind == "weight" and hasattr(layers.get(path), "to_quantized")):
                self.paths.add(path)
            elif kind not in ("lora_b", "m"):
                self.values[name] = value

    def merged(self, path: str, weight: mx.array, rows: slice = ALL) -> mx.array:
        """Rows of a layer's tuned weight in float32; ``weight``: the same rows in the base."""
        whole, a = self.arrays.get(f"{path}.weight"), self.arrays.get(f"{path}.lora_a")
        weight = (weight if whole is None else whole[rows]).astype(mx.float32)
        if a is None:
            return weight
        b, lengths = self.arrays[f"{path}.lora_b"], self.arrays.get(f"{path}.m")
        if a.ndim == 3:  # (experts, rank, inputs) and (experts, outputs, rank)
            return weight + (self._scale * b) @ a
        weight = weight + (self._scale * b[:, rows]).T @ a.T
        return weight if lengths is None else weight * (lengths[rows] / mx.linalg.norm(weight, axis=1))[:, None]


def open_to_merge(base: Path, adapter: Path) -> tuple[Any, dict[str, Any], Changes]:
    """Open a base, its configuration and the adapter's changes, without reading the base's weights.

    Raises ModelError.
    """
    with errors_told("open the model", base):
        module, config = load(base)
    return module, config, Changes(module, adapter_arrays(adapter), lora_number(adapter, "scale"))


def plan_of(module: Any, changes: Changes, bits: int | None) -> Plan:
    """Plan ``bits`` for layers that the adapter changes; None keeps the base's bits, FLOAT quantizes nothing.

    Layers keep their group size, except that groups of 16 (nvfp4) become groups of 32. Raises ModelError if the base
    is not quantized.
    """
    plan: Plan = {}
    for path, layer in module.named_modules():
        if "weight" in layer:
            plan[path] = None
        if "scales" in layer and bits != FLOAT:
            stored = {"group_size": layer.group_size, "bits": layer.bits, "mode": getattr(layer, "mode", "affine")}
            if bits not in (None, layer.bits) and path in changes.paths:
                stored = {"group_size": max(32, layer.group_size), "bits": bits, "mode": "affine"}
            plan[path] = stored
    if bits and not any(plan.values()):
        do = "fuse with --float, then quantize the result: safetrain convert"
        raise ModelError("The base is not quantized, so the fused model is not either.", do=do)
    return plan


def merged(module: Any, changes: Changes, plan: Plan) -> dict[str, mx.array]:
    """Every array of the model with the adapter merged in and layers stored as in ``plan``; nothing is computed yet."""
    arrays: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    layers = dict(module.named_modules())
    for name, value in changes.values.items():
        arrays[name] = value.astype(arrays[name].dtype)
    for path, stored in plan.items():
        if path not in changes.paths and (stored is None) == ("scales" not in layers[path]):
            continue
        base = dequantized(layers[path])
        parts: list[mx.array] = [changes.merged(path, base).astype(base.dtype)]
        if stored is not None:
            weight, *others = mx.quantize(changes.merged(path, base), **stored)
            parts = [weight, *(each.astype(base.dtype) if stored["mode"] == "affine" else each for each in others)]
        for kind in ("weight", "scales", "biases"):
            arrays.pop(f"{path}.{kind}", None)
        arrays |= {f"{path}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts, strict=False)}
    return arrays


def quantization_in(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json with the quantization of the layers as in ``plan``."""
    stored = {path: each for path, each in plan.items() if each}
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if not stored:
        return plain
    before = config.get("quantization") or next(iter(stored.values()))
    usual = {"mode": "affine"} | {key: before[key] for key in ("group_size", "bits", "mode") if key in before}
    return {**plain, "quantization": usual | {path: each for path, each in stored.items() if each != usual}}
