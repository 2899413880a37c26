"""Exports adapters to PEFT and imports them, bit for bit; a setting that is not supported is refused by name.

Here a pair is lora_a (inputs, rank) and lora_b (rank, outputs); PEFT's lora_A is (rank, inputs), lora_B (outputs,
rank). DoRA's magnitudes are m here, lora_magnitude_vector there, both (outputs,).
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import lora_number, require_base
from safetrain.core.records.fusing import EXPORT_REPORT, ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import full_disk_named, require_new, write_folder, write_record
from safetrain.engine.adapters import LINEAR, make_trainable, set_adapter_weights, shape_of
from safetrain.engine.backend import set_limits
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
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # of the pair; the base is unchanged
KNOWN = frozenset({  # read here, or without effect on a finished adapter
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_tie", "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
    "target_modules", "target_modules_to_tie", "task_type", "use_dora", "use_rslora",
})  # fmt: skip
SET_NOWHERE: tuple[object, ...] = (None, False, "", [], {})
KEY = re.compile(r"^base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$")
KINDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
NAMES = ("lora_A", "lora_B", "lora_magnitude_vector")
MERGE = "merge it into its base with PEFT (merge_and_unload), and use the result"


class LayerPlace(NamedTuple):
    """A linear layer that can carry an adapter: its block, its name in the block, its output and input width."""

    block: int
    name: str
    outputs: int
    inputs: int


def export_peft(job: ExportJob, base_name: str, say: Callable[[str], None]) -> ExportReport:
    """Write the adapter for PEFT to ``job.out``, complete or not at all, with its report.

    ``base_name``: the float model that PEFT loads it on. Raises ConfigError if the target exists, ModelError if PEFT
    cannot hold the adapter, adapter and base do not match or the written adapter gives other results, DiskFullError.
    """
    parent, files = require_new(job.out), read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    require_same_names(job.base)
    arrays = adapter_arrays(job.adapter)
    require_pairs(arrays, job.adapter)
    set_limits(job.mlx_limit_bytes)
    comparison, reports = ExportComparison(job, files, say), list[ExportReport]()

    def write(folder: Path) -> None:
        model = job.open(job.base)
        write_peft(job.adapter, arrays, places_of(model), base_name, folder)
        put_on(model, folder)
        size = sum(value.nbytes for value in arrays.values())
        report, why = comparison.of(model, "exported adapter, reloaded", "peft", size)
        if why:
            do = "merge the adapter into its base instead: safetrain fuse OUT"
            what = "The exported adapter does not reproduce the tuned model."
            raise ModelError(what, where=str(job.adapter), got=why, do=do)
        reports.append(report)
        write_record(folder / EXPORT_REPORT, report)

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


def import_peft(source: Path, base: Path, out: Path) -> tuple[Mapping[str, Any], LoraSettings]:
    """Convert the PEFT adapter in ``source`` for mlx-lm and this project into ``out``, complete or not at all.

    Returns PEFT's configuration and the settings here. Raises ConfigError if the target exists, ModelError if the
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
    """Raise ModelError if the family's layers may have other names in transformers, as in models that see images.

    ``base`` is a complete model folder.
    """
    family = json.loads((base / "config.json").read_text(encoding="utf-8")).get("model_type")
    if family not in SAME_NAMES:
        raise ModelError(
            f"Layers of {family} may have other names or another order in transformers than in mlx-lm.",
            where=str(base),
            expected=f"one of {', '.join(SAME_NAMES)}",
            do="to export any family, merge adapter and base: safetrain fuse OUT",
        )


def require_pairs(arrays: Mapping[str, mx.array], where: Path) -> None:
    """Raise ModelError unless all arrays are pairs on linear layers: PEFT's files hold nothing else."""
    for name, value in arrays.items():
        path, _, kind = name.rpartition(".")
        if kind not in KINDS or value.ndim != (1 if kind == "m" else 2):
            what = f"trains a mixture's experts ({path})" if kind in KINDS else f"has whole weights ({name})"
            raise ModelError(
                f"This adapter {what}, which a PEFT adapter cannot contain.",
                where=str(where),
                do="merge the adapter into its base instead: safetrain fuse OUT",
            )


