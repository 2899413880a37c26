"""Exports adapters to PEFT, bit for bit, and reads them back to compare them with the tuned model.

A layer has lora_a (inputs, rank) and lora_b (rank, outputs) here, lora_A (rank, inputs) and lora_B (outputs, rank) in
PEFT. DoRA's magnitudes, (outputs,), are called m here and lora_magnitude_vector in PEFT.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import lora_number
from safetrain.core.records.evaluation import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import full_disk_named, json_object, require_new, write_folder, write_record
from safetrain.engine.adapters import make_trainable, set_adapter_weights
from safetrain.engine.model import BaseModel
from safetrain.engine.weight_files import adapter_arrays, bytes_of, save_arrays
from safetrain.export.comparison import ExportComparison, ExportJob

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAME_NAMES = (  # families with the same layer names in transformers and mlx-lm: benchmarks/bench_export_peft.py
    "cohere", "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "helium", "hunyuan_v1_dense",
    "llama", "ministral3", "mistral", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
THEIRS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
OURS = {name: ours for ours, name in THEIRS.items()}
PREFIX = "base_model.model."


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
        raise ModelError(what, where=job.adapter, do="merge the adapter into its base instead: safetrain fuse OUT")
    comparison, reports = ExportComparison(job, files, say), list[ExportReport]()

    def write(folder: Path) -> None:
        model = job.open(job.base)
        write_peft(job.adapter, arrays, base_name, folder)
        open_peft(model, folder)
        size = bytes_of(arrays)
        report, refused = comparison.of(model, "exported adapter, reloaded", "peft", size)
        if refused is not None:
            raise refused
        reports.append(report)
        write_record(folder / EXPORT_REPORT, report)

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


def require_same_names(base: Path) -> None:
    """Raise ModelError if the family's layers may have other names in transformers, as in models that see images."""
    family = json_object(base / "config.json").get("model_type")  # not that of a text part
    if family not in SAME_NAMES:
        what = f"Layers of {family} may have other names or another order in transformers than in mlx-lm."
        do = "to export any family, merge adapter and base: safetrain fuse OUT"
        raise ModelError(what, where=base, expected=f"one of {', '.join(SAME_NAMES)}", do=do)


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
        renamed[f"{PREFIX}{path}.{THEIRS[kind]}"] = value if kind == "m" else mx.contiguous(value.T)
    save_arrays(folder / WEIGHTS, renamed, "pt")


def open_peft(model: BaseModel, folder: Path) -> None:
    """Put the adapter in ``folder`` on an opened base, by PEFT's files alone. Raises ModelError if it does not fit."""
    config, weights = json_object(folder / CONFIG), dict[str, mx.array]()
    for key, value in adapter_arrays(folder, WEIGHTS).items():
        path, _, kind = key.removeprefix(PREFIX).partition(".lora_")
        name, array = OURS[f"lora_{kind}"], value.astype(mx.float32)
        weights[f"{path}.{name}"] = array if name == "m" else mx.contiguous(array.T)
    places = [re.split(r"\.(\d+)\.", path, maxsplit=1)[1:] for path in config["target_modules"]]  # block, layer
    blocks = len(model.module.layers) - min(int(number) for number, _ in places)
    rank, targets = config["r"], tuple(sorted({name for _, name in places}))
    lora = LoraSettings(rank, config["lora_alpha"] / rank, 0.0, blocks, targets)
    make_trainable(model, "dora" if config["use_dora"] else "lora", lora, seed=0)
    set_adapter_weights(model, weights)
    model.module.eval()
    mx.eval(model.module.parameters())
