"""Weights on disk: named arrays in safetensors files, and adapters in mlx-lm's format.

An adapter is a folder with weights and their configuration. A full disk raises OSError, not mlx's RuntimeError.
"""

import copy
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from safetrain.core.errors import ModelError, SafetrainError
from safetrain.core.formatting import run_again
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import (
    BASE_FINGERPRINT,
    CHAT_FILE,
    TRAINED_BY,
    PromptFormat,
    adapter_method,
    adapter_shape,
)
from safetrain.core.records.schema import WHOLE
from safetrain.core.records.settings import ALL_LINEAR, LoraSettings
from safetrain.core.storage.files import write_folder, write_record
from safetrain.engine.adapters import adapted_names, adapter_weights, make_trainable, set_adapter_weights
from safetrain.engine.model import BaseModel, dequantize_to_answer, open_base
from safetrain.engine.upstream.loading import without_adapter

ADAPTER_FILE, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"
PROBE_BYTES = 2**20  # written after a failure, to learn why
SHARD_BYTES = 2**29  # size of one weight file, held in memory while it is written


def bytes_of(arrays: Mapping[str, mx.array]) -> int:
    """Bytes of all arrays together."""
    return sum(array.nbytes for array in arrays.values())


def save_arrays(path: Path, arrays: dict[str, mx.array], kind: str = "mlx") -> None:
    """Write arrays by name. ``kind``: the library to name in the file's metadata.

    Raises OSError when a write fails: mlx raises RuntimeError, which would look like a bug of the program.
    """
    try:
        mx.save_safetensors(str(path), arrays, metadata={"format": kind})
    except RuntimeError as error:
        if "Unable to write" not in str(error):
            raise
        path.unlink(missing_ok=True)
        path.write_bytes(b"\0" * PROBE_BYTES)  # raises the reason, such as a quota
        is_full = shutil.disk_usage(path.parent).free < bytes_of(arrays)
        number = errno.ENOSPC if is_full else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def save_shards(folder: Path, arrays: dict[str, mx.array]) -> None:
    """Write a model's weights and index with mlx-lm's file names; remove each array from ``arrays`` once written.

    Lazy arrays are computed one by one, and only for the next file. Raises OSError.
    """
    shards, size = list[list[str]](), SHARD_BYTES
    total, places = bytes_of(arrays), dict[str, str]()
    for name, value in arrays.items():
        if size + value.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.nbytes
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        shard = {name: arrays.pop(name) for name in names}
        for value in shard.values():
            mx.eval(value)
        save_arrays(folder / file, shard)
        places |= dict.fromkeys(names, file)
        del shard, value
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4), encoding="utf-8")


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Read a file of ``save_arrays`` into memory; raises OSError, ValueError or RuntimeError when it is damaged."""
    loaded = mx.load(str(path))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} holds no named arrays")
    mx.eval(list(loaded.values()))
    return loaded


def apply_adapter(model: BaseModel, folder: Path) -> None:
    """Add the adapter in ``folder`` to the model; raises ModelError when it is missing or does not fit."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"The adapter is missing: no {', '.join(missing)}.", where=folder, do=f"train: {run_again()}")
    weights = adapter_arrays(folder)
    try:
        make_trainable(model, adapter_method(folder), adapter_shape(folder, len(model.module.layers)), seed=0)
        set_adapter_weights(model, weights)
    except (ValueError, KeyError, AttributeError, RuntimeError, TypeError, SafetrainError) as error:
        raise ModelError(f"The adapter does not fit this model: {error}", where=folder) from error
    model.module.freeze()
    model.module.eval()
    mx.eval(model.module.trainable_parameters())


def open_tuned(base: Path, adapter: Path | None, *, stream: bool = False) -> BaseModel:
    """Open the base, with or without an adapter, ready to answer; raises ModelError.

    With ``stream`` its weights stay on disk.
    """
    model = open_base(base, dequantize=not stream and dequantize_to_answer(read_model_files(base)), stream=stream)
    if adapter is not None:
        apply_adapter(model, adapter)
    return model


def open_both(base: Path, adapter: Path, *, stream: bool = False) -> tuple[BaseModel, BaseModel]:
    """Open the base and the tuned model; memory holds their shared weights once. Raises ModelError."""
    if stream:
        return open_tuned(base, None, stream=True), open_tuned(base, adapter, stream=True)
    model = open_tuned(base, None)
    shared: dict[int, Any] = {id(value): value for _, value in tree_flatten(model.module.parameters())}
    tuned = copy.deepcopy(model, shared)
    apply_adapter(tuned, adapter)
    return model, tuned


def adapter_arrays(folder: Path, file: str = ADAPTER_FILE) -> dict[str, mx.array]:
    """Read an adapter's arrays by name; raises ModelError when the file is damaged."""
    path = folder / file
    try:
        return load_arrays(path)
    except (ValueError, RuntimeError) as error:
        what = f"The adapter's weights cannot be read: {error}"
        do = "the file is damaged or incomplete: copy it again from an intact source, or train again"
        raise ModelError(what, where=path, do=do) from error


def save_adapter(
    model: BaseModel,
    method: str,
    lora: LoraSettings,
    base: Path,
    folder: Path,
    form: PromptFormat | None = None,
    weights: Path | None = None,
    base_fingerprint: str = "",
) -> None:
    """Write the adapter in mlx-lm's format with its prompt format next to it. The folder is complete or absent.

    ``weights``: a file to copy instead of the model's weights. ``base_fingerprint``: checksum of the base's files.
    Raises OSError when a write fails.
    """
    shape: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout}
    if lora.targets != (ALL_LINEAR,) or any(without_adapter(block) for block in model.module.layers):
        shape["keys"] = adapted_names(model)  # without keys mlx-lm takes every linear layer
    kind = "full" if method in WHOLE else method  # mlx-lm's word for weights that replace the base's
    config = {"fine_tune_type": kind, TRAINED_BY: method, "model": str(base), "num_layers": lora.num_layers,
              "lora_parameters": shape, BASE_FINGERPRINT: base_fingerprint or None}  # fmt: skip

    def write(temporary: Path) -> None:
        if weights is None:
            save_arrays(temporary / ADAPTER_FILE, adapter_weights(model))
        else:
            shutil.copyfile(weights, temporary / ADAPTER_FILE)
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if form is not None:
            write_record(temporary / CHAT_FILE, form)

    write_folder(folder, write)
