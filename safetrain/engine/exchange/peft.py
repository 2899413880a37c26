"""Exports adapters to PEFT and imports them, bit for bit; a setting that is not supported is refused by name.

A layer has lora_a (inputs, rank) and lora_b (rank, outputs) here, lora_A (rank, inputs) and lora_B (outputs, rank) in
PEFT. DoRA's magnitudes, (outputs,), are called m here and lora_magnitude_vector in PEFT.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import lora_number
from safetrain.core.records.evaluation import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import full_disk_named, json_object, require_new, write_folder, write_record
from safetrain.engine.adapters import LINEAR, make_trainable, set_adapter_weights
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.tuned import ExportComparison, ExportJob
from safetrain.engine.upstream.loading import without_adapter
from safetrain.engine.weight_files import adapter_arrays, save_adapter, save_arrays

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAME_NAMES = (  # families with the same layer names in transformers and mlx-lm: benchmarks/bench_export_peft.py
    "cohere", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "helium", "hunyuan_v1_dense",
    "llama", "ministral3", "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
SUPPORTED: dict[str, tuple[object, ...]] = {  # values by key
    "peft_type": ("LORA",), "task_type": (None, "CAUSAL_LM"), "bias": ("none",), "fan_in_fan_out": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),  # the base is unchanged
}  # fmt: skip
KNOWN = frozenset({  # read here, or without effect on a finished adapter
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "use_dora", "use_rslora",
})  # fmt: skip
NUMBERS = {"r": (int,), "lora_alpha": (int, float)}
SET_NOWHERE: tuple[object, ...] = (None, False, "", [], {})
KEY = re.compile(r"^base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$")
THEIRS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
OURS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m"}
MERGE = "merge it into its base with PEFT (merge_and_unload), and use the result"


def export_peft(job: ExportJob, base_name: str, say: Callable[[str], None]) -> ExportReport:
    """Write the adapter for PEFT to ``job.out``, complete or not at all, with its report.

    ``base_name``: the float model for PEFT to load the adapter on. Raises ConfigError if the target exists,
    DiskFullError, and ModelError if the adapter does not suit PEFT or the base, or gives other results when reloaded.
    """
    parent, files = require_new(job.out), read_model_files(job.base)
    require_same_names(job.base)
    arrays = adapter_arrays(job.adapter)
    unfit = [name for name in arrays if name.rpartition(".")[2] not in THEIRS]
    if unfit:
        what = f"This adapter trains {unfit[0]}, which a PEFT adapter cannot contain."
        do = "merge the adapter into its base instead: safetrain fuse OUT"
        raise ModelError(what, where=str(job.adapter), do=do)
    comparison, reports = ExportComparison(job, files, say), list[ExportReport]()

    def write(folder: Path) -> None:
        model = job.open(job.base)
        write_peft(job.adapter, arrays, base_name, folder)
        put_on(model, folder)
        size = sum(value.nbytes for value in arrays.values())
        report, refused = comparison.of(model, "exported adapter, reloaded", "peft", size)
        if refused is not None:
            raise refused
        reports.append(report)
        write_record(folder / EXPORT_REPORT, report)

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


def import_peft(source: Path, base: Path, out: Path) -> tuple[Mapping[str, Any], LoraSettings]:
    """Convert the PEFT adapter in ``source`` for mlx-lm and this project into ``out``, complete or not at all.

    Returns PEFT's configuration and the LoRA settings. Raises ConfigError if the target exists, ModelError if the
    adapter is not supported, does not fit the base or changes nothing, and DiskFullError.
    """
    parent = require_new(out)
    read_peft_config(source)  # before the model is opened
    files = read_model_files(base)
    require_same_names(base)
    model = open_base(base, dequantize=False)
    config, lora = put_on(model, source)
    method = "dora" if config.get("use_dora") else "lora"
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        save_adapter(model, method, lora, base, out, base_fingerprint=files.fingerprint)
    return config, lora


def require_same_names(base: Path) -> None:
    """Raise ModelError if the family's layers may have other names in transformers, as in models that see images."""
    family = json_object(base / "config.json").get("model_type")  # not that of a text part
    if family not in SAME_NAMES:
        raise ModelError(
            f"Layers of {family} may have other names or another order in transformers than in mlx-lm.",
            where=str(base),
            expected=f"one of {', '.join(SAME_NAMES)}",
            do="to export any family, merge adapter and base: safetrain fuse OUT",
        )


