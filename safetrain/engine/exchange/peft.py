"""Exports adapters to PEFT and imports them, bit for bit; a setting that is not supported is refused by name.

Here a pair is lora_a (inputs, rank) and lora_b (rank, outputs); PEFT's lora_A is (rank, inputs), lora_B (outputs,
rank). DoRA's magnitudes are m here, lora_magnitude_vector there, both (outputs,).
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from safetrain.core.errors import ModelError
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.adapter_files import (
    fingerprint,
    lora_number,
    read_prompt_format,
    require_base,
)
from safetrain.core.records.fusing import EXPORT_REPORT, PeftReport, describe, kept_share, refusal
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import full_disk_named, require_new, write_folder, write_record
from safetrain.engine.adapters import LINEAR, make_trainable, set_adapter_weights, shape_of
from safetrain.engine.backend import set_limits
from safetrain.engine.model import BaseModel, open_base
from safetrain.engine.tuned import ExportJob, measure_tuned
from safetrain.engine.upstream.layers import without_adapter
from safetrain.engine.weight_files import adapter_arrays, load_arrays, save_adapter, save_arrays

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
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
MAY_LOSE = 0.02  # share of the improvement; rounding takes far less
TRIED_TOKENS = 16  # spread over the vocabulary
NO_CHANGE = 1e-5  # share of the largest logit: rounding in float32
COPY_AGAIN = "copy the whole folder again"
MERGE = "merge it into its base with PEFT (merge_and_unload), and use the result"


@dataclass(frozen=True)
class PeftShape:
    """Settings of a PEFT adapter; ``scale`` multiplies the product of each pair."""

    rank: int
    scale: float
    dora: bool = False
    by_root: bool = False  # rsLoRA: alpha is divided by the root of the rank, arXiv 2312.03732
    dropout: float = 0.0
    base_name: str = ""


@dataclass(frozen=True)
class LayerPlace:
    """A linear layer that can carry an adapter: its block, its name in the block, its output and input width."""

    block: int
    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ImportedAdapter:
    """A PEFT adapter in this project's form, with float32 arrays by name."""

    shape: PeftShape
    lora: LoraSettings  # its targets are full names inside a block
    weights: dict[str, mx.array]


@dataclass(frozen=True)
class PeftExportJob(ExportJob):
    """What to write for PEFT."""

    adapter: Path
    base_name: str  # of the float model that PEFT loads it on


def export_peft(job: PeftExportJob, say: Callable[[str], None]) -> PeftReport:
    """Write the adapter for PEFT to ``job.out``, complete or not at all, with its report.

    Raises ConfigError if the target exists, ModelError if PEFT cannot hold the adapter, adapter and base do not match
    or the written adapter gives other results, and DiskFullError.
    """
    parent = require_new(job.out)
    files = read_model_files(job.base)
    require_base(job.adapter, job.base, files.fingerprint)
    require_same_names(job.base)
    arrays = adapter_arrays(job.adapter)
    require_pairs(arrays, job.adapter)
    set_limits(job.mlx_limit_bytes)
    tuned = measure_tuned(job, files)
    base, size, rows = job.measure_base(tuned, files, say), sum(value.nbytes for value in arrays.values()), tuned.rows
    say(describe("base and adapter", files.static_bytes + size, 1.0, tuned.own, len(rows)))
    form, reports = read_prompt_format(job.adapter), list[PeftReport]()

    def write(folder: Path) -> None:
        model = job.open(job.base)
        write_peft(job.adapter, arrays, places_of(model), job.base_name, folder)
        imported = put_on(model, folder)
        likeness = tuned.likeness_of(model)
        share = kept_share(base, tuned.own, likeness)
        why = refusal(share, likeness, MAY_LOSE)
        say(describe("exported adapter, reloaded", size, share, likeness, len(rows), why or "passes"))
        same = imported.weights.keys() == arrays.keys() and all(
            mx.array_equal(value, imported.weights[name]).item() for name, value in arrays.items()
        )
        if not same or np.float32(lora_number(job.adapter, "scale")) != np.float32(imported.shape.scale):
            why = "its numbers differ after reloading"
        if why:
            where, do = str(job.adapter), "merge the adapter into its base instead: safetrain fuse OUT"
            raise ModelError("The exported adapter does not reproduce the tuned model.", where=where, got=why, do=do)
        report = PeftReport(
            str(job.base), files.fingerprint, files.quantization_bits, job.base_name, fingerprint(job.adapter),
            len(rows), len(tuned.keys), base, tuned.own, likeness, share, form.stop_ids if form else (),
        )  # fmt: skip
        reports.append(report)
        write_record(folder / EXPORT_REPORT, report)

    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        write_folder(job.out, write)
    return reports[0]