def places_of(model: BaseModel) -> dict[str, LayerPlace]:
    """Linear layers of blocks, by path."""
    paths = {id(layer): path for path, layer in model.module.named_modules()}
    return {
        paths[id(layer)]: LayerPlace(number, name, *shape_of(layer))
        for number, block in enumerate(model.module.layers)
        for name, layer in block.named_modules()
        if isinstance(layer, LINEAR) and name not in without_adapter(block)
    }


def write_peft(
    adapter: Path, arrays: Mapping[str, mx.array], places: Mapping[str, LayerPlace], base_name: str, folder: Path
) -> None:
    """Write ``adapter``, whose arrays these are, for PEFT into ``folder``; raises ModelError, OSError."""
    rank = max(value.shape[1] for name, value in arrays.items() if name.endswith(".lora_a"))
    alpha = lora_number(adapter, "scale") * rank  # PEFT divides by the rank; equal up to a last bit
    names, blocks = targets_of({name.rpartition(".")[0] for name in arrays}, {p: at.block for p, at in places.items()})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "revision": None,
        "inference_mode": True, "r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora_number(adapter, "dropout"), "target_modules": names, "layers_to_transform": blocks,
        "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "modules_to_save": None, "use_dora": any(name.endswith(".m") for name in arrays),
        "use_rslora": False,
    }  # fmt: skip
    (folder / CONFIG).write_text(f"{json.dumps(config, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
    renamed = dict[str, mx.array]()
    for name, value in arrays.items():
        path, _, kind = name.rpartition(".")
        renamed[f"base_model.model.{path}.{KINDS[kind]}"] = value if kind == "m" else mx.contiguous(value.T)
    save_arrays(folder / WEIGHTS, renamed, "pt")


def targets_of(adapted: set[str], blocks_of: Mapping[str, int]) -> tuple[list[str], list[int] | None]:
    """Names that select exactly the ``adapted`` layers among ``blocks_of``, and their blocks (None: all)."""
    blocks, last = sorted({blocks_of[path] for path in adapted}), {path.rpartition(".")[2] for path in adapted}
    if {path for path, block in blocks_of.items() if block in blocks and path.rpartition(".")[2] in last} == adapted:
        return sorted(last), None if len(blocks) == 1 + max(blocks_of.values()) else blocks
    return sorted(adapted), None


def put_on(model: BaseModel, source: Path) -> tuple[Mapping[str, Any], LoraSettings]:
    """Put the adapter in ``source`` on an opened base, ready to compute; returns its configuration and settings.

    The targets of the settings are full names inside a block. Raises ModelError with the name of what does not fit.
    """
    config, places = read_peft_config(source), places_of(model)
    pairs = _pairs_in(source, config, places)
    lowest, names = min(places[path].block for path in pairs), {places[path].name for path in pairs}
    for path, place in places.items():
        if place.block >= lowest and place.name in names and path not in pairs:
            what = f"This adapter has no weights for {path}, but has some for this layer in other blocks."
            raise ModelError(what, where=str(source), do=MERGE)
    weights: dict[str, mx.array] = {}
    for path, pair in pairs.items():
        weights[f"{path}.lora_a"] = mx.contiguous(pair["lora_A"].T)
        weights[f"{path}.lora_b"] = mx.contiguous(pair["lora_B"].T)
        if config.get("use_dora"):
            weights[f"{path}.m"] = pair["lora_magnitude_vector"]
    rank, dropout, blocks = config["r"], config.get("lora_dropout") or 0.0, len(model.module.layers) - lowest
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)  # arXiv 2312.03732
    lora = LoraSettings(rank, scale, float(dropout), blocks, tuple(sorted(names)))
    method = "dora" if config.get("use_dora") else "lora"
    make_trainable(model, method, dataclasses.replace(lora, dropout=0.0), seed=0)
    set_adapter_weights(model, weights)
    model.module.eval()
    mx.eval(model.module.parameters())
    return config, lora