def places_of(model: BaseModel) -> dict[str, tuple[int, str]]:
    """Linear layers that can carry an adapter, by path: the number of the layer's block, and its name in the block."""
    paths = {id(layer): path for path, layer in model.module.named_modules()}
    return {
        paths[id(layer)]: (number, name)
        for number, block in enumerate(model.module.layers)
        for name, layer in block.named_modules()
        if isinstance(layer, LINEAR) and name not in without_adapter(block)
    }


def write_peft(adapter: Path, arrays: Mapping[str, mx.array], base_name: str, folder: Path) -> None:
    """Write an adapter for PEFT: settings of the folder ``adapter``, weights ``arrays``. Raises ModelError, OSError."""
    rank = max(value.shape[1] for name, value in arrays.items() if name.endswith(".lora_a"))
    alpha = lora_number(adapter, "scale") * rank  # PEFT divides by the rank; equal up to a last bit
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": rank, "bias": "none",
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": lora_number(adapter, "dropout"),
        "target_modules": sorted({name.rpartition(".")[0] for name in arrays}), "inference_mode": True,
        "use_dora": any(name.endswith(".m") for name in arrays),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    renamed = dict[str, mx.array]()
    for name, value in arrays.items():
        path, _, kind = name.rpartition(".")
        renamed[f"base_model.model.{path}.{THEIRS[kind]}"] = value if kind == "m" else mx.contiguous(value.T)
    save_arrays(folder / WEIGHTS, renamed, "pt")


def put_on(model: BaseModel, source: Path) -> tuple[Mapping[str, Any], LoraSettings]:
    """Put the adapter in ``source`` on an opened base, ready to compute; returns its configuration and settings.

    The targets of the settings are full names inside a block. Raises ModelError that names what does not fit.
    """
    config, places, where = read_peft_config(source), places_of(model), str(source / WEIGHTS)
    weights, found = dict[str, mx.array](), set[tuple[int, str]]()
    for key, value in adapter_arrays(source, WEIGHTS).items():
        match = KEY.match(key)
        if match is None or match[1] not in places:
            what = f"This adapter does not fit: no linear layer in the base's blocks belongs to {key}."
            do = f"use --model to name the base it was trained on; if it changes more than linear layers, {MERGE}"
            raise ModelError(what, where=where, do=do)
        kind, array = OURS[match[2]], value.astype(mx.float32)
        weights[f"{match[1]}.{kind}"] = array if kind == "m" else mx.contiguous(array.T)
        found.add(places[match[1]])
    squares = sum(float(mx.square(value).sum()) for name, value in weights.items() if name.endswith("lora_b"))
    if not 0 < squares < math.inf:
        what = "The adapter changes nothing (it is empty, or all its lora_B are zero), or contains infinity or NaN."
        raise ModelError(what, where=where, do="save the adapter in PEFT after training, and import it again")
    rank, blocks = config["r"], len(model.module.layers) - min(found)[0]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)  # arXiv 2312.03732
    lora = LoraSettings(rank, scale, 0.0, blocks, tuple(sorted({name for _, name in found})))
    method = "dora" if config.get("use_dora") else "lora"
    make_trainable(model, method, lora, seed=0)
    try:
        set_adapter_weights(model, weights)
    except ModelError as error:
        what = f"The adapter does not fit this base, is incomplete, or skips layers of the upper blocks: {error.what}"
        do = "use --model to name the base it was trained on, or copy the whole folder again"
        raise ModelError(what, where=where, expected=f"a rank of {rank} in every layer", do=do) from None
    model.module.eval()
    mx.eval(model.module.parameters())
    return config, lora


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; raises ModelError with the name of a setting that is not supported."""
    where = str(folder / CONFIG)
    config = json_object(folder / CONFIG)
    if not config:
        do = "name the folder that PEFT wrote"
        raise ModelError("PEFT's configuration is missing or cannot be read.", where=where, do=do)
    for key, value in {"peft_type": None, "r": None, "lora_alpha": None, **config}.items():
        if key in NUMBERS:
            is_supported = type(value) in NUMBERS[key] and value > 0
        else:
            is_supported = key in KNOWN or value in SUPPORTED.get(key, SET_NOWHERE)
        if not is_supported:
            what = f"This adapter is not supported: {key} is {json.dumps(value)[:60]}."
            raise ModelError(what, where=where, do=MERGE)
    if not (folder / WEIGHTS).is_file():  # older adapters are pickles, which may run any code
        do = "save the adapter again in PEFT: save_pretrained(folder, safe_serialization=True)"
        raise ModelError(f"The adapter is incomplete: {WEIGHTS} is missing.", where=str(folder), do=do)
    return config