def import_peft(source: Path, base: Path, out: Path) -> tuple[ImportedAdapter, float, float]:
    """Convert the PEFT adapter in ``source`` for mlx-lm and this project into ``out``, complete or not at all.

    Returns it, its largest change of a logit on a few tokens, and the largest of these logits. Raises ConfigError if
    the target exists, ModelError if the adapter is not supported, does not fit the base or changes nothing, and
    DiskFullError.
    """
    parent = require_new(out)
    read_peft_config(source)  # before the model is opened
    files = read_model_files(base)
    require_same_names(base)
    model = open_base(base, dequantize=False)
    before = _logits(model, files)
    imported = put_on(model, source)
    largest, moved = float(np.abs(before).max()), float(np.abs(_logits(model, files) - before).max())
    if not moved > NO_CHANGE * largest:
        raise ModelError(
            "The adapter changes nothing: the model gives the same logits without it.",
            where=str(source),
            expected=f"a change of more than {NO_CHANGE * largest:.1e} (rounding)",
            got=f"{moved:.1e}",
            do="save the adapter in PEFT after training, and import it again",
        )
    method = "dora" if imported.shape.dora else "lora"
    with full_disk_named("The disk is full; nothing was written.", parent, "free some space"):
        save_adapter(model, method, imported.lora, base, out, base_fingerprint=files.fingerprint)
    return imported, moved, largest


def _logits(model: BaseModel, files: ModelFiles) -> np.ndarray:
    """Logits (tokens, vocabulary) of a few tokens that are spread over the vocabulary."""
    ids = np.linspace(0, files.vocab_size - 1, TRIED_TOKENS).astype(np.int64).tolist()
    return np.array(model.module(mx.array([ids]))[0].astype(mx.float32))


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
    """Shortest names that select exactly the ``adapted`` layers among ``blocks_of``, and their blocks (None: all)."""
    blocks = sorted({blocks_of[path] for path in adapted})
    for start in (r".*\.", r".*?\.\d+\."):  # q_proj, then self_attn.q_proj, of model.layers.3.self_attn.q_proj
        short = {path: re.sub(f"^{start}", "", path) for path in blocks_of}
        names = {short[path] for path in adapted}
        if {path for path, block in blocks_of.items() if block in blocks and short[path] in names} == adapted:
            return sorted(names), None if len(blocks) == 1 + max(blocks_of.values()) else blocks
    return sorted(adapted), None


def put_on(model: BaseModel, source: Path) -> ImportedAdapter:
    """Put the adapter in ``source`` on an opened base, ready to compute.

    Raises ModelError with the name of what does not fit or is not supported.
    """
    shape, places = read_peft_config(source), places_of(model)
    pairs = _pairs_in(source, shape, places)
    lowest, names = min(places[path].block for path in pairs), {places[path].name for path in pairs}
    for path, place in places.items():
        if place.block >= lowest and place.name in names and path not in pairs:
            what = f"This adapter has no weights for {path}, but has some for this layer in other blocks."
            raise ModelError(what, where=str(source), do=MERGE)
    weights: dict[str, mx.array] = {}
    for path, pair in pairs.items():
        weights[f"{path}.lora_a"] = mx.contiguous(pair["lora_A"].T)
        weights[f"{path}.lora_b"] = mx.contiguous(pair["lora_B"].T)
        if shape.dora:
            weights[f"{path}.m"] = pair["lora_magnitude_vector"]
    blocks = len(model.module.layers) - lowest
    lora = LoraSettings(shape.rank, shape.scale, shape.dropout, blocks, tuple(sorted(names)))
    make_trainable(model, "dora" if shape.dora else "lora", dataclasses.replace(lora, dropout=0.0), seed=0)
    set_adapter_weights(model, weights)
    model.module.eval()
    mx.eval(model.module.parameters())
    return ImportedAdapter(shape, lora, weights)