def _pairs_in(
    folder: Path, config: Mapping[str, Any], places: Mapping[str, LayerPlace]
) -> dict[str, dict[str, mx.array]]:
    """PEFT's float32 arrays by layer and kind; raises ModelError if one does not fit its layer."""
    where, pairs = str(folder / WEIGHTS), dict[str, dict[str, mx.array]]()
    for key, value in adapter_arrays(folder, WEIGHTS).items():
        match = KEY.match(key)
        if match is None or match[1] not in places:
            raise ModelError(
                f"This adapter does not fit: the base has no linear layer in a block for {key}.",
                where=where,
                expected="LoRA pairs on linear layers of the base's blocks",
                do="name the base that it was trained on with --model; if it has more than pairs (embedding, head, "
                "experts, whole layers), merge it with PEFT (merge_and_unload)",
            )
        if not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"The adapter has infinite numbers or NaN: {key}.", where=where, do="train it again")
        pairs.setdefault(match[1], {})[match[2]] = value.astype(mx.float32)
    if not any(mx.any(pair["lora_B"]).item() for pair in pairs.values() if "lora_B" in pair):
        do = "save the adapter in PEFT after training, and import it again"
        raise ModelError("The adapter changes nothing: it is empty, or all its lora_B are zero.", where=where, do=do)
    for path, pair in pairs.items():
        place, rank = places[path], config["r"]
        shapes = ((rank, place.inputs), (place.outputs, rank), (place.outputs,))
        expected = dict(zip(NAMES[: 3 if config.get("use_dora") else 2], shapes, strict=False))
        found = {kind: tuple(value.shape) for kind, value in sorted(pair.items())}
        if found != expected:
            raise ModelError(
                f"The adapter does not fit this base, or is incomplete: {path}.",
                where=where,
                expected=f"{expected}, for the base's layer and a rank of {rank}",
                got=str(found),
                do="name the base that it was trained on with --model, or copy the whole folder again",
            )
    return pairs


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; raises ModelError with the name of a setting that is not supported."""
    where = str(folder / CONFIG)
    try:
        config: dict[str, Any] = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        do = "name the folder that PEFT wrote"
        raise ModelError(f"PEFT's configuration cannot be read: {error}", where=where, do=do) from None
    kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
    start, rank, alpha = config.get("init_lora_weights"), config.get("r", 0), config.get("lora_alpha", 0)
    for is_known, what, expected in (
        (kind == "LORA", f"peft_type is {kind!r}", "LORA, with or without DoRA"),
        (task in (None, "CAUSAL_LM"), f"task_type is {task!r}, whose head is not a language model's", "CAUSAL_LM"),
        (bias == "none", f"bias is {bias!r}: it has trained biases", "none"),
        (not config.get("fan_in_fan_out"), "fan_in_fan_out is true: its weights are stored transposed", "false"),
        (start in PLAIN_STARTS, f"init_lora_weights is {start!r}, which changes the base's weights",
         "true or false"),
        (type(rank) is int and rank > 0, f"r is {rank!r}", "a whole number above 0"),
        (type(alpha) in (int, float) and alpha > 0, f"lora_alpha is {alpha!r}", "a number above 0"),
        *(
            (value in SET_NOWHERE, f"{key} is {json.dumps(value)[:60]}", f"an adapter without {key}")
            for key, value in config.items() if key not in KNOWN
        ),
    ):  # fmt: skip
        if not is_known:
            raise ModelError(f"This adapter is not supported: {what}.", where=where, expected=expected, do=MERGE)
    if not (folder / WEIGHTS).is_file():  # older ones have pickles, which may run any code
        do = "save the adapter again in PEFT: save_pretrained(folder, safe_serialization=True)"
        raise ModelError(f"The adapter is incomplete: {WEIGHTS} is missing.", where=str(folder), do=do)
    return config