def _pairs_in(folder: Path, shape: PeftShape, places: Mapping[str, LayerPlace]) -> dict[str, dict[str, mx.array]]:
    """PEFT's arrays by layer and kind; raises ModelError if one has no layer, or another shape than its layer."""
    where, pairs = str(folder / WEIGHTS), dict[str, dict[str, mx.array]]()
    for key, value in _arrays_in(folder).items():
        match = KEY.match(key)
        if match is None or match[1] not in places:
            raise ModelError(
                f"This adapter does not fit: the base has no linear layer in a block for {key}.",
                where=where,
                expected="LoRA pairs on linear layers of the base's blocks",
                do="name the base that it was trained on with --model; if it has more than pairs (embedding, head, "
                "experts, whole layers), merge it with PEFT (merge_and_unload)",
            )
        pairs.setdefault(match[1], {})[match[2]] = value
    kinds = ("lora_A", "lora_B", "lora_magnitude_vector")[: 3 if shape.dora else 2]
    for path, pair in pairs.items():
        if sorted(pair) != sorted(kinds):
            raise ModelError(
                f"The adapter is incomplete, or does not match its configuration: {path}",
                where=where,
                expected=", ".join(kinds),
                got=", ".join(sorted(pair)),
                do=COPY_AGAIN,
            )
        place, rank = places[path], shape.rank
        shapes = ((rank, place.inputs), (place.outputs, rank), (place.outputs,))
        for kind, expected in zip(kinds, shapes, strict=False):
            if pair[kind].shape != expected:
                raise ModelError(
                    f"The adapter does not fit this base: {kind} of {path}.",
                    where=where,
                    expected=f"{expected}, for the base's layer and a rank of {rank}",
                    got=str(pair[kind].shape),
                    do="name the base that it was trained on with --model",
                )
    if not pairs:
        raise ModelError("The adapter's file is empty.", where=where, do=COPY_AGAIN)
    return pairs


def _arrays_in(folder: Path) -> dict[str, mx.array]:
    path = folder / WEIGHTS
    try:
        arrays = {name: value.astype(mx.float32) for name, value in load_arrays(path).items()}
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"The adapter's weights cannot be read: {error}",
            where=str(path),
            do=f"the file is damaged or half written: {COPY_AGAIN}",
        ) from error
    for name, value in arrays.items():
        if not mx.all(mx.isfinite(value)).item():
            raise ModelError(f"The adapter has infinite numbers or NaN: {name}.", where=str(path), do="train it again")
    return arrays


def read_peft_config(folder: Path) -> PeftShape:
    """Read the settings of a PEFT adapter; raises ModelError with the name of one that is not supported."""
    config, where = _configuration(folder), str(folder / CONFIG)
    kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
    start = config.get("init_lora_weights")
    for is_known, what, expected in (
        (kind == "LORA", f"peft_type is {kind!r}", "LORA, with or without DoRA"),
        (task in (None, "CAUSAL_LM"), f"task_type is {task!r}, whose head is not a language model's", "CAUSAL_LM"),
        (bias == "none", f"bias is {bias!r}: it has trained biases", "none"),
        (not config.get("fan_in_fan_out"), "fan_in_fan_out is true: its weights are stored transposed", "false"),
        (start in PLAIN_STARTS, f"init_lora_weights is {start!r}, which changes the base's weights",
         "true or false"),
        *(
            (value in SET_NOWHERE, f"{key} is {json.dumps(value)[:60]}", f"an adapter without {key}")
            for key, value in config.items() if key not in KNOWN
        ),
    ):  # fmt: skip
        if not is_known:
            raise ModelError(f"This adapter is not supported: {what}.", where=where, expected=expected, do=MERGE)
    rank, alpha, by_root = config.get("r", 0), config.get("lora_alpha", 0), bool(config.get("use_rslora"))
    dropout, name = config.get("lora_dropout"), str(config.get("base_model_name_or_path") or "")
    if type(rank) is not int or type(alpha) not in (int, float) or not (rank > 0 and alpha > 0):
        raise ModelError(
            "PEFT's configuration cannot be read.",
            where=where,
            expected="a whole number above 0 in r, and a number above 0 in lora_alpha",
            got=f"r is {rank!r}, lora_alpha is {alpha!r}",
        )
    scale = alpha / (math.sqrt(rank) if by_root else rank)
    dropout = float(dropout) if isinstance(dropout, (int, float)) else 0.0
    return PeftShape(rank, scale, bool(config.get("use_dora")), by_root, dropout, name)


def _configuration(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json; raises ModelError if one of the folder's files is missing."""
    named, path = "name the folder that PEFT wrote", folder / CONFIG
    if not folder.is_dir():
        raise ModelError("The folder does not exist.", where=str(folder), do=named)
    if not path.is_file():
        names = ", ".join(each.parent.name for each in sorted(folder.glob(f"*/{CONFIG}")))
        do = f"name the folder of one adapter: {names}" if names else named
        raise ModelError(f"No PEFT adapter found: {CONFIG} is missing.", where=str(folder), do=do)
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"PEFT's configuration cannot be read: {error}", where=str(path)) from None
    if "fine_tune_type" in config:
        do = f"safetrain ask --adapter {folder} …"
        raise ModelError("This adapter is in the format of MLX already.", where=str(folder), do=do)
    if (folder / PICKLE).is_file() and not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"The weights are a pickle ({PICKLE}), which may run any code when it is opened.",
            where=str(folder),
            expected=WEIGHTS,
            do="save the adapter again in PEFT: save_pretrained(folder, safe_serialization=True)",
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"The adapter is incomplete: {WEIGHTS} is missing.", where=str(folder), do=COPY_AGAIN)
    return config
